"""Sessions of models with states: an answer depends only on its ids, and a turn reads only new tokens."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Lfm2Config, PretrainedConfig, Qwen3_5TextConfig

from byte_tokenizer import write_byte_tokenizer
from infer import LLM
from test_session import GREEDY, NUM_TOKENS, SAMPLED, TEMPLATE, check_fresh
from tiny import Tiny, make_tiny

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
LONG = "a question of many words, which fills some pages of the cache. " * 5


@pytest.fixture(scope="module", params=CONFIGS)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp(request.param)
    make_tiny(Tiny(request.param, CONFIGS[request.param]), folder)
    write_byte_tokenizer(folder, merges=[("a", "b"), ("e", " ")], chat_template=TEMPLATE)
    return LLM(folder, reuse_prefixes=True)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_turn_reads_only_new_tokens(llm: LLM, params: Any) -> None:
    session = llm.session(system="be brief")
    for text in (LONG, "and now", "one more " * 9):
        cached = session.num_cached_tokens
        result = session.send(text, params)
        check_fresh(llm, session.token_ids[: -len(result.token_ids)], params, result)
        assert result.reused_tokens >= cached
        assert result.dropped_tokens == 0


def test_a_turn_whose_template_forgets_the_end_goes_on_from_the_page_before(llm: LLM) -> None:
    """The template drops all text before the bar, as others drop thoughts, so turns share only the first prompt."""
    session = llm.session(prefix="thought|")
    session.send(LONG, GREEDY)
    num_shared = len(llm.tokenizer.encode_chat([{"role": "user", "content": LONG}]))
    result = session.send("next", GREEDY)
    check_fresh(llm, session.token_ids[: -len(result.token_ids)], GREEDY, result)
    assert num_shared - 128 < result.reused_tokens <= num_shared


def test_forks_and_rewinds_depend_only_on_their_ids(llm: LLM) -> None:
    session = llm.session(system="be brief")
    session.send(LONG, GREEDY)
    before, other = list(session.token_ids), session.fork()
    for each, text in ((session, "left"), (other, "right"), (session, "left again")):
        result = each.send(text, GREEDY)
        check_fresh(llm, each.token_ids[: -len(result.token_ids)], GREEDY, result)
        assert result.reused_tokens > len(before) - 20
    num_tokens = len(session.token_ids)
    again = session.send("more", GREEDY)
    session.rewind(len(session.token_ids) - num_tokens)
    assert session.send("more", GREEDY).token_ids == again.token_ids


def test_a_saved_session_goes_on_with_its_state(llm: LLM, tmp_path: Path) -> None:
    session = llm.session(system="be brief")
    session.send(LONG, GREEDY)
    session.save(tmp_path / "saved.session")
    cached = session.num_cached_tokens
    wanted = session.send("and then", SAMPLED)
    loaded = llm.load_session(tmp_path / "saved.session")
    found = loaded.send("and then", SAMPLED)
    assert found.token_ids == wanted.token_ids
    assert found.reused_tokens >= cached


def test_answers_that_wait_for_states_are_the_same(tmp_path: Path) -> None:
    """There is memory for only a few pages, so some of the eight answers are preempted or wait."""
    net = Qwen3_5TextConfig(
        head_dim=32, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=32,
        linear_value_head_dim=32, **_SIZES,
    )  # fmt: skip
    make_tiny(Tiny("few", net), tmp_path)
    write_byte_tokenizer(tmp_path, merges=[("a", "b"), ("e", " ")], chat_template=TEMPLATE)
    prompts = [LONG[number:] for number in range(8)]
    wanted = LLM(tmp_path).generate_all(prompts, SAMPLED, batch_size=8)
    few = LLM(tmp_path, state_memory_mb=4, reuse_prefixes=True)
    found = few.generate_all(prompts, SAMPLED, batch_size=8)
    assert min(few._opened.engine.runner.cache.pool_pages) < 2 * len(prompts)
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
