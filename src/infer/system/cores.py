"""The processors: how many threads compute, which processors the process may use or reserve, and memory nodes.

Several processes that compute at the same time reserve cores, because they would wait on shared ones. Threads that run
dispatch tables start with a sufficient stack. Signals arrive only on the main thread. Each memory node has cores that
reach it faster than the other cores (Linux), so threads are pinned to nodes. `root` is the folder that contains
`/sys`. It differs from `/` only in tests. macOS pins no threads, and has slow cores beside fast ones.
"""

import fcntl
import os
import platform
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path

from infer.errors import InvalidRequestError
from infer.system.available_memory import cpu_quota
from infer.system.macos import IS_MACOS, sysctl, sysctl_text

MOST_THREADS = 256  # that a team has room for
_ALWAYS_ALLOWED, _PER_PROCESSOR = 64, 4
_STACK_BYTES = 2 << 20
# A thread must receive its own faults, so that faulthandler shows their place.
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP}

_starting = threading.RLock()  # the size of new stacks is a setting of the process
_ROOT = Path("/")


def default_num_threads() -> int:
    """Return the number of physical cores that the process may use, at most `MOST_THREADS`.

    Its affinity and the quota of its control groups limit them. On a Mac only the performance cores count: at each
    barrier, all threads wait for the slowest one.
    """
    if IS_MACOS:
        fast = sysctl("hw.perflevel0.physicalcpu") or sysctl("hw.physicalcpu") or os.cpu_count() or 1
        return min(fast, MOST_THREADS)
    cores = {_siblings(cpu) for cpu in _allowed()}
    return min(_within_quota(len(cores)), MOST_THREADS)


def num_processors() -> int:
    """Return the number of hardware threads that affinity and quota let the process use."""
    return _within_quota(len(_allowed()))


def processors_by_core() -> list[int]:
    """Return the hardware threads that the process may use: first one of each core, then the second ones."""
    num_before, ranked = Counter[str](), list[tuple[int, int]]()
    for processor in sorted(_allowed()):
        core = _siblings(processor)
        ranked.append((num_before[core], processor))
        num_before[core] += 1
    return [processor for _, processor in sorted(ranked)]


def processor_name() -> str:
    """Return the processor's name as the system reports it.

    If the machine has several kinds of cores, it is the name of the first one.
    """
    if IS_MACOS:
        return sysctl_text("machdep.cpu.brand_string") or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = file.read(1 << 14).splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _allowed() -> set[int]:
    return _affinity() or set(range(os.cpu_count() or 1))


def _affinity() -> set[int] | None:
    """Return the processors that the calling thread may use. None if the system pins no threads."""
    allowed: set[int] | None = None
    if sys.platform == "linux":
        allowed = os.sched_getaffinity(0)
    return allowed


def _within_quota(count: int) -> int:
    quota = cpu_quota()
    return max(1, count if quota is None else min(count, int(quota)))


def most_threads() -> int:
    """Return the largest number of threads. More would only wait for each other, and each takes a stack."""
    return min(MOST_THREADS, max(_ALWAYS_ALLOWED, _PER_PROCESSOR * (os.cpu_count() or 1)))


def check_num_threads(threads: object) -> int:
    """Return the number if it is an integer from 1 to `most_threads()`, else raise InvalidRequestError."""
    most = most_threads()
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= most:
        raise InvalidRequestError(
            f"threads must be a whole number from 1 to {most} on this machine, got {_short(threads)}: "
            f"leave it out for {default_num_threads()}, one per core"
        )
    return threads


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or value.bit_length() < 200 else "a number of many digits"
    return text if len(text) <= 40 else f"{text[:37]}..."


def _siblings(cpu: int) -> str:
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def take_cores(num_threads: int) -> list[int]:
    """Pin this thread, and the threads that it starts, to `num_threads` processors that no other process has reserved.

    They are reserved until the process ends. If there are too few, or if the system pins no threads, the list is empty,
    and threads run anywhere.
    """
    if _affinity() is None:
        return []
    locks = dict[int, int]()
    for processor in processors_by_core():
        if len(locks) < num_threads and (lock := _try_lock(processor)) is not None:
            locks[processor] = lock
    if len(locks) < num_threads:
        for lock in locks.values():
            os.close(lock)
        return []
    if sys.platform == "linux":
        os.sched_setaffinity(0, locks)
    return list(locks)


