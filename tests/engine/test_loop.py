"""The loop runs the steps of an engine while other threads submit, cancel, read, close or fail."""

import asyncio
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from infer.engine.engine import Engine
from infer.engine.requests.answer import Answer, EngineCall, Work, once
from infer.engine.requests.loop import Loop
from infer.engine.requests.stream import AsyncStream, Stream
from infer.engine.runner.runner import Runner
from infer.engine.step.sequence import Sequence
from infer.errors import ClosedError, EngineFailedError, InferError
from infer.outputs import Piece
from infer.sampling_params import SamplingParams
from looping import in_threads, loop_of, open_stream, until_idle
from path_cases import CASES, CONTEXT, Case, Outcome, Way, World, by_definition, make_sequence
from refusals import check_refused

ERRORS: list[tuple[BaseException, str]] = [
    (RuntimeError("planted\nin two lines"), "RuntimeError: planted in two lines")
]
ERRORS += [(kind(), kind.__name__) for kind in (MemoryError, KeyboardInterrupt, SystemExit)]
LONG = Case("long", tuple(b"abc ab"), SamplingParams(temperature=0, max_new_tokens=120, ignore_eos=True))
SHORT = replace(LONG, params=replace(LONG.params, max_new_tokens=4))


class Place:
    """A loop over an engine that checks its cache after each step, and counts the sequences of each."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.runner = Runner(world.model, CONTEXT, num_slots=8, settings=world.settings)
        self.engine = Engine(self.runner, max_steps=4)
        self.num_of_step = list[int]()
        self.may_step = threading.Event()
        self.may_step.set()
        self.on_step: Callable[[], object] = bool  # called at the beginning of each step, by the loop's thread
        self._step, self._launch = self.engine.step, self.engine.launch
        self.engine.step = self._watched_step  # type: ignore[method-assign]
        self.engine.launch = self._watched_launch  # type: ignore[method-assign]
        self.loop = loop_of(self.engine)

    def _watched_step(self) -> list[Sequence]:
        self.on_step()
        self.may_step.wait()
        found = self._step()
        self.runner.cache.check_integrity()
        return found

    def _watched_launch(self) -> Any:
        launched = self._launch()
        if launched is not None:
            self.num_of_step.append(len(launched.works))
        return launched

    def submit(self, case: Case) -> "Asked":
        return Asked(self.loop, make_sequence(self.world, case, Way()))

    def stream(self, case: Case) -> Stream:
        return open_stream(self.loop, make_sequence(self.world, case, Way()))


@pytest.fixture
def place(world: World) -> Iterator[Place]:
    made = Place(world)
    yield made
    made.may_step.set()
    made.loop.close()


class Asked:
    """A sequence, and the thread that reads its answer."""

    def __init__(self, loop: Loop, sequence: Sequence) -> None:
        self.sequence, self.answer, self.pieces = sequence, Answer(loop, sequence), list[Piece]()
        self.cancel = partial(loop.cancel, self.answer)
        self.answer.begin()

    def wait_for_first(self) -> None:
        self.answer.wait()
        self.pieces += self.answer.take() or ()

    def outcome(self) -> Outcome:
        while (pieces := self.answer.take()) != []:
            self.pieces += pieces or ()
            self.answer.wait()
        assert self.sequence.has_ended
        assert self.pieces == self.sequence.pieces
        return Outcome.of(self.answer.result())


def check(asked: Asked, expected: Outcome) -> None:
    found = asked.outcome()
    if found.finish_reason == "abort":
        assert found.token_ids == expected.token_ids[: len(found.token_ids)]
    else:
        assert found == expected


# Answers


@pytest.mark.parametrize("num_event_loops", [1, 2])
def test_an_event_loop_is_called_once_a_step_for_all_streams(world: World, place: Place, num_event_loops: int) -> None:
    num_calls = [0] * num_event_loops
    have_begun = threading.Barrier(num_event_loops + 1)

    async def read(stream: AsyncStream) -> list[Piece]:
        return [piece async for piece in stream]

    async def ask(index: int) -> None:
        event_loop = asyncio.get_running_loop()
        call_soon = event_loop.call_soon_threadsafe

        def count_call(*arguments: Any, **options: Any) -> Any:
            num_calls[index] += 1
            return call_soon(*arguments, **options)

        event_loop.call_soon_threadsafe = count_call  # type: ignore[method-assign]
        sequences = [make_sequence(world, replace(LONG, prompt=(97 + each,)), Way()) for each in range(4)]
        streams = [await AsyncStream.of(place.loop.answer(sequence)).begin() for sequence in sequences]
        have_begun.wait()
        for sequence, pieces in zip(sequences, await asyncio.gather(*map(read, streams)), strict=True):
            assert (pieces, len(pieces)) == (sequence.pieces, 120)
        event_loop.call_soon_threadsafe = call_soon  # type: ignore[method-assign]

    def let_go() -> None:
        have_begun.wait()
        place.may_step.set()

    place.may_step.clear()
    in_threads([let_go, *(lambda index=index: asyncio.run(ask(index)) for index in range(num_event_loops))])  # type: ignore[misc]
    assert len(place.num_of_step) < 40, "of 120 tokens each"
    assert max(place.num_of_step) == 4 * num_event_loops
    assert all(0 < num <= len(place.num_of_step) for num in num_calls)


@pytest.mark.parametrize("read", [next, Stream.run])
def test_the_thread_of_the_loop_waits_for_no_answer(world: World, place: Place, read: Callable[[Stream], Any]) -> None:
    """Finalizers may run on it. If one asks for an answer, it is refused and does not hang."""
    check_refused(lambda: place.loop.run(lambda: read(place.stream(SHORT))), "the engine's own thread", InferError)
    check_refused(lambda: place.loop.run(lambda: place.loop.run(bool)), "the engine's own thread", InferError)
    check(place.submit(SHORT), by_definition(world, SHORT))


def test_a_thread_that_drops_or_closes_a_stream_on_the_loop_does_not_wait(world: World, place: Place) -> None:
    streams = [place.stream(LONG) for _ in range(2)]
    sequences = [stream.sequence for stream in streams]
    for stream in streams:
        next(stream)
    place.loop.run(streams[0].close)
    place.loop.run(streams.clear)
    del stream
    until_idle(place.loop)
    assert {sequence.finish_reason for sequence in sequences} <= {"abort", "length"}  # one may have ended before


# Ends


def test_a_paused_answer_ends_with_its_event_loop(world: World, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is delivered to it, so no call of the event loop shows that it is closed."""
    monkeypatch.setattr("infer.engine.requests.answer.MAX_UNREAD", 8)

    async def begin() -> AsyncStream:
        stream = await AsyncStream.of(place.loop.answer(make_sequence(world, LONG, Way()))).begin()
        while not stream.sequence.is_paused:
            await asyncio.sleep(0.001)
        return stream

    left = asyncio.run(begin())
    until_idle(place.loop)
    assert left.sequence.finish_reason == "abort"


