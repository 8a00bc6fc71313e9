"""The service: a thread that runs the steps of an engine, whoever submits, cancels, waits beside it, forks or fails."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infer.engine.engine import Engine, Output
from infer.engine.sequence import Sequence
from infer.engine.service import Heartbeat, Service
from infer.engine.stream import Stream
from infer.errors import ClosedError, InferError
from infer.outputs import Piece
from infer.runner.runner import CachedRunner
from infer.sampling_params import SamplingParams
from path_cases import CASES, CONTEXT, Case, Outcome, Way, World, by_definition, make_sequence, make_world
from watched import python_command

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="hardware: Linux only")
FAILED = "the engine has failed: MemoryError"
LONG = Case("long", tuple(b"abc ab"), SamplingParams(temperature=0, max_new_tokens=120, ignore_eos=True))
SHORT = replace(LONG, params=replace(LONG.params, max_new_tokens=4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def world(folder: Path) -> World:
    return make_world("llama", folder)


class Place:
    """A service over an engine that checks its cache after each step, and counts the sequences of each."""

    def __init__(self, world: World, num_slots: int = 8, *, max_steps: int | None = 4, **options: Any) -> None:
        self.world = world
        self.runner = CachedRunner(world.model, CONTEXT, num_slots=num_slots, settings=world.settings, **options)
        self.engine = Engine(self.runner, max_steps=max_steps)
        self.service = Service(self.engine)
        self.num_of_step = list[int]()
        self.may_step = threading.Event()
        self.may_step.set()
        self.on_step: Callable[[], object] = bool  # called at the beginning of each step, by the thread that runs it
        step = self.engine._step

        def watched_step() -> list[Output]:
            self.on_step()
            self.may_step.wait()
            outputs = step()
            self.runner.cache.check_integrity()
            self.num_of_step.append(len(outputs))
            return outputs

        self.engine._step = watched_step  # type: ignore[method-assign]

    def submit(self, case: Case, way: Way | None = None) -> "Told":
        way = way or Way()
        expected = by_definition(self.world, case).token_ids if way.drafts not in ("none", "ngram") else ()
        told = Told(make_sequence(self.world, case, way, expected))
        self.service.submit(told.sequence, told)
        return told

    def stream(self, case: Case) -> Stream:
        return Stream(self.engine, self.engine.submit(make_sequence(self.world, case, Way())))


@pytest.fixture
def place(world: World) -> Iterator[Place]:
    made = Place(world)
    yield made
    made.may_step.set()
    made.service.close()


class Told:
    """A reader of one sequence: what the service told it."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence, self.pieces = sequence, list[Piece]()
        self.num_calls = 0
        self.has_begun, self.has_ended = threading.Event(), threading.Event()

    def __call__(self, outputs: list[Output]) -> None:
        assert not self.has_ended.is_set()
        self.num_calls += 1
        for sequence, pieces in outputs:
            assert sequence is self.sequence
            self.pieces += pieces
        self.has_begun.set()
        if self.sequence.has_ended:
            self.has_ended.set()

    def outcome(self) -> Outcome:
        self.has_ended.wait()
        assert self.pieces == self.sequence.pieces
        return Outcome.of(self.sequence.result())


def check(told: Told, expected: Outcome) -> None:
    found = told.outcome()
    if found.finish_reason == "abort":
        assert found.token_ids == expected.token_ids[: len(found.token_ids)]
    else:
        assert found == expected


def in_threads(calls: list[Callable[[], None]]) -> None:
    raised = list[BaseException]()

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


# Answers


