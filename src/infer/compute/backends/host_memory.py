"""Memory of a cache on the host. The system allocates its pages when they are written, and frees them on request."""

import ctypes
import math
import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

_HUGE_PAGES: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux has it
_PRIVATE = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
# Both take the pages of private memory away; what macOS calls DONTNEED keeps them.
_FREE: int | None = getattr(mmap, "MADV_DONTNEED" if sys.platform == "linux" else "MADV_FREE", None)


def pages(num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, num_bytes, **_PRIVATE)
    if _HUGE_PAGES is not None:
        with suppress(OSError):  # a kernel without them
            memory.madvise(_HUGE_PAGES)
    return memory


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a zeroed tensor in private memory, in huge pages if the system has them.

    A page is allocated only when something in it is written; torch.zeros writes all. After a fork, neither process sees
    what the other writes.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = pages(max(num_bytes, 1))
    return torch.from_numpy(np.frombuffer(memory, np.uint8)[:num_bytes]).view(dtype).view(tuple(shape))


def give_back(memory: Tensor, first: int, count: int) -> None:
    """Free entries [first, first + count) of the first axis: their contents are lost.

    The system's pages that lie wholly among the entries return to the system. Linux takes them immediately, and they
    are zero when they are next read. macOS takes them when it needs them. Does nothing if the system cannot free them.
    """
    if _FREE is None:
        return
    part = memory[first : first + count]
    start = -(-part.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (part.data_ptr() + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _FREE)
