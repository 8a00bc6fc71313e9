"""An exception of a signal's handler passes through the call unchanged, and the next call works."""

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infer import LLM, InvalidRequestError, SamplingParams
from infer.text.tokenizer import tokenizers_library

NUMBER = signal.SIGUSR1
SHORT = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_new_tokens=300, ignore_eos=True)


def stop(*_: object) -> None:
    raise ValueError("stop")


class Stopping:
    stop = __call__ = stop


HANDLERS: list[Callable[..., Any]] = [stop, partial(stop, 1), Stopping(), Stopping().stop, partial(partial(stop), 1)]


@pytest.fixture(params=HANDLERS, ids=["function", "partial", "object", "method", "partial of a partial"], autouse=True)
def handler(request: pytest.FixtureRequest) -> Iterator[None]:
    before = signal.signal(NUMBER, request.param)
    yield
    signal.signal(NUMBER, before)


def signal_in_step(llm: LLM, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send the signal from the loop's thread, in the step with this number."""
    engine, num_steps = llm.host.engine, 0
    launch = engine.launch

    def signalling_launch() -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == number:
            os.kill(os.getpid(), NUMBER)
            assert llm.host.loop.is_current
        return launch()

    monkeypatch.setattr(engine, "launch", signalling_launch)


def test_the_tokenizer_lets_it_pass() -> None:
    with pytest.raises(ValueError, match=r"\Astop\Z"), tokenizers_library.panics_as(InvalidRequestError):
        signal.raise_signal(NUMBER)


@pytest.mark.parametrize("step", [1, 2, 4])
def test_an_answer_lets_it_pass_and_the_next_one_is_right(llm: LLM, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate("a", LONG).token_ids
    for ask in (llm.generate, lambda *asked: list(llm.stream(*asked)), lambda *asked: llm.session().send(*asked)):
        with monkeypatch.context() as patched:
            signal_in_step(llm, step, patched)
            with pytest.raises(ValueError, match=r"\Astop\Z"):
                ask("a", LONG)
        assert not llm.host.engine.sequences
        assert llm.generate("a", LONG).token_ids == expected
    assert llm.host.loop.thread.failure is None


def test_a_callback_lets_it_pass(llm: LLM) -> None:
    expected, seen = llm.generate("a", LONG).token_ids, list[int]()

    def on_token(token_id: int, text: str) -> None:
        seen.append(token_id)
        if len(seen) == 5:
            signal.raise_signal(NUMBER)

    with pytest.raises(ValueError, match=r"\Astop\Z"):
        llm.generate("a", LONG, on_token=on_token)
    assert (seen, llm.generate("a", LONG).token_ids) == (expected[:5], expected)


def test_a_load_lets_it_pass(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"\Astop\Z"):
        LLM(folder, on_progress=lambda *_: os.kill(os.getpid(), NUMBER))
    assert LLM(folder).generate("a", SHORT).generated_tokens == 8
