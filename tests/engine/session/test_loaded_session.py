"""A loaded session answers as the saved one, to the bit, with any cache and after any other answers.

In tests, new pages are filled with NaN (`INFER_POISON`), so an answer from unwritten values has no tokens.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import Phi3Config

from byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from extent import usual_or_all
from infer import LLM, SamplingParams
from infer.compute.kvcache.paged import SPARE_TOKENS
from infer.engine.session.session import Session
from infer.outputs import GenerationResult
from path_cases import EOS, make_folder
from tiny import LONGROPE, Tiny, make_tiny

SLIDING = {"eviction_policy": "sliding", "eviction_window": 20, "protected_prefix": 3}
SNAPKV = {"eviction_policy": "snapkv", "eviction_window": 48, "protected_prefix": 3}
CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "windows": ("windows", {}),
    "whole": ("llama", {}),
    "whole, shared": ("llama", {"reuse_prefixes": True}),
    "sliding": ("llama", SLIDING),
    "sliding by a block": ("llama", SLIDING | {"eviction_window": 33, "protected_prefix": 17}),
    "sliding, long": ("llama", SLIDING | {"eviction_window": 90, "max_seq_len": 400}),
    "sliding and windows": ("windows", SLIDING),
    "sliding, f32": ("llama", SLIDING | {"kv_type": "f32", "protected_prefix": 0}),
    "sliding if short of memory": ("llama", SLIDING | {"memory_threshold_mb": 1}),
    "snapkv": ("llama", SNAPKV),
    "snapkv and windows": ("windows", SNAPKV),
    "two sets of rope factors": ("longrope", {}),
    "convolutions": ("convolutions", {"reuse_prefixes": True}),
    "states": ("states", {"reuse_prefixes": True}),
    "windows, q8": ("wide", SLIDING | {"kv_type": "q8"}),
    "windows, q4": ("wide", SLIDING | {"kv_type": "q4", "protected_prefix": 0}),
}
PLAIN: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True, "logprobs": 0}
KINDS = [SamplingParams(temperature=0, **PLAIN), SamplingParams(temperature=1, seed=7, **PLAIN)]
KINDS.append(replace(KINDS[1], repetition_penalty=1.3))


@cache
def model_folder(name: str, base: Path) -> Path:
    folder = base / name
    folder.mkdir()
    if name != "longrope":
        return make_folder(name, folder)
    config = Phi3Config(**LONGROPE.config.to_dict() | {"vocab_size": VOCAB_SIZE, "eos_token_id": 256})
    make_tiny(Tiny("long", config), folder)
    write_byte_tokenizer(folder)
    return folder


@cache
def make_llm(name: str, base: Path) -> LLM:
    model, options = CACHES[name]
    return LLM(model_folder(model, base), **options)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def make_ids(count: int, seed: int = 0) -> list[int]:
    return [(7 * index + index * index // 9 + 31 * seed) % min(EOS, 250) for index in range(count)]


def outcome(result: GenerationResult) -> tuple[Any, ...]:
    assert result.error is None
    return result.token_ids, [entry.logprob for entry in result.logprobs]


NUMBERS = {
    "append": st.sampled_from([1, 9, 30]),
    "generate": st.integers(0, 2),
    "rewind": st.one_of(st.sampled_from([1, SPARE_TOKENS, SPARE_TOKENS + 1]), st.integers(0, 40)),
    "fork": st.just(0),
    "save and load": st.just(0),
    "answer another": st.sampled_from([30, 100]),
}
CALLS = st.lists(st.one_of(*(st.tuples(st.just(name), number) for name, number in NUMBERS.items())), max_size=9)


def check(llm: LLM, length: int, calls: list[tuple[str, int]], path: Path) -> None:
    """Make calls on a session, and compare each answer with that of a prompt of its ids. Left sessions go on last."""
    session, ids, left = llm.session(), make_ids(length), list[tuple[Session, list[int]]]()
    session.append(ids)

    def answer(session: Session, ids: list[int], kind: SamplingParams) -> None:
        result = session.generate(kind)
        assert outcome(result) == outcome(llm.generate(ids, kind))
        ids += result.token_ids

    for name, number in calls:
        count, more = min(number, len(ids) - 1), make_ids(number, seed=len(ids))
        if name == "append" and len(ids) + number < 120:
            session.append(more)
            ids += more
        elif name == "generate" and len(ids) < 120:
            answer(session, ids, KINDS[number])
        elif name == "rewind":
            session.rewind(count)
            del ids[len(ids) - count :]
        elif name == "answer another":
            llm.generate(make_ids(number, seed=3), KINDS[0])
        elif name in ("fork", "save and load"):
            left.append((session, list(ids)))
            session.save(path)
            session = session.fork() if name == "fork" else llm.load_session(path)
        assert session.token_ids == ids
        llm.host.runner.cache.check_integrity()
    for each, its_ids in [*left, (session, ids)]:
        answer(each, its_ids, KINDS[1])


@pytest.mark.slow(cases=3, rest=6)
@pytest.mark.parametrize("name", CACHES)
def test_a_loaded_session_answers_as_the_one_that_was_saved(name: str, base: Path, tmp_path: Path) -> None:
    """So does a session after any other calls: an answer depends only on the ids."""
    llm = make_llm(name, base)

    @settings(max_examples=usual_or_all(6, 100), deadline=None, suppress_health_check=list(HealthCheck))
    @example(length=65, calls=[("rewind", 1), ("save and load", 0), ("generate", 0)])  # the rope factors of 65 tokens
    @given(length=st.integers(1, 110), calls=CALLS)
    def always(length: int, calls: list[tuple[str, int]]) -> None:
        check(llm, length, calls, tmp_path / "session")

    always()


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("name", ["windows", "sliding", "sliding and windows"])
@pytest.mark.parametrize("count", [0, 1, SPARE_TOKENS - 1])
def test_removed_turns_after_a_load_are_not_read_again(name: str, count: int, base: Path, tmp_path: Path) -> None:
    """This is true up to the number of tokens that are kept for it."""
    llm = make_llm(name, base)
    session = llm.session()
    session.append(make_ids(140))
    session.save(tmp_path / "session")
    loaded = llm.load_session(tmp_path / "session")
    loaded.rewind(count)
    assert loaded.num_cached_tokens == 140 - count
    result = loaded.generate(KINDS[0])
    assert result.reused_tokens == result.prompt_tokens - 1
    loaded.rewind(len(loaded.token_ids) - 60)
    assert loaded.num_cached_tokens == 0


def test_a_file_has_no_more_of_a_window_than_its_last_tokens_see(base: Path, tmp_path: Path) -> None:
    llm, sizes = make_llm("sliding", base), list[tuple[int, ...]]()
    for count in (120, 150):
        session = llm.session()
        session.append(make_ids(count))
        session.save(tmp_path / "session")
        stored = llm.host.runner.cache.export_row(session._cache.lease.slot or 0)
        (shape,) = {tuple(tensor.shape[:2]) for name, tensor in stored if name != "states"}
        sizes.append(shape)
    assert sizes == [(2, 20 - 1 + SPARE_TOKENS)] * 2
