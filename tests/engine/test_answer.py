"""An answer has bounded unread pieces and one reader, and any thread closes it. A relay wakes the tasks of a loop."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from threading import Event
from unittest.mock import Mock

import pytest

from extent import usual_or_all
from idle import in_event_loop
from infer import AsyncStream, InvalidRequestError
from infer.engine.engine import Engine
from infer.engine.requests.answer import Answer, Relay, Waiters
from infer.engine.requests.loop import Loop
from infer.engine.requests.prompt_batch import _Batch
from infer.engine.runner.runner import Runner
from infer.engine.step.sequence import Sequence
from infer.outputs import Piece
from infer.sampling_params import SamplingParams
from looping import beside, in_threads, loop_of, open_stream, until_idle
from path_cases import CONTEXT, Case, Outcome, Way, World, by_definition, make_sequence

MOST = 16  # limit of unread pieces in these tests
LONG = Case("long", tuple(b"abc ab"), SamplingParams(temperature=0, max_new_tokens=120, ignore_eos=True))
DRAWN = replace(LONG, params=replace(LONG.params, temperature=0.9, seed=4))
SHORT = replace(LONG, params=replace(LONG.params, max_new_tokens=9))

NUM_CLOSED = usual_or_all(300, 10_000)


@pytest.fixture
def engine(world: World, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Return an engine with one slot."""
    monkeypatch.setattr("infer.engine.requests.answer.MAX_UNREAD", MOST)
    return Engine(Runner(world.model, CONTEXT, num_slots=1), max_steps=4)


@pytest.fixture
def loop(engine: Engine) -> Iterator[Loop]:
    made = loop_of(engine)
    yield made
    made.close()


def make_answer(waiters: Waiters | None = None) -> Answer:
    """Return an answer of no loop, whose sequence only has pieces."""
    sequence = Mock(pieces=[], num_computed=0, has_ended=False)
    sequence.request.options.cancel = None
    return Answer(Mock(), sequence, waiters)


def put(answer: Answer, count: int, *, has_ended: bool = False) -> None:
    """Let a number of pieces arrive, as a step does."""
    first = len(answer.sequence.pieces)
    answer.sequence.pieces += [Piece(number, str(number)) for number in range(first, first + count)]
    answer.sequence.has_ended = has_ended
    answer.put()


# Pauses


@pytest.mark.slow
@pytest.mark.parametrize("case", [LONG, DRAWN], ids=["greedy", "sampled"])
def test_an_unread_answer_pauses_and_another_has_its_slot(world: World, engine: Engine, loop: Loop, case: Case) -> None:
    stream = open_stream(loop, make_sequence(world, case, Way()))
    found = [next(stream)]
    for _ in range(3):  # each answer waits for the slot
        assert Outcome.of(open_stream(loop, make_sequence(world, SHORT, Way())).run()) == by_definition(world, SHORT)
    assert stream.answer.is_paused
    loop.run(bool)  # the thread has done all that belongs to the last step
    assert MOST <= len(stream.sequence.pieces) < MOST + 1 + 4 < 120
    assert len(loop.thread.answers) == 1
    found += stream
    assert [piece.token_id for piece in found] == by_definition(world, case).token_ids
    assert Outcome.of(stream.result) == by_definition(world, case)
    assert stream.result.stats.preemptions > 0


def test_a_paused_answer_that_is_closed_or_dropped_has_the_pieces_read(world: World, loop: Loop) -> None:
    for closes in (True, False):
        stream = open_stream(loop, make_sequence(world, LONG, Way()))
        sequence = stream.sequence
        for _ in range(3):
            next(stream)
        while not stream.answer.is_paused:
            pass
        if closes:
            stream.close()
            assert stream.result.token_ids == by_definition(world, LONG).token_ids[:3]
        del stream
        assert Outcome.of(open_stream(loop, make_sequence(world, SHORT, Way())).run()) == by_definition(world, SHORT)
        assert sequence.finish_reason == "abort"
    until_idle(loop)
    assert len(loop.thread.answers) == 0


