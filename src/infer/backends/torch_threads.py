"""How many threads torch computes with, in the thread that asks: its setting is one of each thread by itself.

A child of a fork has none of the threads of its parent's OpenMP, and GNU's waits for them for ever: there torch gets
one thread.
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
    """Of this thread: how often it is within `one_thread`, and how many threads torch had before."""

    depth = 0
    before = 1


_ours = _Ours()


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes with one thread, in this thread alone; afterwards with as many as before."""
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
