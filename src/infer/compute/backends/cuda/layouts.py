"""Layout of a packed matrix in a GPU's memory: a plane for each kind of number, blocks of 32 inputs in each.

    codes    [rows, blocks, bytes]   4 bits: 16 bytes, input i in the low nibble of byte i, i + 16 in the high one;
                                     8 bits: 32 signed bytes; 2 bits: see below
    high     [rows, blocks, bytes]   the bits above; 1 bit: 4 bytes, input 4 j + b in bit j of byte b; 2 bits: see below
    scales   [rows, blocks]          f16, or bf16 if it is a power of two
    minima   [rows, blocks]          f16, if the type has one

2 bits: input 16 g + 4 w + b is in byte 4 g + b, from bit 2 w on. So the four bytes of a word, shifted and masked, are
four consecutive inputs of every type: an operand of dp4a.

K and IQ types have an f16 scale (and minimum) per 8 blocks in `supers` [rows, blocks / 8, 1 or 2]. They have small
integers in `scales` and `minima` [rows, blocks, 1 or 2]: int8, one per block or one per half block.

Other types are unpacked into these forms. Patterns of grids become 4-bit codes with signs, under `supers` in f32 if
these have a factor. A scale of more than 32 values is repeated for each block. Bits of Q1_0 become 0 and 2. The two
scales of a block of NVFP4 are f16, under `supers` of 1.

Every number keeps the value that the file gives it. An integer q is stored as q + offset ≥ 0, or as its code in the
type's table. A matrix of a float type is `codes`, as stored.
"""

from dataclasses import dataclass
from typing import final

from torch import Tensor

from infer.compute.operands.weights import Weight
from infer.compute.quantization.ggml_types import (
    FP4_VALUES,
    IQ1_VALUES,
    IQ2_VALUES,
    IQ3_S_VALUES,
    IQ3_XXS_VALUES,
    IQ4_VALUES,
)

BLOCK = 32  # inputs of a block of weights, and of quantised activations
PLANES = {"exact": 2, "fast": 1}  # int8 planes of quantised activations, by their precision


@final
@dataclass(frozen=True)
class Layout:
    type: str
    low_bits: int
    high_bits: int = 0
    offset: int = 0
    has_minimum: bool = False
    scales_per_block: int = 0  # scales under a super-block's; 0: each block has its own float
    table: tuple[int, ...] = ()  # what the codes of 4 bits stand for, 16 at most; (): themselves
    is_float: bool = False


LAYOUTS = {
    layout.type: layout
    for layout in (
        Layout("Q4_0", low_bits=4, offset=8),
        Layout("Q4_1", low_bits=4, has_minimum=True),
        Layout("Q5_0", low_bits=4, high_bits=1, offset=16),
        Layout("Q5_1", low_bits=4, high_bits=1, has_minimum=True),
        Layout("Q8_0", low_bits=8),
        Layout("Q2_K", low_bits=2, has_minimum=True, scales_per_block=2),
        Layout("Q3_K", low_bits=2, high_bits=1, offset=4, scales_per_block=2),
        Layout("Q4_K", low_bits=4, has_minimum=True, scales_per_block=1),
        Layout("Q5_K", low_bits=4, high_bits=1, has_minimum=True, scales_per_block=1),
        Layout("Q6_K", low_bits=4, high_bits=2, offset=32, scales_per_block=2),
        Layout("IQ4_NL", low_bits=4, table=IQ4_VALUES),
        Layout("IQ4_XS", low_bits=4, table=IQ4_VALUES, scales_per_block=1),
        Layout("MXFP4", low_bits=4, table=FP4_VALUES),
        Layout("NVFP4", low_bits=4, table=FP4_VALUES, scales_per_block=2),
        Layout("IQ1_S", low_bits=4, table=IQ1_VALUES, scales_per_block=1),
        Layout("IQ1_M", low_bits=4, table=IQ1_VALUES, scales_per_block=2),
        Layout("IQ2_XXS", low_bits=4, table=IQ2_VALUES, scales_per_block=1),
        Layout("IQ2_XS", low_bits=4, table=IQ2_VALUES, scales_per_block=2),
        Layout("IQ2_S", low_bits=4, table=IQ2_VALUES, scales_per_block=2),
        Layout("IQ3_XXS", low_bits=4, table=IQ3_XXS_VALUES, scales_per_block=1),
        Layout("IQ3_S", low_bits=4, table=IQ3_S_VALUES, scales_per_block=1),
        Layout("TQ1_0", low_bits=2, offset=1),
        Layout("TQ2_0", low_bits=2, offset=1),
        Layout("Q1_0", low_bits=2, offset=1),
        Layout("Q2_0", low_bits=2, offset=1),
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
    planes: int  # int8 planes of the activations that it is multiplied with: 2 is exact, 1 is fast
    codes: Tensor
    high: Tensor | None = None
    scales: Tensor | None = None
    minima: Tensor | None = None
    supers: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        tensors = (self.codes, self.high, self.scales, self.minima, self.supers)
        return sum(each.numel() * each.element_size() for each in tensors if each is not None)
