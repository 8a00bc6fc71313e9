"""Multi-steps with a grammar: between two steps, Python advances it and fills the next mask."""

import ctypes
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from infer import GenerationResult, SamplingParams
from infer.compute import ops
from infer.compute.backends.cpu.capture.sampled import StepCallback
from infer.compute.backends.cpu.sample_records import SAMPLE
from infer.compute.backends.cpu.thread_records import fields_of
from infer.compute.backends.cpu.threads.atomics import call_python
from infer.errors import ConstraintError, EngineFailedError
from infer.text.grammar.constraint import Constraint
from path_cases import Case, Outcome, Place, Way, World, by_definition, make_sequence, run_all, run_alone

BOUND = Case("bound", tuple(b"abc abc"), SamplingParams(regex="[ab ]{40}", temperature=0.9, seed=1))
FREE = Case("free", tuple(b"cab"), SamplingParams(temperature=0.8, seed=2, max_new_tokens=30, ignore_eos=True))


Call = tuple[int, Callable[[], None]]
NEVER: Call = (-1, lambda: None)


class Watched(Constraint):
    """Wraps a constraint. A function is called before its n-th mask or after its n-th token."""

    def __init__(self, constraint: Constraint | None, *, at_mask: Call = NEVER, at_token: Call = NEVER) -> None:
        assert constraint is not None
        self._constraint, self._at_mask, self._at_token = constraint, at_mask, at_token
        self._num_masks, self._num_tokens = 0, 0

    def fill(self, mask: Any) -> None:
        self._num_masks += 1
        if self._num_masks == self._at_mask[0]:
            self._at_mask[1]()
        self._constraint.fill(mask)

    def accept(self, token_ids: Sequence[int]) -> int:
        if self._num_tokens + len(token_ids) >= self._at_token[0] > 0:
            self._at_token[1]()
        count = self._constraint.accept(token_ids)
        self._num_tokens += count
        return count

    def rollback(self, num_tokens: int) -> None:
        self._constraint.rollback(num_tokens)

    @property
    def num_accepted(self) -> int:
        return self._constraint.num_accepted

    def forced(self) -> list[int]:
        return self._constraint.forced()

    @property
    def done(self) -> bool:
        return self._constraint.done


def fail(error: BaseException) -> Callable[[], None]:
    def raise_it() -> None:
        raise error

    return raise_it


