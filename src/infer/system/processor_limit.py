"""Limits of processor time for a block of Python, for the main thread of a program that runs nothing else.

Only processor time counts, so a busy machine does not change the result.
"""

import math
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

_LEAST_SECONDS = 1e-3  # shortest timer: 0 would stop it


class LateError(BaseException):
    """The time of a block is over. Handlers must not mistake it for a fault of the data that the block reads."""


class OverLimitError(Exception):
    """A block took longer than its own limit."""


def processor_seconds() -> float:
    """Return the processor time of this process and of the processes that it waited for."""
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def watch_limits() -> None:
    """Install the signal handler that `limited` needs."""
    signal.signal(signal.SIGPROF, _late)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise OverLimitError if the block takes more processor time. The limit of an enclosing block stays active."""
    around = signal.getitimer(signal.ITIMER_PROF)[0] or math.inf
    begun = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, min(seconds, around))
    try:
        yield
    except LateError:
        if seconds > around:
            raise
        raise OverLimitError from None
    finally:
        left = max(around - (time.process_time() - begun), _LEAST_SECONDS)
        signal.setitimer(signal.ITIMER_PROF, 0.0 if around == math.inf else left)


def _late(number: int, frame: object) -> NoReturn:
    raise LateError
