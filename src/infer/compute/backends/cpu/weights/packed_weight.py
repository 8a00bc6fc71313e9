"""A packed matrix in memory, and the allocation of memory for packed matrices."""

import mmap
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from infer.compute.backends.cpu.isa import instruction_set
from infer.compute.backends.cpu.layouts import LANES, Layout
from infer.compute.backends.host_memory import pages
from infer.compute.operands.weights import Weight

_CACHE_LINE = 64


@final
@dataclass(frozen=True)
class PackedWeight(Weight):
    """A matrix packed for the CPU's kernels.

    Attributes:
        layout: The layout of its groups of 16 rows.
        shape: Number of rows and of inputs. The last group is padded with rows of zeros.
        data: uint8, one group after another. For experts that are read from a file, the groups of the frames.
        planes: Number of int8 planes of the activations that it is multiplied with: 2 for exact, 1 for fast.
    """

    layout: Layout
    shape: tuple[int, int]
    data: Tensor  # uint8, the groups one after another; of experts that are read from a file, the frames' groups
    planes: int  # int8 planes of the activations that it is multiplied with: 2 is exact, 1 is fast

    @property
    def num_bytes(self) -> int:
        return self.num_groups * self.group_bytes

    @property
    def num_groups(self) -> int:
        return -(-self.shape[0] // LANES)

    @property
    def group_bytes(self) -> int:
        return self.layout.group_bytes(self.shape[1])

    @property
    def form(self) -> int:
        """Form of the activations that the matrix is multiplied with (`layouts.activation_bytes`)."""
        return instruction_set().form(self.layout, self.planes)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's activation records for this matrix."""
        return self.layout.token_bytes(self.form, self.in_features)

    def data_at(self, group: int = 0) -> int:
        return int(self.data.data_ptr()) + group * self.group_bytes


_HUGE_PAGE, _PIECE = 1 << 21, 1 << 26


@final
class Pieces:
    """Memory for weights, allocated in order from pieces of 64 MB that begin with a huge page.

    The system provides a huge page if nothing in it was written before, and most weights of a small model are smaller
    than one. A piece is freed with the last of its weights.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin a new piece, with a new lock: in a forked child, a thread that held the old one does not exist."""
        self._newest: Callable[[], mmap.mmap | None] = lambda: None
        self._taken = 0
        self._taking = threading.RLock()

    def take(self, num_bytes: int) -> Tensor:
        """Return uint8 memory, aligned to 64 bytes. Its pages are zero until they are written."""
        with self._taking:
            piece = self._newest()
            if piece is None or self._taken + num_bytes > len(piece):
                piece = pages(max(num_bytes, _PIECE) + _HUGE_PAGE)
                self._newest = weakref.ref(piece)
                self._taken = -torch.frombuffer(piece, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
            start, self._taken = self._taken, self._taken + -(-num_bytes // _CACHE_LINE) * _CACHE_LINE
            return torch.frombuffer(piece, dtype=torch.uint8, count=num_bytes, offset=start)


_pieces = Pieces()
os.register_at_fork(after_in_child=_pieces.forget)


def allocate(num_bytes: int) -> Tensor:
    return _pieces.take(num_bytes)