def test_a_row_that_a_grammar_holds_runs_in_chains(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.engine.step.grammar_masks.HAND_OVER_SECONDS", 100.0)  # no mask is slow
    result = run_alone(world, BOUND, Way(chain=8))
    assert Outcome.of(result) == by_definition(world, BOUND)
    assert result.stats.single_steps == 1
    assert result.stats.multi_step_tokens == len(result.token_ids) - 1
    assert result.stats.masks_filled <= len(result.token_ids)


def test_a_chain_ends_where_the_grammar_leaves_no_choice(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.engine.step.grammar_masks.HAND_OVER_SECONDS", 100.0)
    case = replace(BOUND, params=SamplingParams(regex="(?:[ab]{5} bar abc bar){2}", temperature=0.9, seed=3))
    result = run_alone(world, case, Way(chain=64))
    assert Outcome.of(result) == by_definition(world, case)
    assert result.stats.tokens_forced >= 4
    assert result.stats.multi_steps == 2


def test_tokens_that_a_grammar_forces_count_for_penalties(world: World) -> None:
    params = SamplingParams(regex="a{12}[ab]", temperature=0, frequency_penalty=2.0, logit_bias={ord("a"): 15.0})
    result = run_alone(world, replace(BOUND, params=params), Way())
    assert (result.text, result.stats.tokens_forced > 9) == (12 * "a" + "b", True)


@pytest.fixture(params=[0.0, 100.0], ids=["another thread", "between two steps"])
def hand_over(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the masks in another thread, or between two steps."""
    monkeypatch.setattr("infer.engine.step.grammar_masks.HAND_OVER_SECONDS", request.param)


def run_watched(world: World, place: Place, at_mask: Callable[[], None]) -> GenerationResult:
    """Return the result of a row, if a function is called when its sixth mask is filled."""
    running = make_sequence(world, BOUND, Way())
    running.grammar.constraint = Watched(running.grammar.constraint, at_mask=(6, at_mask))
    return place.stream(running).run()


@pytest.mark.usefixtures("hand_over")
@pytest.mark.parametrize("kind", ["fault", "op"])
def test_a_constraint_that_fails_or_runs_an_op_while_a_mask_is_filled_ends_the_answer(world: World, kind: str) -> None:
    """An op within a step would wait for ever for the step's end."""

    def use_an_op() -> None:
        ops.embed(world.model.embedding.parts[0], torch.zeros(1, dtype=torch.int64), 1.0)

    place = Place(world, Way())
    error = str(run_watched(world, place, use_an_op if kind == "op" else fail(KeyError("bug"))).error)
    assert ("an op, within a step that waits for it" if kind == "op" else "KeyError: 'bug'") in error
    assert Outcome.of(run_alone(world, BOUND, Way(), place=place)) == by_definition(world, BOUND)


@pytest.mark.usefixtures("hand_over")
def test_an_exception_that_asks_the_program_to_end_while_a_mask_is_filled_ends_the_engine(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = list[type[BaseException] | None]()
    monkeypatch.setattr("threading.excepthook", lambda arguments: reported.append(arguments.exc_type))
    place = Place(world, Way())
    with pytest.raises(EngineFailedError, match="the engine has failed: KeyboardInterrupt"):
        run_watched(world, place, fail(KeyboardInterrupt()))
    place.loop.close()
    assert reported == [KeyboardInterrupt]


def test_a_grammar_that_cannot_take_a_token_fails_only_its_row(world: World) -> None:
    for num_tokens in (1, 2, 6):
        waiting = [make_sequence(world, case, Way()) for case in (FREE, BOUND, replace(FREE, prompt=(97,)))]
        broken = fail(ConstraintError("too complex"))
        waiting[1].grammar.constraint = Watched(waiting[1].grammar.constraint, at_token=(num_tokens, broken))
        first, failed, last = run_all(world, waiting, Way(), 3)
        assert (failed.finish_reason, failed.error) == ("error", "too complex")
        assert failed.token_ids == by_definition(world, BOUND).token_ids[: num_tokens - 1]
        assert Outcome.of(first) == by_definition(world, FREE)
        assert Outcome.of(last) == by_definition(world, replace(FREE, prompt=(97,)))


@njit
def call_interrupted(raise_signal: int, number: int, follow: int) -> None:
    call_python(raise_signal, number)
    call_python(follow, 1)


def test_an_interrupt_that_came_while_compiled_code_ran_is_raised_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", dropped.append)
    raise_signal = ctypes.cast(ctypes.CDLL(None)["raise"], ctypes.c_void_p).value
    arguments, seen = np.ones(1, SAMPLE), list[int]()  # `stop` is set before each call
    callback = StepCallback(lambda number: seen.append(number) is None, fields_of(arguments))
    call_interrupted(raise_signal, 0, callback.address)
    assert (seen, int(arguments["stop"][0])) == ([1], 0)
    arguments["stop"] = 1
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        call_interrupted(raise_signal, int(signal.SIGINT), callback.address)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert (seen, int(arguments["stop"][0])) == ([1], 1)
    with pytest.raises(KeyboardInterrupt):
        callback.close()
    assert dropped == []


def test_a_callback_that_returns_false_stops_the_multi_step() -> None:
    arguments = np.ones(1, SAMPLE)
    callback = StepCallback(lambda number: False, fields_of(arguments))
    call_interrupted(ctypes.cast(ctypes.CDLL(None)["abs"], ctypes.c_void_p).value, 0, callback.address)
    callback.close()
    assert int(arguments["stop"][0]) == 1


def test_a_grammar_that_forces_or_ends_leaves_its_neighbours_their_steps(world: World) -> None:
    """Tokens that its row samples meanwhile are dropped: no answer has them, and no penalty counts them."""
    params = SamplingParams(temperature=0.9, seed=3, frequency_penalty=0.9, max_new_tokens=60)
    forcing = Case("forcing", tuple(b"abc"), replace(params, regex="([ab ]{5}cabcab[ab ]){4}"))
    ending = Case("ending", tuple(b"cba"), replace(params, regex="[ab ]{4}"))
    free = [replace(FREE, name=f"free {seed}", params=replace(FREE.params, seed=seed)) for seed in range(4)]
    way = Way(chain=30)
    sequences = [make_sequence(world, case, way) for case in (*free, forcing, ending)]
    for case, result in zip((*free, forcing, ending), run_all(world, sequences, way, 6), strict=True):
        assert Outcome.of(result) == by_definition(world, case)
    assert all(sequence.stats.multi_steps <= 2 for sequence in sequences[:4])
    assert sequences[4].stats.tokens_forced