@pytest.mark.parametrize("pool_pages", [None, 4], ids=["pages for all", "few pages"])
@pytest.mark.parametrize("drafts", ["none", "ngram", "half"])
def test_every_answer_under_load_is_that_of_the_sequence_alone(
    world: World, drafts: Any, pool_pages: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sampler with every grammar, from four threads that cancel some of them midway."""
    monkeypatch.setattr("infer.engine.queue.EXPECTED_ANSWER", 8)  # so more may enter than the pages hold
    monkeypatch.setattr("infer.engine.admission.LEARNT", 0.0)
    place = Place(world, 6, pool_pages=pool_pages)

    def ask(part: int) -> None:
        told = [(place.submit(case, Way(drafts, 17)), case) for case in CASES[part::4]]
        doomed = [place.submit(LONG) for _ in range(3)]
        for each in doomed:
            each.has_begun.wait()
            place.service.cancel(each.sequence)
        for each, case in told:
            check(each, by_definition(world, case))
        for each in doomed:
            check(each, by_definition(world, LONG))

    in_threads([lambda part=part: ask(part) for part in range(4)])  # type: ignore[misc]
    assert max(place.num_of_step) == 6 if pool_pages is None else max(place.num_of_step) > 1
    assert place.service.num_sequences == len(place.engine.sequences) == 0
    place.service.close()


def test_a_reader_is_told_once_a_step_of_all_its_sequences(world: World, place: Place) -> None:
    told, all_ended = list[list[Output]](), threading.Event()

    def tell(outputs: list[Output]) -> None:
        told.append(outputs)
        if not place.engine.sequences:
            all_ended.set()

    place.may_step.clear()
    sequences = [make_sequence(world, replace(LONG, prompt=(97 + index,)), Way()) for index in range(4)]
    for sequence in sequences:
        place.service.submit(sequence, tell)
    place.may_step.set()
    all_ended.wait()
    assert len(told) <= len(place.num_of_step) < 40, "of 120 tokens each"
    assert {len(outputs) for outputs in told} >= {4}
    for sequence in sequences:
        pieces = [piece for outputs in told for each in outputs if each.sequence is sequence for piece in each.pieces]
        assert pieces == sequence.pieces
        assert len(pieces) == 120


def test_streams_and_the_service_go_through_the_same_steps(world: World, place: Place) -> None:
    """Callers who wait for tokens wait for the steps of the service, and run their own when it has none."""
    told = [place.submit(LONG) for _ in range(2)]
    longer = replace(LONG, params=replace(LONG.params, max_new_tokens=140))

    def read() -> None:
        assert Outcome.of(place.stream(longer).run()) == by_definition(world, longer)
        stream = place.stream(longer)
        assert [piece.token_id for piece in stream] == by_definition(world, longer).token_ids

    in_threads([read, read])
    for each in told:
        check(each, by_definition(world, LONG))
    assert max(place.num_of_step) == 4


def test_a_stream_is_closed_while_the_service_runs(world: World, place: Place) -> None:
    told = [place.submit(LONG) for _ in range(2)]
    for _ in range(3):
        with place.stream(LONG) as stream:
            next(stream)
        assert stream.result.token_ids == by_definition(world, LONG).token_ids[:1]
    for each in told:
        check(each, by_definition(world, LONG))


def test_a_caller_follows_nobody_from_the_thread_of_the_service(world: World, place: Place) -> None:
    found, has_run = list[Outcome](), threading.Event()

    def ask_again(outputs: list[Output]) -> None:
        if outputs[0].sequence.has_ended:
            found.append(Outcome.of(place.stream(SHORT).run()))
            has_run.set()

    place.service.submit(make_sequence(world, SHORT, Way()), ask_again)
    has_run.wait()
    assert found == [by_definition(world, SHORT)]


# Ends


def test_a_cancelled_sequence_ends_with_the_step_under_way(place: Place) -> None:
    """Running, or yet without a slot."""
    told = [place.submit(LONG) for _ in range(12)]
    for each in told[:8]:
        each.has_begun.wait()
    place.may_step.clear()
    for each in (told[1], told[11]):
        place.service.cancel(each.sequence)
    num_steps = len(place.num_of_step)
    place.may_step.set()
    for each in (told[1], told[11]):
        assert each.outcome().finish_reason == "abort"
    assert len(place.num_of_step) <= num_steps + 3
    assert told[11].pieces == []
    for each in told:
        place.service.cancel(each.sequence)
        each.has_ended.wait()
    assert place.runner.cache.free_pages == place.runner.cache.pool_pages


def test_a_reader_that_raises_ends_its_own_sequences_alone(world: World, place: Place) -> None:
    def fail(outputs: list[Output]) -> None:
        raise RuntimeError("Event loop is closed")

    broken = [make_sequence(world, LONG, Way()) for _ in range(2)]
    told = place.submit(LONG)
    for sequence in broken:
        place.service.submit(sequence, fail)
    assert told.outcome() == by_definition(world, LONG), "an abort would be the broken reader's fault"
    assert [sequence.finish_reason for sequence in broken] == ["abort"] * 2
    check(place.submit(SHORT), by_definition(world, SHORT))


def test_a_drained_service_finishes_what_it_has_and_takes_nothing_else(world: World, place: Place) -> None:
    told = [place.submit(LONG) for _ in range(3)]
    place.may_step.clear()
    assert not place.service.drain(0.01)
    with pytest.raises(InferError, match="takes no more requests: it is shutting down"):
        place.submit(SHORT)
    place.may_step.set()
    assert place.service.drain()
    assert [Outcome.of(each.sequence.result()) for each in told] == [by_definition(world, LONG)] * 3


@pytest.mark.parametrize("closes_the_engine", [False, True])
def test_closing_cancels_what_goes_on(place: Place, closes_the_engine: bool) -> None:
    told = [place.submit(LONG) for _ in range(10)]
    told[0].has_begun.wait()
    (place.engine if closes_the_engine else place.service).close()
    assert [each.outcome().finish_reason for each in told] == ["abort"] * 10
    place.service.close()
    assert place.service._thread is not None
    assert not place.service._thread.is_alive()
    with pytest.raises(ClosedError, match="the model is closed"):
        place.submit(SHORT)


def test_a_reader_may_close_the_service(world: World, place: Place) -> None:
    has_closed = threading.Event()

    def close(outputs: list[Output]) -> None:
        place.service.close()
        has_closed.set()

    sequence = make_sequence(world, LONG, Way())
    place.service.submit(sequence, close)
    has_closed.wait()
    place.service.close()
    assert sequence.finish_reason == "abort"


@pytest.mark.parametrize("error", [RuntimeError("planted\nin two lines"), MemoryError()], ids=repr)
def test_what_the_engine_raises_ends_all_and_is_said_once(
    error: Exception, world: World, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[BaseException | None]()
    monkeypatch.setattr(threading, "excepthook", lambda arguments: said.append(arguments.exc_value))
    told = [place.submit(LONG) for _ in range(12)]
    for each in told[:8]:
        each.has_begun.wait()

    def fail(*arguments: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(place.engine, "_sample", fail)
        for each in told:
            found = each.outcome()
            assert (found.finish_reason, found.stop_reason) == ("error", "internal")
            assert found.error is not None
            assert found.error in ("the engine has failed: RuntimeError: planted in two lines", FAILED)
            assert found.token_ids == by_definition(world, LONG).token_ids[: len(found.token_ids)]
        assert place.service._thread is not None
        place.service._thread.join()
    assert said == [error]
    assert place.service.failure is error
    assert place.service.drain()
    with pytest.raises(InferError, match=r"the engine has failed: .*: load the model again"):
        place.submit(SHORT)
    assert Outcome.of(place.stream(SHORT).run()) == by_definition(world, SHORT), "the engine itself begins anew"
    place.runner.cache.check_integrity()


def test_callers_beside_a_service_that_fails_go_on_without_it(
    world: World, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    told, sample = place.submit(LONG), place.engine._sample

    def fail_there(*arguments: Any) -> Any:
        if threading.current_thread() is place.service._thread and place.engine.followers._gates:
            raise MemoryError
        return sample(*arguments)

    monkeypatch.setattr(place.engine, "_sample", fail_there)
    longer = replace(LONG, params=replace(LONG.params, max_new_tokens=140))
    assert Outcome.of(place.stream(longer).run()) == by_definition(world, longer)
    assert told.outcome().finish_reason == "error"
    assert place.service._thread is not None
    place.service._thread.join()


# Its thread


def processor_seconds(thread: threading.Thread) -> float:
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


@needs_linux
def test_an_idle_service_uses_no_processor_time_and_begins_again(world: World, place: Place) -> None:
    for _ in range(2):
        check(place.submit(SHORT), by_definition(world, SHORT))
        thread = place.service._thread
        assert thread is not None
        used = [processor_seconds(thread)]
        while len(used) < 20 and used[-1] not in used[:-1]:  # on a busy machine it is yet to fall asleep
            time.sleep(0.3)
            used.append(processor_seconds(thread))
        assert used[-1] == used[-2], "a thread that looks again and again uses some each time"
        assert not place.service.heartbeat.is_stepping


def test_the_heart_beats_with_each_step(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that advances each time it is read, which no fast step and no busy machine can hide."""
    clock, seen = count(1.0), list[Heartbeat]()
    monkeypatch.setattr("infer.engine.service.time", SimpleNamespace(monotonic=lambda: next(clock)))
    place.on_step = lambda: seen.append(place.service.heartbeat)
    told = place.submit(LONG)
    told.has_ended.wait()
    assert len(seen) == len(place.num_of_step) > 3
    assert all(heartbeat.is_stepping for heartbeat in seen)
    assert all(one.seconds < other.seconds for one, other in pairwise(seen))


def test_a_step_that_hangs_shows_in_the_heartbeat(place: Place) -> None:
    is_in_step = threading.Event()
    place.may_step.clear()
    place.on_step = is_in_step.set
    told = place.submit(SHORT)
    is_in_step.wait()
    last = place.service.heartbeat
    assert last.is_stepping
    time.sleep(0.01)
    assert place.service.heartbeat == last
    place.may_step.set()
    told.has_ended.wait()


def test_a_service_that_is_dropped_takes_its_thread_along(world: World) -> None:
    place = Place(world)
    check(place.submit(SHORT), by_definition(world, SHORT))
    thread, service = place.service._thread, weakref.ref(place.service)
    assert thread is not None
    del place
    gc.collect()
    thread.join()
    assert service() is None


SCRIPT = """
import faulthandler, os, signal, sys, threading
faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)
os.register_at_fork(after_in_child=lambda: signal.alarm(60))  # a child that hangs says where
from infer import LLM, SamplingParams
from infer.engine.request_options import RequestOptions
from infer.engine.sequence import Sequence
LONG, SHORT = (SamplingParams(temperature=0, seed=1, max_new_tokens=count, ignore_eos=True) for count in (120, 4))
llm = LLM(sys.argv[1], threads=2)
host, prompt = llm._opened, "abc ab"
EXPECTED = {params: llm.generate(prompt, params).token_ids for params in (LONG, SHORT)}

class Told:
    def __init__(self, params):
        options = RequestOptions()
        self.sequence = Sequence(host.request(host.fit(prompt, params, options, None), params, options))
        self.has_begun, self.has_ended = threading.Event(), threading.Event()
        host.service.submit(self.sequence, self)

    def __call__(self, outputs):
        self.has_begun.set()
        if self.sequence.has_ended:
            self.has_ended.set()

    def check(self):
        self.has_ended.wait()
        assert self.sequence.generated == EXPECTED[self.sequence.params]
"""


def run_script(code: str, folder: Path) -> None:
    command = python_command(SCRIPT + code, folder, options=("-W", "error"))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "INFER_POISON": "0"})
    assert (done.returncode, done.stderr) == (0, "")


