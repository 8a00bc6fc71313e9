"""A loaded session answers as the saved one, to the bit, with any cache and after any other answers.

In tests, new pages are filled with NaN (`INFER_POISON`), so an answer from unwritten values has no tokens.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import Phi3Config

from byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
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
    "windows, q8": ("wide", SLIDING | {"kv_type": "q8"}),
    "windows, q4": ("wide", SLIDING | {"kv_type": "q4", "protected_prefix": 0}),
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
}
PLAIN: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True, "logprobs": 0}
KINDS = [
    SamplingParams(temperature=0, **PLAIN),
    SamplingParams(temperature=1, seed=7, **PLAIN),
    SamplingParams(temperature=1, seed=7, repetition_penalty=1.3, **PLAIN),
]


@dataclass(frozen=True)
class Case:
    """The calls on a session before it is saved, on others meanwhile, and on the loaded session afterwards."""

    length: int
    answered: bool
    taken_back: int
    between: int  # tokens of another request
    rewound: int
    appended: int
    forks: bool
    saved_again: bool
    kind: SamplingParams


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
    assert result.logprobs is not None
    return result.token_ids, [entry.logprob for entry in result.logprobs]


def go_on(session: Session, case: Case) -> list[tuple[Any, ...]]:
    session.rewind(min(case.rewound, len(session.token_ids) - 1))
    session.append(make_ids(case.appended, seed=5))
    return [outcome(session.generate(case.kind)) for _ in range(2)]


def check(llm: LLM, case: Case, path: Path) -> None:
    session = llm.session()
    session.append(make_ids(case.length))
    if case.answered:
        session.generate(case.kind)
    session.rewind(min(case.taken_back, len(session.token_ids) - 1))
    before = session.token_ids
    session.save(path)
    if case.between:
        llm.generate(make_ids(case.between, seed=3), case.kind)
    loaded = llm.load_session(path)
    if case.saved_again:
        loaded.save(path)
        llm.generate(make_ids(40, seed=4), case.kind)
        loaded = llm.load_session(path)
    llm._opened.runner.cache.check_integrity()
    if case.forks:
        loaded = loaded.fork()
    found, expected = go_on(loaded, case), go_on(session, case)
    assert found == expected
    kept = before[: len(before) - min(case.rewound, len(before) - 1)]
    fresh = outcome(llm.generate([*kept, *make_ids(case.appended, seed=5)], case.kind))
    assert fresh[0] == found[0][0]
    assert fresh[1] == pytest.approx(found[0][1], abs=0)


COUNTS = st.integers(0, 20)
CASES = st.builds(
    Case,
    length=st.integers(1, 110),
    answered=st.booleans(),
    taken_back=COUNTS,
    between=st.sampled_from([0, 30, 100]),
    rewound=st.one_of(st.sampled_from([0, 0, 1, SPARE_TOKENS, SPARE_TOKENS + 1]), COUNTS),
    appended=st.sampled_from([0, 0, 1, 9]),
    forks=st.booleans(),
    saved_again=st.booleans(),
    kind=st.sampled_from(KINDS),
)


@pytest.mark.parametrize("name", CACHES)
def test_a_loaded_session_answers_as_the_one_that_was_saved(name: str, base: Path, tmp_path: Path) -> None:
    llm = make_llm(name, base)

    @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
    @example(case=Case(65, False, 1, 0, 0, 0, False, False, KINDS[0]))  # its rope factors are those for 65 tokens
    @given(case=CASES)
    def always(case: Case) -> None:
        check(llm, case, tmp_path / "session")

    always()


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
    llm = make_llm("sliding", base)
    sizes = []
    for count in (120, 150):
        session = llm.session()
        session.append(make_ids(count))
        session.save(tmp_path / "session")
        stored = llm._opened.runner.cache.export_row(session._cache.lease.slot or 0)
        (shape,) = {tuple(tensor.shape[:2]) for name, tensor in stored if name != "states"}
        sizes.append(shape)
    assert sizes == [(2, 20 - 1 + SPARE_TOKENS)] * 2