def test_a_paused_answer_ends_with_its_timeout(world: World, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("infer.engine.engine.time.perf_counter", lambda: now)
    stream = open_stream(loop, make_sequence(world, LONG, Way(), timeout=0.5))
    next(stream)
    now += 0.5
    until_idle(loop)
    assert stream.sequence.result().stop_reason == "timeout"


@in_event_loop
async def test_a_whole_answer_does_not_pause(world: World, loop: Loop) -> None:
    """Its pieces are not read before the end, except for the first ones in some cases."""
    stream = open_stream(loop, make_sequence(world, LONG, Way()))
    assert Outcome.of(stream.run()) == by_definition(world, LONG)
    stream = AsyncStream.of(loop.answer(make_sequence(world, LONG, Way())))
    await anext(stream)
    while not stream.answer.is_paused:
        await asyncio.sleep(0)
    assert Outcome.of(await stream.result()) == by_definition(world, LONG)


@pytest.mark.parametrize("num_unread", [0, 1, MOST - 1, MOST, MOST + 3])
def test_an_answer_is_full_at_its_limit_and_has_room_at_half(num_unread: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.engine.requests.answer.MAX_UNREAD", MOST)
    answer = make_answer()
    proceed: Mock = answer.loop.proceed  # type: ignore[assignment]
    put(answer, num_unread)
    assert answer.pause_if_full() is (num_unread >= MOST)
    for number in range(num_unread):
        assert [piece.token_id for piece in answer.take(1) or ()] == [number]
        has_room = num_unread - number - 1 <= MOST // 2
        assert proceed.call_count == (num_unread >= MOST and has_room), "once, from half on"
    assert (answer.take(), answer.num_put, answer.num_taken) == (None, num_unread, num_unread)


def test_an_answer_that_is_dropped_gives_nothing_and_wakes_its_readers() -> None:
    answer = make_answer()
    with beside([answer.wait] * 3):
        answer.cancel()
    put(answer, 4, has_ended=True)
    assert (answer.take(), answer.num_taken, answer.num_put) == ([], 0, 4)
    answer.wait()
    answer.close()


# Wakes


def test_a_relay_calls_its_event_loop_once_until_that_has_run() -> None:
    event_loop = Mock(spec=asyncio.AbstractEventLoop, is_closed=Mock(return_value=False))
    relay, calls = Relay(event_loop), event_loop.call_soon_threadsafe
    answers = [make_answer(Waiters(relay)) for _ in range(20)]
    relay.call()
    assert calls.call_count == 0, "nothing arrived"
    for round_number in range(1, 4):
        for _ in range(2):  # two steps, before the event loop runs
            for answer in answers:
                put(answer, 1)
            relay.call()
        assert calls.call_count == round_number
        calls.call_args.args[0]()  # the event loop runs it
    answers[0].cancel()
    assert calls.call_count == 4


def test_waiters_see_what_arrives_from_several_threads() -> None:
    waiters, num_arrived, most = Waiters(), list[int](), 2_000

    def notify() -> None:
        for number in range(most):
            num_arrived.append(number)
            waiters.notify()

    def wait(at_least: int) -> None:
        for count in range(0, at_least, 7):
            waiters.wait(lambda count=count: len(num_arrived) >= count)  # type: ignore[misc]

    in_threads([notify] * 2 + [lambda: wait(2 * most)] * 3)


# Readers


def test_a_result_that_an_event_cancels_has_what_was_computed(world: World, engine: Engine, loop: Loop) -> None:
    cancel, step = Event(), engine.step
    stream = open_stream(loop, sequence := make_sequence(world, LONG, Way(), cancel=cancel))

    def step_and_cancel() -> list[Sequence]:
        sequences = step()
        if len(sequence.pieces) > 2:
            cancel.set()
        return sequences

    engine.step = step_and_cancel  # type: ignore[method-assign]
    count = len((result := stream.run()).token_ids)
    assert 2 < count < LONG.params.max_new_tokens
    assert (result.token_ids, result.stop_reason) == (by_definition(world, LONG).token_ids[:count], "cancelled")


def test_an_answer_that_joins_a_cancelled_batch_ends(world: World, loop: Loop) -> None:
    sequence = make_sequence(world, LONG, Way())
    batch = _Batch(loop, iter([(0, sequence)]), 1, Waiters())
    batch.cancel()
    batch.fill()  # of a thread that still prepares requests
    batch.waiters.wait(batch.have_all_ended)
    assert (sequence.pieces, sequence.finish_reason) == ([], "abort")


def test_a_second_thread_that_reads_a_stream_is_refused(world: World, loop: Loop) -> None:
    stream = open_stream(loop, make_sequence(world, LONG, Way()))
    pieces, refused = list[Piece](), list[InvalidRequestError]()

    def read() -> None:
        while True:
            try:
                pieces.append(next(stream))
            except StopIteration:
                return
            except InvalidRequestError as error:
                refused.append(error)

    in_threads([read] * 4)
    assert all("only one thread may read it at a time" in str(error) for error in refused)
    assert sorted(piece.token_id for piece in pieces) == sorted(by_definition(world, LONG).token_ids)
    assert Outcome.of(stream.result) == by_definition(world, LONG)


def test_answers_that_threads_and_tasks_close_at_random_leave_nothing(world: World, engine: Engine, loop: Loop) -> None:
    """Answers are closed, cancelled or dropped at any moment, while another one is read to its end."""
    expected = by_definition(world, LONG).token_ids

    def in_thread(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(NUM_CLOSED // 6):
            stream = open_stream(loop, make_sequence(world, LONG, Way()))
            closing = draw.choice([stream.close, stream.cancel])
            pieces = [next(stream) for _ in range(draw.randrange(3))]
            with beside([closing]):
                pieces += stream
            assert [piece.token_id for piece in pieces] == expected[: len(pieces)]
            assert stream.result.token_ids == expected[: len(pieces)]

    async def in_tasks(seed: int) -> None:
        draw = random.Random(seed)

        async def ask() -> None:
            stream = AsyncStream.of(loop.answer(make_sequence(world, LONG, Way())))
            task = asyncio.ensure_future(stream.result())
            for _ in range(draw.randrange(9)):
                await asyncio.sleep(0)
            how = draw.choice(["close", "cancel", "cancel the task", "drop"])
            if how == "close":
                await stream.close()
            elif how == "cancel":
                stream.cancel()
            else:
                task.cancel()
            done = await asyncio.gather(task, return_exceptions=True)
            if how in ("close", "cancel"):
                token_ids = done[0].token_ids  # type: ignore[union-attr]
                assert token_ids == expected[: len(token_ids)]

        for _ in range(NUM_CLOSED // 12):
            await asyncio.gather(*(ask() for _ in range(6)))

    stream = open_stream(loop, make_sequence(world, LONG, Way()))
    with beside(partial(in_thread, seed) for seed in range(3)):
        asyncio.run(in_tasks(3))
        assert Outcome.of(stream.run()) == by_definition(world, LONG)
    until_idle(loop)
    assert not engine.sequences
    engine.runner.cache.check_integrity()  # type: ignore[attr-defined]