def test_a_process_ends_cleanly_while_its_service_runs(folder: Path, world: World) -> None:
    run_script("told = [Told(LONG) for _ in range(20)]; told[0].has_begun.wait()", folder)


@needs_linux
def test_a_forked_child_starts_a_service_of_its_own(folder: Path, world: World) -> None:
    """There the sequences of its parent are cancelled; here they go on unharmed."""
    run_script(
        """
for _ in range(4):
    told = [Told(LONG) for _ in range(10)]
    told[0].has_begun.wait()
    child = os.fork()
    if child == 0:
        assert host.service.num_sequences == 0
        assert all(each.sequence.finish_reason in ("abort", "length") for each in told)
        assert llm.generate(prompt, SHORT).token_ids == EXPECTED[SHORT]
        assert not host.engine.sequences
        for _ in range(2):
            Told(SHORT).check()
        llm.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for each in told:
        each.check()
""",
        folder,
    )


@needs_linux
def test_ctrl_c_ends_the_caller_who_waits_beside_the_service_and_nobody_else(folder: Path, world: World) -> None:
    run_script(
        """
signal.signal(signal.SIGINT, signal.default_int_handler)
step, is_held, followers = host.engine._step, threading.Event(), host.engine.followers
def held_step():
    # In the thread of the service: until the main thread waits for the end of the step, and is interrupted.
    if is_held.is_set() and threading.current_thread() is host.service._thread:
        while not followers._gates:
            pass
        is_held.clear()
        os.kill(os.getpid(), signal.SIGINT)
    return step()
host.engine._step = held_step
for _ in range(3):
    stream = llm.stream(prompt, LONG)
    is_held.set()
    told = [Told(LONG) for _ in range(3)]
    while not followers._leader:
        pass
    try:
        for _ in stream:
            pass
        sys.exit("nothing was interrupted")
    except KeyboardInterrupt:
        pass
    for each in told:
        each.check()
    assert stream.sequence.has_ended
    Told(SHORT).check()
    assert llm.generate(prompt, SHORT).token_ids == EXPECTED[SHORT]
""",
        folder,
    )
