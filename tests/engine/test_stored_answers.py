"""Answers have the bits that `data/answers.json` stores, on every x86 CPU: a change of all paths alike does not pass.

`scripts/store_answers.py` writes the file. An answer that a commit changes on purpose is named in its message.
"""

import platform
from collections.abc import Iterator
from typing import Any

import pytest

from answer_cases import CASES, Case
from answer_runs import Answers, Row, answers_in, differences, read_stored
from cases import cases
from infer.compute.backends.cpu.isa import target_features

STORED = read_stored()
IS_ARM = platform.machine() in ("aarch64", "arm64")
FUSES = IS_ARM or "fma" in target_features()


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    with answers_in(tmp_path_factory.mktemp("answers")) as answers:
        yield answers


def marked(case: Case) -> Any:
    """Leave a case out of `make test` unless it has a usual model, or is the first one of its model."""
    is_first = (case.model == "llama" and not case.settings) or case.name.endswith(": greedy")
    return pytest.param(case, marks=() if is_first else pytest.mark.slow, id=case.name)


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_an_answer_has_its_stored_bits(case: Case, answers: Answers) -> None:
    if not FUSES:
        pytest.skip("hardware: a CPU with FMA, which rounds a product and a sum once")
    stored, answer = STORED[case.name], answers.of(case)
    if IS_ARM:  # torch's cos and sin have other last bits there, and so has all that a rope turns; tokens are the same
        stored, answer = ({name: row[name] for name in ("ids", "ends") if name in row} for row in (stored, answer))
    found = differences(stored, answer)
    assert not found, f"{case.name}: {'; '.join(found)}"


def test_every_stored_answer_has_its_request() -> None:
    assert list(STORED) == [case.name for case in CASES]
    assert len(CASES) >= 98


@cases(
    "found message",
    ({"ids": [[1, 2, 4]], "logits": "ab"}, "token 2 of answer 0 is 4, stored is 3"),
    ({"ids": [[1, 2]], "logits": "ab"}, "token 2 of answer 0 is missing, stored is 3"),
    ({"ids": [[1, 2, 3, 5]], "logits": "ab"}, "token 3 of answer 0 is 5, stored is no token"),
    ({"ids": [[1, 2, 3], []], "logits": "ab"}, "there are 2 answers, stored are 1"),
    ({"ids": [[1, 2, 3]], "logits": "cd"}, "logits is cd, stored is ab"),
    ({"ids": [[1, 2, 3]]}, "logits is None, stored is ab"),
    ({"ids": [[1, 2, 3]], "logits": "ab", "logprobs": "ef"}, "logprobs is ef, stored is None"),
)
def test_a_difference_names_the_first_token_or_the_digest(found: dict[str, Any], message: str) -> None:
    stored: Row = {"ids": [[1, 2, 3]], "logits": "ab"}
    assert differences(stored, found) == [message]
    assert not differences(stored, dict(stored))
