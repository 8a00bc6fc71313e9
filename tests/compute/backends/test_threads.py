"""The thread pool and its number of threads: idle, forked, replaced, contended, and at the interpreter's end."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.compile.addresses import compiled_address
from infer.compute.backends.cpu.thread_records import MAX_THREADS, STATE
from infer.compute.backends.cpu.threads import adaptive, atomics, pool
from infer.compute.backends.cpu.threads.adaptive import AdaptiveThreads, Outcome
from infer.compute.backends.cpu.threads.dispatch_table import BARRIER, READ_BARRIER, Command, DispatchTable
from infer.compute.backends.cpu.threads.pool import ThreadPool, aligned, set_num_threads, thread_pool
from infer.errors import InferError, InvalidRequestError
from infer.models import from_checkpoint as load_settings
from infer.system import cores
from infer.system.cores import start_thread
from looping import beside, in_threads
from programs import Programs
from watched import python_command

PARTS = np.dtype([("sums", np.int64), ("num_rows", np.int64), ("lag", np.int64)])
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="hardware: Linux only")


def make_count() -> Callable[..., None]:
    """Return a command that adds r to row r, exactly once per run. All threads but thread 0 lag."""

    def count(args, state, thread, num_threads):  # type: ignore[no-untyped-def]
        if thread != 0:
            for _ in range(args.lag):
                atomics.pause()
        for row in range(args.num_rows * thread // num_threads, args.num_rows * (thread + 1) // num_threads):
            at = args.sums + 8 * row
            simd.store_i64(at, simd.load_i64(at) + row)

    return count


class Counter:
    """A table whose result shows whether each part of it ran once."""

    def __init__(
        self, num_commands: int = 20, repeats: int = 1, num_rows: int = 50, barrier: int = BARRIER, lag: int = 0
    ) -> None:
        self.sums, self.arguments = np.zeros(num_rows, np.int64), np.zeros(1, PARTS)
        self.arguments["sums"], self.arguments["num_rows"] = self.sums.ctypes.data, num_rows
        self.arguments["lag"] = lag
        address = compiled_address("test_threads:make_count", PARTS)
        self.times = num_commands * repeats
        self.table = DispatchTable([Command(address, self.arguments, barrier, "count")] * num_commands)
        self.table.arguments["repeats"] = repeats
        self.state = aligned(1, STATE)
        self.state["num_tokens"] = 1
        self.num_runs = 0

    def run(self, pool: ThreadPool, num_threads: int | None = None) -> None:
        pool.run(self.table, self.state, num_threads)
        self.num_runs += 1

    def is_right(self) -> bool:
        return bool((self.sums == np.arange(len(self.sums)) * self.times * self.num_runs).all())


COLD = "infer: compiling CPU kernels, once per machine and model type\n"
SCRIPT = f"""
import os, sys, threading, time
sys.path[:] = {sys.path!r}
from test_threads import Counter
from infer.compute.backends.cpu.threads.pool import ThreadPool, set_num_threads, thread_pool
set_num_threads(3)
counter = Counter()
"""


Run = Callable[[str], str]


@pytest.fixture
def run_script(programs: Programs) -> Run:
    """Return a function that runs code after `SCRIPT` and returns its output."""
    return lambda code: output_of(programs.run(SCRIPT + code))


def output_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    assert done.stderr in ("", COLD)
    return done.stdout


def worker_threads() -> list[threading.Thread]:
    """Return the workers of all pools; an engine of another test may still have threads of other names."""
    return [thread for thread in threading.enumerate() if re.fullmatch(r"infer-\d+", thread.name)]


@pytest.fixture
def three() -> Iterator[ThreadPool]:
    pool = ThreadPool(3)
    yield pool
    pool.close()


def test_each_part_of_a_run_runs_once_whatever_the_number_of_threads() -> None:
    many = ThreadPool(5)
    counter = Counter()
    for num_threads in (1, 2, 5, None, 9):
        counter.run(many, num_threads)
        assert counter.is_right()
    many.close()


@pytest.mark.parametrize("is_reading", [True, False])
def test_a_wait_for_a_slow_file_is_no_sign_of_a_busy_machine(three: ThreadPool, *, is_reading: bool) -> None:
    counter = Counter(3, barrier=READ_BARRIER if is_reading else BARRIER, lag=300_000)  # milliseconds, as a disk
    counter.run(three)
    assert counter.is_right()
    assert bool(counter.state["stalls"][0, 0]) is not is_reading
    assert bool(counter.state["reading"][0]) is is_reading
    costs = three._adaptive._cost_by_kind
    assert three._adaptive._is_suspicious is not is_reading
    if is_reading:
        assert max(costs.values()) < three.run_seconds / 2


@needs_linux
def test_thread_0_computes_on_its_own_node_and_the_caller_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed, pinned = os.sched_getaffinity(0), list[object]()
    cpu, pin = max(allowed), os.sched_setaffinity
    monkeypatch.setattr(pool, "node_of_thread", lambda *ranked: {cpu} if ranked == (2, 4) else None)
    two, counter = ThreadPool(2, rank=1, num_ranks=2), Counter()
    monkeypatch.setattr(pool, "keep_on_node", lambda thread, num_threads: None)  # calls by the worker
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: pinned.append(cpus) or pin(thread, cpus))
    counter.run(two, 1)
    counter.run(two, 2)
    two.close()
    assert pinned == [{cpu}, allowed] * 2
    assert counter.is_right()
    assert os.sched_getaffinity(0) == allowed


def test_an_idle_pool_uses_no_processor_time(three: ThreadPool) -> None:
    Counter().run(three, 3)
    used = list[float]()
    while len(used) < 10 and min(used, default=1.0) >= 0.1:  # on a busy machine, workers fall asleep later
        before = time.process_time()
        time.sleep(0.5)
        used.append(time.process_time() - before)
    assert min(used) < 0.1


@pytest.mark.slow
def test_workers_that_lag_are_dismissed_and_thread_0_does_their_parts(
    three: ThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptive, "_PATIENCE", 1e-6)
    counter = Counter(num_commands=5, repeats=4)
    counter.run(three, 3)  # the workers are awake
    counter.arguments["lag"] = 100_000  # pauses, far more than a barrier spins for
    for _ in range(10):
        three._adaptive = pool.AdaptiveThreads(3)
        counter.run(three)
        meetings = counter.state["dismissed"].item()
        assert 1 <= meetings <= counter.times
        assert counter.is_right()
    assert counter.table.arguments["completed"][0] == 4


def test_runs_of_several_python_threads_do_not_mix(three: ThreadPool) -> None:
    counters = [Counter() for _ in range(4)]

    def run_often(counter: Counter) -> None:
        for _ in range(50):
            counter.run(three)

    in_threads(partial(run_often, counter) for counter in counters)
    assert [counter.is_right() for counter in counters] == [True] * 4


def test_the_number_of_threads_may_change_while_runs_run() -> None:
    set_num_threads(2)
    counters = [Counter() for _ in range(2)]
    end = threading.Event()

    def run_on(counter: Counter) -> None:
        while not end.is_set():
            counter.run(thread_pool())

    with beside(partial(run_on, counter) for counter in counters):
        for num_threads in [3, 1, 4, 2] * 5:
            set_num_threads(num_threads)
            time.sleep(0.002)
        end.set()
    assert all(counter.is_right() and counter.num_runs for counter in counters)
    set_num_threads(1)
    assert worker_threads() == []


def test_a_replaced_pool_still_runs_but_has_no_workers() -> None:
    set_num_threads(3)
    old, counter = thread_pool(), Counter()
    counter.run(old, 3)
    assert len(worker_threads()) == 2
    set_num_threads(2)
    assert worker_threads() == []
    counter.run(old, 3)
    assert counter.is_right()
    assert worker_threads() == []


@needs_linux
def test_a_forked_child_gets_a_pool_of_its_own(run_script: Run) -> None:
    run_script("""
