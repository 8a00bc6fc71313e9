"""The number of threads with which torch computes in the calling thread. The setting belongs to each thread.

A child of a fork has none of its parent's OpenMP threads, and GNU's OpenMP waits for them forever. So in a child, torch
gets one thread.
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
    """Per thread: how often it has entered `one_thread`, and torch's earlier number of threads."""

    depth = 0
    before = 1


_ours = _Ours()


@contextmanager
def one_thread() -> Iterator[None]:
    """Make torch compute with one thread, in this thread only. Afterwards torch has its earlier number of threads."""
    depth = _ours.depth
    try:
        if depth == 0:
            _ours.before = torch.get_num_threads()
            if _ours.before > 1:
                torch.set_num_threads(1)
                # This is also the initial number in a new thread, unless another thread sets it, as here.
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
