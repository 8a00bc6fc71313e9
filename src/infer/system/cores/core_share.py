"""Reserve cores for one of several processes that compute at the same time, because they would wait on shared cores."""

import fcntl
import os
import tempfile
from pathlib import Path

from infer.system.cores.cores import processors_by_core


def take_cores(num_threads: int) -> list[int]:
    """Pin this thread, and the threads that it starts, to `num_threads` processors that no other process has reserved.

    They are reserved until the process ends. If there are too few, the list is empty, and threads run anywhere.
    """
    locks = dict[int, int]()
    for processor in processors_by_core():
        if len(locks) < num_threads and (lock := _try_lock(processor)) is not None:
            locks[processor] = lock
    if len(locks) < num_threads:
        for lock in locks.values():
            os.close(lock)
        return []
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
