"""How a packed matrix lies in memory: groups of 16 rows, so that each 32-bit lane accumulates its own row.

A group of a block type is a run of records of 32 inputs; a quad is 4 inputs × 16 rows = 64 values, one vector:

    low    4 bits: 4 × 64 bytes, quad j in the low nibbles and j + 4 in the high ones     8 bits: 8 × 64 bytes
    high   the fifth bits: 64 bytes, bit j of a byte belongs to quad j      2 bits: 2 × 64 bytes, for quads 0–3 and 4–7
    scale  f16 × 16 rows; minimum f16 × 16 rows, where the type has one

K types have 8 records behind the super-block's f16 scale (and minimum), and small integers in the records' place:

    [d × 16][dmin × 16] 8 × { low, high, scale u8 or i8 × 16 (two of them in Q6_K), minimum u8 × 16 }

Every number is kept as the file means it; an integer q is stored as q + offset ≥ 0.
A group of a float type is `[in_features, 16 rows]`, its inputs padded with zeros to a multiple of 8.
"""

import mmap
import sys
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from infer.weights import Weight

LANES = 16  # rows of a group, and 32-bit elements of a vector
PANEL = 16  # tokens whose activations lie together
BLOCK = 32  # inputs of a record of a block type, and of a block of quantised activations
UNIT = 8  # inputs of a record of a float type
QUADS_BYTES = 8 * 64  # of a record of a block type, once each value is a byte


@final
@dataclass(frozen=True)
class Layout:
    type: str
    low_bits: int  # of a block type 4 or 8; of a float type its width
    high_bits: int = 0
    offset: int = 0
    has_minimum: bool = False
    scales_per_record: int = 0  # integer scales under a super-block's; 0: each record has its own f16
    is_float: bool = False

    @property
    def inputs(self) -> int:
        return UNIT if self.is_float else BLOCK

    @property
    def records_per_super(self) -> int:
        return 8 if self.scales_per_record else 1

    @property
    def high_at(self) -> int:
        """Where in a record the high bits lie."""
        return self.inputs * LANES * self.low_bits // 8

    @property
    def scale_at(self) -> int:
        return self.high_at + (0 if self.is_float else BLOCK * LANES * self.high_bits // 8)

    @property
    def minimum_at(self) -> int:
        return self.scale_at + (LANES * self.scales_per_record if self.scales_per_record else 2 * LANES)

    @property
    def record_bytes(self) -> int:
        if self.is_float:
            return self.high_at
        return self.minimum_at + (self.has_minimum * LANES * (1 if self.scales_per_record else 2))

    @property
    def super_header(self) -> int:
        return 2 * LANES * (1 + self.has_minimum) if self.scales_per_record else 0

    @property
    def super_bytes(self) -> int:
        return self.super_header + self.records_per_super * self.record_bytes

    def activation_bytes(self, planes: int) -> int:
        """Size of the activation record that goes with a weight record."""
        return 4 * UNIT if self.is_float else BLOCK * planes + 16

    @property
    def parts(self) -> int:
        """Scales of a record."""
        return max(1, self.scales_per_record)

    @property
    def unpacked_bytes(self) -> int:
        """Size of a record as `matrix_tiles` takes it."""
        return QUADS_BYTES + 4 * LANES * (self.parts + self.has_minimum)

    def num_records(self, in_features: int) -> int:
        return -(-in_features // self.inputs)

    def group_bytes(self, in_features: int) -> int:
        return self.num_records(in_features) // self.records_per_super * self.super_bytes


LAYOUTS = {
    layout.type: layout
    for layout in (
        Layout("Q4_0", low_bits=4, offset=8),
        Layout("Q4_1", low_bits=4, has_minimum=True),
        Layout("Q5_0", low_bits=4, high_bits=1, offset=16),
        Layout("Q5_1", low_bits=4, high_bits=1, has_minimum=True),
        Layout("Q8_0", low_bits=8, offset=128),
        Layout("Q4_K", low_bits=4, has_minimum=True, scales_per_record=1),
        Layout("Q5_K", low_bits=4, high_bits=1, has_minimum=True, scales_per_record=1),
        Layout("Q6_K", low_bits=4, high_bits=2, offset=32, scales_per_record=2),
        Layout("F32", low_bits=32, is_float=True),
        Layout("F16", low_bits=16, is_float=True),
        Layout("BF16", low_bits=16, is_float=True),
    )
}


@final
@dataclass(frozen=True)
class PackedWeight(Weight):
    layout: Layout
    shape: tuple[int, int]
    data: Tensor  # uint8, the groups one behind the other
    planes: int  # int8 planes of the activations that it is multiplied with: 2 is exact, 1 is fast

    @property
    def out_features(self) -> int:
        return self.shape[0]

    @property
    def in_features(self) -> int:
        return self.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.data.numel()

    @property
    def num_groups(self) -> int:
        return -(-self.shape[0] // LANES)

    @property
    def group_bytes(self) -> int:
        return self.layout.group_bytes(self.shape[1])

    def data_at(self, group: int = 0) -> int:
        return int(self.data.data_ptr()) + group * self.group_bytes


def allocate(num_bytes: int) -> Tensor:
    """Pages that are zero until they are written, huge ones where the system has them: weights are read end to end.

    Neighbouring allocations share huge pages, so that small weights waste nothing.
    """
    if sys.platform == "linux":
        pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
    else:
        pages = mmap.mmap(-1, max(num_bytes, 1))
    return torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes)
