"""The dispatch table and its walk: rows, labels, barriers, repeats, profile."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from infer.backends.cpu import simd
from infer.backends.cpu.compiled import compiled_address
from infer.backends.cpu.state import STATE
from infer.backends.cpu.table import BARRIER, BARRIER_IF_MANY, NO_BARRIER, Command, Walk
from infer.backends.cpu.threads import Team, aligned

TALLY = np.dtype([("count", np.int64), ("stop", np.int64), ("last", np.int64)])


def make_tally() -> Callable[..., None]:
    """Thread 0 counts, and sets `stop` at the last one."""

    def tally(args, state, thread, num_threads):  # type: ignore[no-untyped-def]
        if thread == 0:
            args.count += 1
            if args.count == args.last:
                simd.store_i64(args.stop, 1)

    return tally


@pytest.fixture(scope="module")
def three() -> Iterator[Team]:
    three = Team(3)
    yield three
    three.close()


class Tally:
    def __init__(self, barriers: list[int]) -> None:
        self.arguments, self.stop, self.state = np.zeros(1, TALLY), np.zeros(1, np.int64), aligned(1, STATE)
        self.arguments["stop"] = self.stop.ctypes.data
        address = compiled_address("test_dispatch_table:make_tally", TALLY)
        self.commands = [Command(address, self.arguments, barrier, "tally") for barrier in barriers]
        self.walk = Walk(self.commands)
        self.walk.arguments["stop"] = self.stop.ctypes.data

    @property
    def count(self) -> int:
        return int(self.arguments["count"][0])


def test_each_row_has_its_commands_code_arguments_and_barrier() -> None:
    tally = Tally([NO_BARRIER, BARRIER, BARRIER_IF_MANY])
    for row, command in zip(tally.walk.rows.tolist(), tally.commands, strict=True):
        assert row == [command.function, command.arguments.ctypes.data, command.barrier]


def test_an_empty_table_is_walked_to_no_effect(three: Team) -> None:
    walk, state = Walk([]), aligned(1, STATE)
    three.run(walk, state, 3)
    assert walk.rows.shape == (0, 3)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize(("num_tokens", "num_barriers"), [(1, 2), (2, 3)])
def test_threads_meet_at_the_barriers_that_the_number_of_tokens_asks_for(
    three: Team, num_threads: int, num_tokens: int, num_barriers: int
) -> None:
    tally = Tally([NO_BARRIER, BARRIER, BARRIER_IF_MANY, BARRIER])
    tally.state["num_tokens"] = num_tokens
    tally.walk.arguments["repeats"] = 5
    three.run(tally.walk, tally.state, num_threads)
    assert tally.count == 20
    meetings = 5 * (num_barriers + 1)  # the last of a repeat is where all look at the stop
    assert tally.state["released"][0] == (meetings if num_threads > 1 else 0)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_stop_ends_the_chain_after_its_repeat(three: Team, num_threads: int) -> None:
    tally = Tally([BARRIER, BARRIER])
    tally.arguments["last"], tally.walk.arguments["repeats"] = 5, 100
    three.run(tally.walk, tally.state, num_threads)
    assert tally.count == 6
    assert tally.walk.arguments["walked"][0] == 3


@pytest.mark.parametrize("num_threads", [1, 3])
def test_repeats_may_begin_after_the_first_rows(three: Team, num_threads: int) -> None:
    before = Tally([BARRIER, BARRIER])
    after = Tally([BARRIER])
    walk = Walk(after.commands, before.walk)
    walk.arguments["repeats"], walk.arguments["again"] = 5, 2
    three.run(walk, after.state, num_threads)
    assert (before.count, after.count) == (2, 5)
    assert walk.arguments["walked"][0] == 1
    walk.arguments["again"] = 0
    three.run(walk, after.state, num_threads)
    assert (before.count, after.count) == (12, 10)
    assert walk.arguments["walked"][0] == 5


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_profile_has_a_time_for_every_command(three: Team, num_threads: int) -> None:
    tally = Tally([BARRIER, NO_BARRIER, BARRIER_IF_MANY])
    times = np.zeros(len(tally.commands), np.int64)
    tally.walk.arguments["times"] = times.ctypes.data
    three.run(tally.walk, tally.state, num_threads)
    assert (times > 0).all()