@pytest.mark.parametrize("closes_on_the_loop", [False, True])
def test_closing_cancels_active_answers(place: Place, closes_on_the_loop: bool) -> None:
    asked = [place.submit(LONG) for _ in range(10)]
    asked[0].wait_for_first()
    if closes_on_the_loop:
        place.loop.run(place.loop.close)
    place.loop.close()
    assert [each.outcome().finish_reason for each in asked] == ["abort"] * 10
    place.loop.close()
    assert not place.loop.thread.is_alive()
    for call in (lambda: place.submit(SHORT), lambda: place.loop.run(bool)):
        check_refused(call, "the model is closed", ClosedError)


def test_sequences_that_arrive_while_the_loop_is_closed_are_ended_or_refused(world: World) -> None:
    for _ in range(6):
        place, asked = Place(world), list[Asked]()

        def submit(place: Place = place, asked: list[Asked] = asked) -> None:
            try:
                while True:
                    asked.append(place.submit(SHORT))
            except ClosedError:
                return

        in_threads([submit, submit, place.loop.close])
        for each in asked:
            assert each.outcome().finish_reason in ("abort", "length")


# Faults


@pytest.mark.parametrize(("error", "told"), ERRORS, ids=repr)
def test_an_exception_of_the_engine_ends_all_answers_and_is_logged_once(
    error: BaseException, told: str, world: World, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that came before the exception are answered."""
    said, called, run = list[BaseException | None](), list[EngineCall[int]](), place.engine._steps.launch
    monkeypatch.setattr(threading, "excepthook", lambda arguments: said.append(arguments.exc_value))

    def fail_after_three(*arguments: Any) -> Any:
        if len(place.num_of_step) >= 3:
            in_threads([lambda: called.append(place.loop.call(once(len, "abc")))] * 2)
            raise error
        return run(*arguments)

    monkeypatch.setattr(place.engine._steps, "launch", fail_after_three)
    place.may_step.clear()
    stream = place.stream(LONG)
    stream.answer.begin()
    asked = [place.submit(LONG) for _ in range(12)]
    place.may_step.set()
    for each in asked:
        with pytest.raises(EngineFailedError):
            each.outcome()
        found = Outcome.of(each.sequence.result())
        assert (found.finish_reason, found.stop_reason) == ("error", "internal")
        assert found.error == f"the engine has failed: {told}"
        assert found.token_ids == by_definition(world, LONG).token_ids[: len(found.token_ids)]
    assert asked[0].pieces
    with pytest.raises(EngineFailedError, match="the engine has failed") as caught:
        list(stream)
    until_idle(place.loop)
    assert caught.value.__cause__ is place.loop.thread.failure is error
    assert said == [error]
    assert {reply.get() for reply in called} == {3}
    for call in (lambda: place.submit(SHORT), place.stream(SHORT).run):
        check_refused(call, r"the engine has failed: .*: load the model again", EngineFailedError)
    assert not place.engine.sequences


@pytest.mark.slow
def test_steps_that_fail_now_and_then_change_no_answer(world: World, place: Place) -> None:
    run, num_steps = place.engine._steps.launch, count(1)

    def fail_sometimes(*arguments: Any) -> Any:
        found = run(*arguments)
        if next(num_steps) % 2 == 0:
            raise MemoryError  # after the forward has written into the cache
        return found

    place.engine._steps.launch = fail_sometimes  # type: ignore[method-assign]
    asked = [(place.submit(case), case) for case in (SHORT, LONG, *CASES[:8])]
    assert Outcome.of(place.stream(LONG).run()) == by_definition(world, LONG)
    for each, case in asked:
        assert each.outcome() == by_definition(world, case)
    assert place.loop.thread.failure is None
    assert next(num_steps) > 2


# Its thread


@pytest.mark.skipif(sys.platform != "linux", reason="hardware: Linux only")
def test_an_idle_loop_uses_no_processor_time_and_begins_again(world: World, place: Place) -> None:
    for _ in range(2):
        check(place.submit(SHORT), by_definition(world, SHORT))
        clock, used = time.pthread_getcpuclockid(place.loop.thread.ident), list[float]()
        while len(used) < 2 or (used[-1] != used[-2] and len(used) < 20):  # on a busy machine, it falls asleep later
            time.sleep(0.3)
            used.append(time.clock_gettime(clock))
        assert used[-1] == used[-2], "a thread that looks again and again uses some each time"
        assert place.loop.thread.step_began is None


def test_the_thread_says_when_each_step_began(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances each time it is read, so fast steps and busy machines do not matter."""
    clock, seen = count(1.0), list[Any]()
    monkeypatch.setattr("infer.engine.requests.engine_thread.time", SimpleNamespace(monotonic=lambda: next(clock)))
    place.on_step = lambda: seen.append(place.loop.thread.step_began)
    place.submit(LONG).outcome()
    assert len(seen) >= len(place.num_of_step) > 3
    assert all(one < other for one, other in pairwise(seen))


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_loop_that_is_dropped_takes_its_thread_along(world: World, is_idle: bool) -> None:
    """The test does not use `Place`, which keeps a reference to the loop."""
    loop = loop_of(Engine(Runner(world.model, CONTEXT, num_slots=2)))
    stream = open_stream(loop, make_sequence(world, LONG, Way()))
    sequence = stream.sequence
    next(stream)
    if is_idle:
        assert Outcome.of(stream.run()) == by_definition(world, LONG)
    thread, dropped = loop.thread, weakref.ref(loop)
    del loop, stream
    thread.join(60)
    assert dropped() is None
    assert sequence.finish_reason in ("length", "abort")


# Calls


def test_work_is_done_in_slices_while_others_are_answered(world: World, place: Place) -> None:
    """Each step runs one slice."""
    num_steps, asked = list[int](), place.submit(LONG)

    def work() -> Work[None]:
        for _ in range(5):
            num_steps.append(len(place.num_of_step))
            yield

    asked.wait_for_first()
    place.loop.call(work()).get()
    assert asked.outcome() == by_definition(world, LONG)
    assert all(before < after for before, after in pairwise(num_steps[1:]) if after < len(place.num_of_step))


def test_an_exception_of_work_is_raised_in_its_caller(world: World, place: Place) -> None:
    asked, error = place.submit(LONG), KeyError("mine")
    with pytest.raises(KeyError) as caught:
        place.loop.run(Mock(side_effect=error))
    assert caught.value is error
    assert asked.outcome() == by_definition(world, LONG)
    assert place.loop.thread.failure is None


class Endless:
    """Work without an end, and events for its begin and its end."""

    def __init__(self) -> None:
        self.has_begun, self.is_ended = threading.Event(), threading.Event()

    def work(self) -> Work[None]:
        try:
            while True:
                self.has_begun.set()
                yield
        finally:
            self.is_ended.set()


@pytest.mark.parametrize(("is_closed", "message"), [(False, "the call was cancelled"), (True, "the model is closed")])
def test_work_that_is_cancelled_or_closed_ends_at_its_next_yield(place: Place, is_closed: bool, message: str) -> None:
    endless = Endless()
    reply = place.loop.call(endless.work())
    endless.has_begun.wait()
    (place.loop.close if is_closed else reply.cancel)()
    check_refused(reply.get, message, ClosedError if is_closed else InferError)
    assert endless.is_ended.is_set()


def test_work_whose_task_is_cancelled_ends_at_its_next_yield(place: Place) -> None:
    endless = Endless()

    async def ask() -> None:
        asked = asyncio.create_task(place.loop.call_as_task(endless.work()))
        await asyncio.to_thread(endless.has_begun.wait)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(ask())
    assert endless.is_ended.wait(60)


def test_a_stream_that_is_cancelled_before_its_request_is_prepared_computes_nothing(world: World, place: Place) -> None:
    async def ask() -> AsyncStream:
        may_prepare = threading.Event()

        async def prepare() -> Answer:
            await asyncio.to_thread(may_prepare.wait)
            return place.loop.answer(make_sequence(world, LONG, Way()))

        stream = AsyncStream(prepare)
        begun = asyncio.create_task(stream.begin())
        await asyncio.sleep(0)
        stream.cancel()
        may_prepare.set()
        await begun
        assert [piece async for piece in stream] == []
        await stream.close()  # a cancel does not wait for the loop's thread
        return stream

    stream = asyncio.run(ask())
    assert stream.sequence.finish_reason == "abort"
    assert not place.num_of_step
