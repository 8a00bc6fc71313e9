"""Models with large states or windows: the estimated memory is enough, and prompts store states where others differ."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import Gemma3TextConfig, PretrainedConfig, Qwen3_5TextConfig

import path_cases
from byte_tokenizer import write_byte_tokenizer
from infer import LLM, GenerationResult, ModelError, SamplingParams
from infer.cli import main
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.ops import backend_of
from infer.compute.sampling.history import History
from infer.engine.requests.ask import Ask
from infer.engine.requests.prompt_encoding import Conversation
from infer.engine.step.request_options import RequestOptions
from infer.engine.step.sequence import common_length
from infer.files import open_checkpoint
from infer.models.families import make_architecture
from infer.models.memory.memory_budget import PROCESS_BYTES, VOCABULARY_BYTES, MemoryBudget
from infer.models.memory.memory_estimate import LoadSettings
from refusals import check_refused, refusal
from test_session import GREEDY, GREEDY_VALUES, NUM_TOKENS, SAMPLED, TEMPLATE, check_turn, make_model
from tiny import Tiny, make_tiny
from tool_templates import QWEN35

CONTEXT, STATES_MB = 1024, 9  # the states of one row
CONFIG = Qwen3_5TextConfig(
    vocab_size=NUM_TOKENS + 4, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, bos_token_id=None, eos_token_id=NUM_TOKENS - 2, max_position_embeddings=CONTEXT,
    head_dim=32, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=64, linear_value_head_dim=64,
)  # fmt: skip
PROMPTS = [f"{number} is asked about many words that fill some pages of a cache. " * 4 for number in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("states")
    make_tiny(Tiny("states", CONFIG), found)
    write_byte_tokenizer(found, merges=[("a", "b"), ("e", " ")], chat_template=TEMPLATE)
    return found


@pytest.fixture(scope="module")
def large(folder: Path) -> LLM:
    return LLM(folder)


def smallest(folder: Path, num_tokens: int = CONTEXT) -> int:
    """Return the bytes that `infer estimate` names, without those of the process."""
    checkpoint, num_threads = open_checkpoint(folder), backend_of(torch.device("cpu")).num_threads()
    model = make_architecture(checkpoint.config), checkpoint.tensors, LoadSettings(num_threads=num_threads)
    return MemoryBudget.of(*model, CacheSettings(), num_tokens=num_tokens).model


def set_available(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr("infer.compute.backends.base.available_memory_bytes", lambda: num_bytes)
    process = PROCESS_BYTES + VOCABULARY_BYTES * CONFIG.vocab_size  # which `infer estimate` counts
    monkeypatch.setattr("infer.cli.commands.explain_command.available_memory_bytes", lambda: num_bytes + process)


def state_pages(llm: LLM) -> int:
    return llm.host.runner.cache.pool_pages[-1]


def test_states_take_a_share_and_the_minimum_opens(folder: Path, large: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert state_pages(large) == 2 * 64 + 8
    needed = smallest(folder)
    found = dict[int, int]()
    for spare in (0, 80_000_000, 800_000_000):
        set_available(monkeypatch, needed + spare)
        found[spare] = state_pages(LLM(folder))
    page_bytes = large.host.runner.cache.memory.page_bytes(large.host.runner.cache.groups[-1])
    assert 5 <= found[0] < found[80_000_000] < found[800_000_000]
    for spare, count in found.items():
        assert count * page_bytes <= 5 * page_bytes + (needed + spare) / 8 + 2**20
    set_available(monkeypatch, needed - 1)
    monkeypatch.setattr("infer.models.from_checkpoint.load_transformer", None)  # it is not called
    check_refused(lambda: LLM(folder, max_seq_len=CONTEXT), "max_seq_len=", ModelError)


def test_requests_wait_for_states_with_equal_answers(folder: Path, large: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also drafts, forks and sessions, whose rows hold states between their answers."""
    options = {"max_new_tokens": 80, "ignore_eos": True}
    params: list[Any] = [replace(each, **options) for each in (GREEDY, SAMPLED)]
    wanted = [[large.generate(prompt, each).token_ids for prompt in PROMPTS] for each in params]
    set_available(monkeypatch, smallest(folder))
    small = LLM(folder, reuse_prefixes=True)
    assert state_pages(small) == 5
    for each, answers in zip(params, wanted, strict=True):
        for drafts in ({}, {"speculation": "ngram"}):
            found = small.generate_all(PROMPTS, each, batch_size=6, **drafts)
            assert [(each.finish_reason, each.token_ids) for each in found] == [("length", ids) for ids in answers]
    sessions = [small.session() for _ in range(2)]
    for session in (*sessions, sessions[0].fork()):
        for text in (PROMPTS[0], "and now"):
            result = session.send(text, SAMPLED)
            prompt = session.token_ids[: -len(result.token_ids)]
            assert large.generate(prompt, SAMPLED).token_ids == result.token_ids
    small.host.runner.cache.check_integrity()


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("options", [{"state_memory_mb": 50_000}, {"pool_pages": 900_000}], ids=str)
def test_a_refusal_comes_before_loading_and_names_an_option_that_opens(
    folder: Path, options: dict[str, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (name,) = options
    set_available(monkeypatch, smallest(folder) + 4_000_000)
    with monkeypatch.context() as within:
        within.setattr("infer.models.from_checkpoint.load_transformer", None)
        value = int(re.findall(rf"{name}=(\d+) fits", refusal(lambda: LLM(folder, **options), ModelError))[0])
    assert LLM(folder, **{name: value}).generate("a", GREEDY).token_ids
    check_refused(lambda: LLM(folder, **{name: value + 2}), f"{name}={value} fits", ModelError)
    assert main(["estimate", str(folder), f"--{name.replace('_', '-')}", str(options[name])]) == 0
    assert f"it does not fit; {name}=" in capsys.readouterr().out


def test_the_least_memory_for_states_in_a_message_opens(folder: Path) -> None:
    message = f"state_memory_mb must be at least {STATES_MB}, the states of"
    check_refused(lambda: LLM(folder, state_memory_mb=1), message)
    assert state_pages(LLM(folder, state_memory_mb=STATES_MB)) == 5


def test_the_estimate_is_what_the_smallest_cache_allocates(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"state_memory_mb": STATES_MB, "pool_pages": CONTEXT // 64}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    for each in ([], arguments):
        assert main(["estimate", str(folder), "--json", *each]) == 0
        report = json.loads(capsys.readouterr().out)
        assert LLM(folder, **options).host.runner.cache.num_bytes == report["cache_bytes"]


def test_the_first_penalty_on_a_gpu_uses_the_history_that_the_load_has_allocated(
    folder: Path, large: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = LLM(folder, capture=False)
    runner, params = small.host.runner, replace(SAMPLED, repetition_penalty=1.4)
    wanted = [large.generate(prompt, params).token_ids for prompt in PROMPTS[:2]]
    with monkeypatch.context() as within:
        within.setattr("infer.models.transformer.Transformer.device", torch.device("meta"))
        runner.warm_up(NUM_TOKENS)
    allocated = runner._history
    assert allocated is not None
    assert (allocated.last.device.type, allocated.num_slots, allocated.vocab_size) == ("meta", 64, NUM_TOKENS)
    runner._history = History(64, CONTEXT, NUM_TOKENS)
    runner._history.begin(0, [5, 6, 7])  # of a request before a fault
    monkeypatch.setattr("infer.engine.runner.runner.History", Mock(side_effect=AssertionError("there is one")))
    assert [small.generate(prompt, params).token_ids for prompt in PROMPTS[:2]] == wanted


def test_vectors_of_texts_need_few_states_at_a_time(folder: Path, large: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = large.embed(PROMPTS)
    small = LLM(folder)
    set_available(monkeypatch, 60_000_000)
    assert [list(each) for each in small.embed(PROMPTS)] == [list(each) for each in wanted]


def test_vectors_beside_the_pool_of_a_device_are_refused_with_the_option_that_helps(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(folder)
    set_available(monkeypatch, 1_000_000)
    check_refused(lambda: llm.embed(PROMPTS), "tokens of cache in .* available: (free|max|state)")
    for name, value in (("computes_on_host", False), ("available_bytes", lambda self: 1_000_000)):
        monkeypatch.setattr(type(llm.model.backend), name, value)
    check_refused(lambda: llm.embed(PROMPTS), "vectors of texts need memory beside the pool.*with fewer pool_pages$")


def test_the_estimated_minimum_of_a_model_with_windows_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The windows of all slots share one pool, which is larger than the windows of one row."""
    windowed = Gemma3TextConfig(
        vocab_size=NUM_TOKENS + 4, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, head_dim=256, sliding_window=64, max_position_embeddings=8 * CONTEXT,
        eos_token_id=NUM_TOKENS - 2, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    make_tiny(Tiny("windows", windowed), tmp_path)
    write_byte_tokenizer(tmp_path, chat_template=TEMPLATE)
    set_available(monkeypatch, smallest(tmp_path, num_tokens=8 * CONTEXT))
    assert LLM(tmp_path, max_seq_len=8 * CONTEXT).generate("a", GREEDY).token_ids
    set_available(monkeypatch, smallest(tmp_path, num_tokens=8 * CONTEXT) - 1)
    check_refused(lambda: LLM(tmp_path, max_seq_len=8 * CONTEXT), r"max_seq_len=\d+ fits", ModelError)


# Checkpoints


_SIZES = {"vocab_size": NUM_TOKENS + 4, "max_position_embeddings": 1600, "eos_token_id": NUM_TOKENS - 2}
CONFIGS: dict[str, PretrainedConfig] = {
    name: type(path_cases.CONFIGS[name]).from_dict(path_cases.CONFIGS[name].to_dict() | _SIZES)
    for name in ("convolutions", "states")
}
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
        llm.host.engine.runner.cache.check_integrity()


def test_a_short_prompt_and_a_template_that_refuses_have_no_checkpoints(tmp_path: Path) -> None:
    llm, cold = make_both(tmp_path, "states", REFUSING)
    for messages in (conversation(QUESTIONS[0]), [{"role": "user", "content": "short"}]):
        assert llm.host.requests.make(Ask([messages], [PARAMS]))[0].checkpoints == ()
    result = llm.chat(conversation(QUESTIONS[0]), PARAMS)
    check_cold(cold, llm.tokenizer.encode_chat(conversation(QUESTIONS[0])), result)


def test_a_model_without_states_computes_no_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Conversation, "checkpoints", Mock(side_effect=AssertionError("there are no states")))
    llm = LLM(make_model(tmp_path, context=1600), reuse_prefixes=True)
    prompts = [llm.tokenizer.encode_chat(conversation(question)) for question in QUESTIONS]
    for number, question in enumerate(QUESTIONS):
        result = llm.chat(conversation(question), PARAMS)
        check_reused(result, common_length(*prompts[:2]) if number else 0)
        assert llm.host.engine.runner.cache.num_matched == 0


def test_qwen3_5_s_template_has_checkpoints_after_the_tools_and_before_the_generation_prompt(tmp_path: Path) -> None:
    """The template refuses a conversation without a question."""
    llm, _ = make_both(tmp_path, "states", QWEN35)
    tool = {"type": "function", "function": {"name": "look", "description": "Look. " * 30, "parameters": {}}}
    asks = [Ask([conversation(question)], [PARAMS], RequestOptions(tools=[tool])) for question in QUESTIONS[:2]]
    (first,), (second,) = map(llm.host.requests.make, asks)
    num_shared = common_length(first.prompt_token_ids, second.prompt_token_ids)
    ending = list(b"\n<|im_start|>assistant\n<think>\n")
    end = len(first.prompt_token_ids) - len(ending) - 1
    assert (list(first.prompt_token_ids[end + 1 :]), first.checkpoints) == (ending, (num_shared, end))
