"""Prompts store states where later prompts differ. These read at most one page in addition to their new text."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from transformers import Lfm2Config, PretrainedConfig, Qwen3_5TextConfig

from byte_tokenizer import write_byte_tokenizer
from infer import LLM, GenerationResult, SamplingParams
from infer.engine.requests.conversation import Conversation
from infer.engine.requests.request_maker import Ask
from infer.engine.requests.request_options import RequestOptions
from infer.engine.step.place import common_length
from test_session import GREEDY, GREEDY_VALUES, NUM_TOKENS, SAMPLED, TEMPLATE, check_turn, make_model
from tiny import Tiny, make_tiny
from tool_templates import QWEN35

_SIZES: dict[str, Any] = {"vocab_size": NUM_TOKENS + 4, "hidden_size": 64, "intermediate_size": 96}
_SIZES |= {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None}
_SIZES |= {"max_position_embeddings": 1600, "eos_token_id": NUM_TOKENS - 2}
CONFIGS: dict[str, PretrainedConfig] = {
    "convolutions": Lfm2Config(full_attn_idxs=[1, 3], **_SIZES),
    "states": Qwen3_5TextConfig(
        head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16, **_SIZES,
    ),
}  # fmt: skip
PAGE = 64
PARAMS = SamplingParams(**GREEDY_VALUES | {"logprobs": 2})
SYSTEM = {"role": "system", "content": "Rules of the house, which every question is asked under. " * 5}
QUESTIONS = [f"{number} of the questions that are asked here, with many words in it. " * 4 for number in range(4)]
REFUSING = "{% for message in messages %}{% if not message.content %}{{ raise_exception('empty') }}{% endif %}"
REFUSING += "{% endfor %}" + TEMPLATE
Both = tuple[LLM, LLM]


def conversation(question: str) -> list[dict[str, str]]:
    return [SYSTEM, {"role": "user", "content": question}]


def make_both(folder: Path, name: str, template: str = TEMPLATE) -> Both:
    """Return a model that reuses prefixes, and one that computes each prompt from its beginning."""
    make_tiny(Tiny(name, CONFIGS[name]), folder)
    write_byte_tokenizer(folder, merges=[("a", "b"), ("e", " ")], chat_template=template)
    return LLM(folder, reuse_prefixes=True), LLM(folder)


@pytest.fixture(params=CONFIGS)
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Both:
    return make_both(tmp_path, request.param)


def check_cold(cold: LLM, prompt: Any, result: GenerationResult) -> None:
    """Check that a newly loaded model gives the same answer, with the same bits."""
    expected = cold.generate(prompt, PARAMS)
    assert expected.reused_tokens == 0
    assert (result.token_ids, result.logprobs) == (expected.token_ids, expected.logprobs)


def check_reused(result: GenerationResult, num_shared: int) -> None:
    assert num_shared - PAGE < result.reused_tokens <= num_shared


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_turn_reads_only_new_tokens(both: Both, params: Any) -> None:
    llm, session = both[0], both[0].session(system="be brief")
    for text in (QUESTIONS[0], "and now", "one more " * 9):
        cached = session.num_cached_tokens
        result = check_turn(llm, session, text, params)
        assert result.reused_tokens >= cached
        assert result.dropped_tokens == 0


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_another_conversation_reads_at_most_a_page_of_the_system_message(both: Both, batch_size: int) -> None:
    """Conversations that come together read it once."""
    llm, cold = both
    prompts = [llm.tokenizer.encode_chat(conversation(question)) for question in QUESTIONS]
    num_shared = common_length(*prompts[:2])
    assert num_shared > 4 * PAGE
    results = llm.generate_all([conversation(question) for question in QUESTIONS], PARAMS, batch_size=batch_size)
    for number, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        check_cold(cold, prompt, result)
        check_reused(result, num_shared if number else 0)
        if batch_size == 1:
            assert result.stats.prefill_steps == 1 - min(number, 1), "only the first prompt is read in two steps"


@pytest.mark.slow(cases=1)
def test_a_turn_after_a_long_generation_prompt_that_is_dropped_reads_at_most_a_page_more(both: Both) -> None:
    llm, cold = both
    prefix = "think about it first, and then speak " * 12 + "|"
    session = llm.session(prefix=prefix)
    session.send(QUESTIONS[0], PARAMS)
    question = [{"role": "user", "content": QUESTIONS[0]}]
    num_shared = len(llm.tokenizer.encode_chat(question, add_generation_prompt=False))
    assert len(session.token_ids) > num_shared + 5 * PAGE
    result = session.send("next", PARAMS)
    check_cold(cold, session.token_ids[: -len(result.token_ids)], result)
    assert num_shared - PAGE < result.reused_tokens <= num_shared + len("[assistant]")


@pytest.mark.slow(cases=1)
def test_the_third_prompt_that_begins_alike_finds_a_state_without_a_template(both: Both) -> None:
    llm, cold = both
    common = [32 + index * index % 90 for index in range(333)]
    prompts = [[*common, *[40 + number] * 300] for number in range(4)]
    for prompt, num_shared in zip(prompts, (0, 0, 333, 333), strict=True):
        result = llm.generate(prompt, PARAMS)
        check_cold(cold, prompt, result)
        check_reused(result, num_shared)
        llm._opened.engine.runner.cache.check_integrity()


def test_a_short_prompt_and_a_template_that_refuses_have_no_checkpoints(tmp_path: Path) -> None:
    llm, cold = make_both(tmp_path, "states", REFUSING)
    for messages in (conversation(QUESTIONS[0]), [{"role": "user", "content": "short"}]):
        assert llm._opened.requests.request(Ask(messages, PARAMS)).checkpoints == ()
    result = llm.chat(conversation(QUESTIONS[0]), PARAMS)
    check_cold(cold, llm.tokenizer.encode_chat(conversation(QUESTIONS[0])), result)


def test_a_model_without_states_computes_no_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Conversation, "checkpoints", Mock(side_effect=AssertionError("there are no states")))
    llm = LLM(make_model(tmp_path, context=1600), reuse_prefixes=True)
    prompts = [llm.tokenizer.encode_chat(conversation(question)) for question in QUESTIONS]
    for number, question in enumerate(QUESTIONS):
        result = llm.chat(conversation(question), PARAMS)
        check_reused(result, common_length(*prompts[:2]) if number else 0)
        assert llm._opened.engine.runner.num_matched == 0


def test_qwen3_5_s_template_has_checkpoints_after_the_tools_and_before_the_generation_prompt(tmp_path: Path) -> None:
    """The template refuses a conversation without a question."""
    llm, _ = make_both(tmp_path, "states", QWEN35)
    tool = {"type": "function", "function": {"name": "look", "description": "Look. " * 30, "parameters": {}}}
    asks = [Ask(conversation(question), PARAMS, RequestOptions(tools=[tool])) for question in QUESTIONS[:2]]
    first, second = map(llm._opened.requests.request, asks)
    num_shared = common_length(first.prompt_token_ids, second.prompt_token_ids)
    ending = list(b"\n<|im_start|>assistant\n<think>\n")
    end = len(first.prompt_token_ids) - len(ending) - 1
    assert (list(first.prompt_token_ids[end + 1 :]), first.checkpoints) == (ending, (num_shared, end))
