"""Memory of a cache on the host: pages that the system gives when they are written and takes back when told."""

import ctypes
import math
import mmap
import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_NO_HUGE_PAGES: int | None = getattr(mmap, "MADV_NOHUGEPAGE", None)  # Linux has it
_PRIVATE = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
# Both take the pages of private memory away; what macOS calls DONTNEED keeps them.
_FREE: int | None = getattr(mmap, "MADV_DONTNEED" if sys.platform == "linux" else "MADV_FREE", None)


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Small pages: torch.zeros writes them all, and with huge ones the first token takes one for each head of each
    layer, 240 MB of 30 layers. Private: after a fork, what one of the two processes writes is not the other's.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, max(num_bytes, 1), **_PRIVATE)
    if _NO_HUGE_PAGES is not None:
        memory.madvise(_NO_HUGE_PAGES)
    return torch.from_numpy(np.frombuffer(memory, np.uint8)[:num_bytes]).view(dtype).view(tuple(shape))


def give_back(memory: Tensor, first: int, count: int) -> None:
    """Entries [first, first + count) of the second axis are lost, and whole pages of the system's among them go back to
    it: on Linux at once, and are zero when they are next read; on macOS when it needs them. Does nothing where the
    system cannot.
    """
    if _FREE is None:
        return
    madvise = ctypes.CDLL(None).madvise
    for row in memory:
        part = row[first : first + count]
        start = -(-part.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (part.data_ptr() + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end:
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _FREE)
