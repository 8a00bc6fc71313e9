"""How a team shares work and waits: units taken by whoever is free, barriers of many threads, sleep."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from resource import RUSAGE_SELF, getrusage

import numpy as np
import pytest

from infer.backends.cpu import control, pace
from infer.backends.cpu.compiled import compiled_address
from infer.backends.cpu.records import SAMPLE, pointer
from infer.backends.cpu.state import STATE
from infer.backends.cpu.table import BARRIER, Command, Walk
from infer.backends.cpu.threads import Team, aligned, publisher
from infer.backends.cpu.units import begin_units, take_share, take_units

WORK = np.dtype(
    [
        ("done", pointer(np.int64)),  # [units]: how often
        ("doers", pointer(np.int64)),  # [units]: the last thread that did it
        ("num_units", np.int64),
        ("slow", np.int64),  # a thread that takes long for each unit
        ("lag", np.int64),  # nanoseconds
        ("visits", pointer(np.int64)),  # [threads]: commands that it has done
        ("errors", pointer(np.int64)),
    ]
)
NUM_COMMANDS, REPEATS = 6, 5


def make_do_units() -> Callable[..., None]:
    """Two rounds; in the second one twice as many units."""

    def do_units(args, state, thread, num_threads):  # type: ignore[no-untyped-def]
        for round_ in range(2):
            begin_units(state, thread)
            unit, end = take_units(state, thread, num_threads, args.num_units << round_)
            while unit < end:
                if thread == args.slow:
                    until = control.nanoseconds() + args.lag
                    while control.nanoseconds() < until:
                        control.pause()
                control.atomic_add(args.done + (unit >> round_), 1)
                args.doers[unit >> round_] = thread
                unit += 1
                if unit == end:
                    unit, end = take_units(state, thread, num_threads, args.num_units << round_)

    return do_units


def make_do_shares() -> Callable[..., None]:
    """Three rounds of parts of 7 units or more."""

    def do_shares(args, state, thread, num_threads):  # type: ignore[no-untyped-def]
        for _ in range(3):
            begin_units(state, thread)
            begin, stop = take_share(state, thread, num_threads, args.num_units, 7)
            while begin < stop:
                for unit in range(begin, stop):
                    control.atomic_add(args.done + unit, 1)
                begin, stop = take_share(state, thread, num_threads, args.num_units, 7)

    return do_shares


def make_check_visits() -> Callable[..., None]:
    """After a barrier every thread has done what came before it, and at most one command more."""

    def check_visits(args, state, thread, num_threads):  # type: ignore[no-untyped-def]
        own = control.atomic_load(args.visits + thread)
        for other in range(num_threads):
            ahead = control.atomic_load(args.visits + other) - own
            if ahead < 0 or ahead > 1:
                control.atomic_add(args.errors, 1)
        if thread == args.slow:
            until = control.nanoseconds() + args.lag
            while control.nanoseconds() < until:
                control.pause()
        control.atomic_add(args.visits + thread, 1)

    return check_visits


class Work:
    def __init__(self, maker: str, num_units: int = 50, slow: int = -1, lag_seconds: float = 0.0) -> None:
        self.done, self.doers = np.zeros(num_units, np.int64), np.zeros(num_units, np.int64)
        self.visits, self.errors = np.zeros(256, np.int64), np.zeros(1, np.int64)
        self.arguments, self.num_walks = np.zeros(1, WORK), 0
        for name in ("done", "doers", "visits", "errors"):
            self.arguments[name] = getattr(self, name).ctypes.data
        self.arguments["num_units"], self.arguments["slow"] = num_units, slow
        self.arguments["lag"] = int(1e9 * lag_seconds)
        address = compiled_address(f"test_sharing:make_{maker}", WORK)
        self.walk = Walk([Command(address, self.arguments, BARRIER, maker)] * NUM_COMMANDS)
        self.walk.arguments["repeats"] = REPEATS
        self.state = aligned(1, STATE)
        self.state["num_tokens"] = 1

    def run(self, team: Team, num_threads: int | None = None) -> None:
        team.run(self.walk, self.state, num_threads)
        self.num_walks += 1

    def is_right(self) -> bool:
        return bool((self.done == 3 * NUM_COMMANDS * REPEATS * self.num_walks).all())


@pytest.fixture(scope="module")
def many() -> Iterator[Team]:
    team = Team(64)
    yield team
    team.close()


@pytest.mark.parametrize("maker", ["do_units", "do_shares"])
@pytest.mark.parametrize("num_units", [1, 7, 50, 1000])
def test_each_unit_is_done_once_whatever_the_number_of_threads(many: Team, num_units: int, maker: str) -> None:
    work = Work(maker, num_units)
    for num_threads in (1, 2, 3, 16, 17, 64, 5):
        work.run(many, num_threads)
        assert work.is_right()


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_what_a_slow_thread_has_not_begun_is_done_by_the_others(many: Team, slow: int) -> None:
    work = Work("do_units", 60, slow, lag_seconds=0.002)
    work.run(many, 3)
    assert work.is_right()
    assert (work.doers == slow).sum() < 15  # of the 20 that are its share


def test_a_team_that_is_dismissed_leaves_its_units_to_thread_0(many: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_PATIENCE", 1e-6)
    three = Team(3)
    work = Work("do_units", 60, slow=2, lag_seconds=0.001)
    work.run(three, 3)
    for _ in range(5):
        three._pace = pace.Pace(3)
        work.run(three)
        assert work.is_right()
    assert work.state["dismissed"][0] > 0
    three.close()


@pytest.mark.parametrize("num_threads", [2, 16, 17, 23, 24, 64])
def test_threads_meet_whatever_their_number_on_however_few_cores(many: Team, num_threads: int) -> None:
    work = Work("check_visits")
    for _ in range(5):
        work.run(many, num_threads)
    assert work.errors[0] == 0
    assert (work.visits[:num_threads] == 5 * NUM_COMMANDS * REPEATS).all()


@pytest.mark.skipif(sys.platform != "linux", reason="hardware: Linux only")
@pytest.mark.parametrize("slow", [0, 1])
def test_threads_that_wait_long_leave_their_cores_to_others(many: Team, slow: int) -> None:
    work = Work("check_visits", slow=slow, lag_seconds=0.02)
    work.run(many, 3)  # the workers are up
    before = getrusage(RUSAGE_SELF).ru_nvcsw  # a thread that only yields stays runnable, and counts elsewhere
    work.run(many, 3)
    assert getrusage(RUSAGE_SELF).ru_nvcsw - before >= NUM_COMMANDS * REPEATS


@pytest.mark.skipif(sys.platform != "linux", reason="hardware: threads sleep in Linux's futex")
def test_a_step_that_waits_for_its_mask_leaves_its_core_to_others() -> None:
    ready, stamps, arguments = np.zeros(1, np.int64), np.zeros(2, np.int64), np.zeros(1, SAMPLE)
    arguments["mask_ready"], arguments["stamps"] = ready.ctypes.data, stamps.ctypes.data
    wait = Command(compiled_address(".sample_advance:await_mask", SAMPLE), arguments, BARRIER, "wait", ready)
    walk, state, team = Walk([wait]), aligned(1, STATE), Team(1)
    team.run(Walk([]), state)
    filler = threading.Timer(0.5, publisher(ready))
    filler.start()
    used = time.thread_time()
    team.run(walk, state)
    assert ready[0] == 1
    assert time.thread_time() - used < 0.05
    filler.join()