counter.run(thread_pool(), 3)
child = os.fork()
if child == 0:
    counter.run(thread_pool(), 3)
    os._exit(0 if counter.is_right() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
counter.run(thread_pool(), 3)
assert counter.is_right()
""")


RUN = "counter.run(thread_pool(), 3); assert counter.is_right()"
ENDS = [RUN, f"{RUN}; time.sleep(0.1)"]  # workers spin, or sleep
ENDS.append("""
def run_on():
    while True:
        counter.run(thread_pool())
threading.Thread(target=run_on, daemon=True).start()
time.sleep(0.05)
""")


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("code", ENDS, ids=["spin", "sleep", "run"])
def test_the_interpreter_ends_cleanly_whatever_its_threads_do(run_script: Run, code: str) -> None:
    assert run_script(code) == ""


@needs_linux
def test_the_default_respects_the_affinity() -> None:
    code = "from infer.system.cores import default_num_threads; print(default_num_threads())"
    command = ["taskset", "-c", str(min(os.sched_getaffinity(0))), *python_command(code)]
    assert output_of(subprocess.run(command, capture_output=True, text=True, check=False)) == "1\n"


@pytest.mark.parametrize(("quota", "most"), [(0.5, 1), (1.5, 1), (2.0, 2), (None, 256), (1e9, 256)])
def test_the_default_respects_the_quota_of_the_control_groups(
    quota: float | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    monkeypatch.setattr(cores, "_siblings", str)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(1000)))
    assert cores.default_num_threads() == most


@pytest.mark.parametrize("value", [0, -1, 100_000, 10**20, 10**5000, True, 2.0, "2", None], ids=range(9))
def test_a_number_of_threads_beyond_the_rule_is_refused_in_one_line(value: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"threads must be .* from 1 to \d+ on this machine, got ") as caught:
        cores.check_num_threads(value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_a_refused_number_leaves_the_threads_unchanged() -> None:
    before = thread_pool()
    with pytest.raises(InvalidRequestError):
        load_settings.set_num_threads(100_000)
    assert thread_pool() is before


def test_a_pool_has_room_for_all_threads_that_may_be_asked_for() -> None:
    assert cores.MOST_THREADS == MAX_THREADS
    assert 64 <= cores.most_threads() <= MAX_THREADS


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()], ids=repr)
def test_started_threads_end_if_the_system_refuses_another(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    start, many, counter = pool.start_thread, ThreadPool(5), Counter()

    def start_two(worker: threading.Thread) -> None:
        if worker.name == "infer-3":
            raise error
        start(worker)

    monkeypatch.setattr(pool, "start_thread", start_two)
    for _ in range(2):
        with pytest.raises(InferError, match=r"the system starts 3 of 5 threads and no more \(.+\): use threads=3"):
            counter.run(many, 5)
        assert [worker for worker in many._workers if worker.is_alive()] == []
    counter.run(many, 1)
    assert counter.num_runs == 1
    assert counter.is_right()


def test_workers_have_stack_enough_whatever_the_program_gives_its_threads(three: ThreadPool) -> None:
    before, counter = threading.stack_size(128 << 10), Counter()
    counter.run(three, 3)
    given, sizes = threading.stack_size(), list[int | None]()
    worker = threading.Thread(target=lambda: sizes.append(pool.stack_bytes()))
    start_thread(worker)
    worker.join()
    threading.stack_size(before)
    assert counter.is_right()
    assert given == 128 << 10
    assert sizes[0] is None or sizes[0] >= 2 << 20


@needs_linux
def test_a_thread_with_too_little_stack_gets_an_error_and_the_process_lives(run_script: Run) -> None:
    run_script("""
said = []
def run_on():
    try:
        counter.run(thread_pool())
    except Exception as error:
        said.append(str(error))
for size in (128 << 10, 1 << 20):
    threading.stack_size(size)
    thread = threading.Thread(target=run_on)
    thread.start()
    thread.join()
    assert "this thread has a stack of" in said[0], said
assert len(said) == 1 and counter.is_right()
threading.stack_size(128 << 10)
thread = threading.Thread(target=lambda: said.append(thread_pool().close()))
thread.start()
thread.join()
assert said[1:] == [None]
""")


def test_a_run_that_waits_for_its_turn_lets_signals_through(run_script: Run) -> None:
    run_script("""
import signal
class Stop(Exception): pass
def stop(*_): raise Stop
busy, waiting, end = thread_pool(), Counter(), threading.Event()
counter.table.arguments["repeats"] = 10**9   # far longer than the test
stopped = __import__("numpy").zeros(1, "int64")
counter.table.arguments["stop"] = stopped.ctypes.data
runner = threading.Thread(target=lambda: counter.run(busy))
runner.start()
while not busy._job.owner:
    time.sleep(0.001)
signal.signal(signal.SIGALRM, stop)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    waiting.run(busy)
    sys.exit("the run did not wait")
except Stop:
    pass
finally:
    stopped[0] = 1
runner.join()
waiting.run(busy)
assert waiting.is_right()
""")


class Machine:
    """A clock and a cost for each number of threads, instead of a machine."""

    def __init__(self, alone: float, together: float, lost_share: float) -> None:
        self.alone, self.together, self.lost_share = alone, together, lost_share
        self.now, self.num_trials = 0.0, 0

    def cost(self, num_threads: int) -> float:
        return self.alone if num_threads == 1 else self.together

    def share(self, num_threads: int) -> float:
        """Return the share of the threads' time that is lost in waits."""
        return 0.0 if num_threads == 1 else self.lost_share

    def run(self, chooser: AdaptiveThreads, seconds: float, kinds: int = 1) -> float:
        """Return the runs per second. If `kinds` is 0, each run is of another kind."""
        end, begun, runs = self.now + seconds, self.now, 0
        while self.now < end:
            choice = chooser.choose(self.now)
            cost = self.cost(choice.num_threads)
            lost = self.share(choice.num_threads) * cost * choice.num_threads
            self.now += cost
            self.num_trials += choice.is_trial
            runs += 1
            kind = (runs % kinds if kinds else runs, 1)
            chooser.learn(kind, choice, Outcome(self.now, cost, lost, cost))
        return runs / (self.now - begun)


class SharedMachine(Machine):
    """A machine with `num_free` cores: more threads wait for each other at each of a run's barriers."""

    def __init__(self, num_free: int) -> None:
        super().__init__(alone=0.04, together=0, lost_share=0)
        self.num_free = num_free

    def cost(self, num_threads: int) -> float:
        return self.alone / num_threads if num_threads <= self.num_free else 3 * self.alone / self.num_free

    def share(self, num_threads: int) -> float:
        return 0.05 if num_threads <= self.num_free else 0.6


def test_a_calm_machine_is_never_tried_with_one_thread() -> None:
    machine = Machine(alone=0.04, together=0.02, lost_share=0.05)
    assert machine.run(AdaptiveThreads(2), 30) == pytest.approx(50, rel=1e-3)
    assert machine.num_trials == 0


@pytest.mark.parametrize("slowdown", [1.1, 2, 10])
@pytest.mark.parametrize("kinds", [1, 3])
def test_beside_a_busy_neighbour_the_pool_keeps_the_speed_of_one_thread(slowdown: float, kinds: int) -> None:
    machine = Machine(alone=0.04, together=0.04 * slowdown, lost_share=0.4)
    chooser = AdaptiveThreads(2)
    machine.run(chooser, 10, kinds)
    assert machine.run(chooser, 100, kinds) >= 0.97 / machine.alone


def test_a_pool_that_waits_much_and_is_still_faster_stays() -> None:
    machine = Machine(alone=0.4, together=0.02, lost_share=0.5)
    chooser = AdaptiveThreads(32)
    machine.run(chooser, 10)
    assert machine.run(chooser, 100) >= 0.97 / machine.together
    assert chooser.num_threads == 32


@pytest.mark.parametrize(("num_free", "best"), [(1, 1), (10, 8), (17, 16)])
@pytest.mark.parametrize("kinds", [0, 1])
def test_the_pool_keeps_as_many_threads_as_there_are_cores_for(num_free: int, best: int, kinds: int) -> None:
    machine, chooser = SharedMachine(num_free), AdaptiveThreads(32)
    machine.run(chooser, 60, kinds)
    assert machine.run(chooser, 200, kinds) >= 0.9 / machine.cost(best)
    machine.num_free = 32
    machine.run(chooser, 10, kinds)
    assert chooser.num_threads == 32


@pytest.mark.parametrize("kinds", [0, 1])
def test_the_pool_uses_all_threads_again_soon_after_the_neighbour_ended(kinds: int) -> None:
    machine, chooser = Machine(alone=0.04, together=0.2, lost_share=0.6), AdaptiveThreads(2)
    machine.run(chooser, 60, kinds)
    assert chooser.num_threads == 1
    machine.together, machine.lost_share = 0.02, 0.05
    machine.run(chooser, 10, kinds)
    assert chooser.num_threads == 2


def test_runs_that_compare_with_nothing_are_judged_by_their_waits() -> None:
    machine, chooser = Machine(alone=0.04, together=0.1, lost_share=0.4), AdaptiveThreads(2)
    assert machine.run(chooser, 60, kinds=0) >= 0.9 / machine.alone