def _try_lock(processor: int) -> int | None:
    path = Path(tempfile.gettempdir()) / f"infer-{os.getuid()}-processor-{processor}"
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release)


def start_thread(thread: threading.Thread, *, blocks_signals: bool = False) -> None:
    """Start a thread with enough stack, whatever the default of the program or of the C library is.

    With `blocks_signals`, signals interrupt no system call of the thread or of the threads that it starts.
    """
    with _starting:
        size = threading.stack_size(_STACK_BYTES)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS) if blocks_signals else None
        try:
            thread.start()
        finally:
            threading.stack_size(size)
            if blocked is not None:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def cpus_by_node(root: Path = _ROOT) -> list[frozenset[int]]:
    """Return the processors of each node that has processors, ordered by the nodes' numbers.

    The list is empty if the system does not report nodes.
    """
    folders = [path for path in root.glob("sys/devices/system/node/node*") if path.name[4:].isdecimal()]
    nodes = []
    for folder in sorted(folders, key=lambda path: int(path.name[4:])):
        with suppress(OSError, ValueError):
            nodes.append(_numbers((folder / "cpulist").read_text(encoding="ascii")))
    return [cpus for cpus in nodes if cpus]


def _numbers(text: str) -> frozenset[int]:
    """Return the numbers of a list in the kernel's notation, such as 0-3,8."""
    found = set[int]()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def cpus_of_thread(thread: int, num_threads: int, allowed: Set[int], root: Path = _ROOT) -> Set[int] | None:
    """Return the allowed processors of a thread's node, or None if all allowed processors are on one node.

    Neighbouring threads share a node. Each node gets threads in proportion to its allowed processors.
    """
    nodes = [found for cpus in cpus_by_node(root) if (found := cpus & allowed)]
    if len(nodes) < 2:
        return None
    place = (2 * thread + 1) * sum(map(len, nodes)) // (2 * num_threads)
    for cpus in nodes:
        if place < len(cpus):
            return cpus
        place -= len(cpus)
    return None


def cpus_of_rank(rank: int, num_ranks: int, num_threads: int, allowed: Set[int], root: Path = _ROOT) -> Set[int] | None:
    """Return the processors of a rank's node. None if its threads have several nodes, or the machine has one."""
    threads = range(rank * num_threads, (rank + 1) * num_threads)
    first, *others = (cpus_of_thread(thread, num_ranks * num_threads, allowed, root) for thread in threads)
    return first if all(other == first for other in others) else None


def node_of_thread(thread: int, num_threads: int) -> Set[int] | None:
    """Return the processors of a thread's NUMA node that the calling thread may use. None if there is one node."""
    allowed = _affinity()
    return None if allowed is None else cpus_of_thread(thread, num_threads, allowed)


def keep_on_node(thread: int, num_threads: int) -> None:
    """Pin the calling thread to the processors of its NUMA node, if there are several nodes."""
    _keep_on(node_of_thread(thread, num_threads))


@contextmanager
def visit(cpus: Set[int]) -> Iterator[None]:
    """Pin the calling thread to those of `cpus` that it may use. Restore its earlier pinning afterwards."""
    allowed = _affinity() or set()
    _keep_on(allowed & cpus or None)
    try:
        yield
    finally:
        _keep_on(allowed or None)


def keep_rank_on_node(rank: int, num_ranks: int, num_threads: int) -> None:
    """Pin the calling thread to the NUMA node of a rank, and so all threads that the rank's process starts later."""
    allowed = _affinity()
    if allowed is not None:
        _keep_on(cpus_of_rank(rank, num_ranks, num_threads, allowed))


def _keep_on(cpus: Set[int] | None) -> None:
    if cpus is not None and sys.platform == "linux":
        with suppress(OSError):  # a sandbox may forbid it
            os.sched_setaffinity(0, cpus)
