"""Cores for one of several processes of a machine that compute at once: on the same cores they wait for each other."""

import fcntl
import os
import tempfile
from pathlib import Path

from infer.system.cores import processors_by_core


def take_cores(num_threads: int) -> list[int]:
    """Pin this thread, and those that it starts, to as many processors that no other process has taken. They are taken
    until the process ends. Empty where there are not so many: threads run where they may.
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
