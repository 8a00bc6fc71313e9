"""Number of threads that torch computes with in the calling thread. The setting belongs to each thread.

A child of a fork has none of its parent's OpenMP threads, and GNU's OpenMP waits for them for ever. So torch gets one
thread in a child.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch


@final
class _Ours(threading.local):
    """Per thread: how often it has entered `one_thread`, and how many threads torch had before."""

    depth = 0
    before = 1


_ours = _Ours()


@contextmanager
def one_thread() -> Iterator[None]:
    """Make torch compute with one thread, in this thread only. Afterwards torch has as many threads as before."""
    depth = _ours.depth
    try:
        if depth == 0:
            _ours.before = torch.get_num_threads()
            if _ours.before > 1:
                torch.set_num_threads(1)
                # Which is also what a thread begins with that torch has not seen: another one's call mends that.
                other = threading.Thread(target=torch.set_num_threads, args=(_ours.before,))
                other.start()
                other.join()
        _ours.depth = depth + 1
        yield
    finally:
        _ours.depth = depth
        if depth == 0 and _ours.before > 1:
            torch.set_num_threads(_ours.before)


def _in_child() -> None:
    torch.set_num_threads(1)
    _ours.before = 1


if sys.platform == "linux":
    os.register_at_fork(after_in_child=_in_child)
