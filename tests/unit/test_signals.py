"""What a signal's handler raises is the user's own: it is not taken for a failure of the call that it came out of."""

import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from infer import LLM, InvalidRequestError, SamplingParams
from infer.system.signals import raised_by_handler
from infer.tokenizer import backend

NUMBER = signal.SIGUSR1


class Stopping:
    def stop(self, *_: object) -> None:
        raise ValueError("stop")

    def __call__(self, number: int, frame: FrameType | None) -> None:
        raise ValueError("stop")


def stop(*_: object) -> None:
    raise ValueError("stop")


HANDLERS: list[Callable[..., Any]] = [stop, partial(stop, 1), Stopping(), Stopping().stop, partial(partial(stop), 1)]


@pytest.fixture(params=HANDLERS, ids=["function", "partial", "object", "method", "partial of a partial"], autouse=True)
def handler(request: pytest.FixtureRequest) -> Iterator[None]:
    before = signal.signal(NUMBER, request.param)
    yield
    signal.signal(NUMBER, before)


class Interrupted:
    """Another object's stand-in: the signal comes in the first call of one of its methods."""

    def __init__(self, real: Any, name: str) -> None:
        self._real, self._name = real, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            signal.raise_signal(NUMBER)
        return getattr(self._real, name)


def test_it_is_told_from_what_a_call_raises_itself() -> None:
    for call, expected in (partial(signal.raise_signal, NUMBER), True), (partial(int, "no number"), False):
        with pytest.raises(ValueError) as raised:
            call()
        assert raised_by_handler(raised.value) is expected


def test_the_tokenizer_lets_it_pass() -> None:
    with pytest.raises(ValueError, match=r"\Astop\Z"), backend._panics_as(InvalidRequestError):
        signal.raise_signal(NUMBER)


def test_an_answer_lets_it_pass_and_the_next_one_is_right(folder: Path) -> None:
    llm = LLM(folder)
    params = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    expected = llm.generate("a", params).token_ids
    stream = llm.stream("a", params)
    sequence: Any = stream.sequence
    sequence._text._detokenizer = Interrupted(sequence._text._detokenizer, "push")
    with pytest.raises(ValueError, match=r"\Astop\Z"):
        stream.run()
    assert not sequence.has_fault
    assert llm.generate("a", params).token_ids == expected
