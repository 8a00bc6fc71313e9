"""GGML's tensor types: their names, the number of bytes per block of values, and the contents of a block.

`BLOCK_FIELDS` describes the contents once; `ggml_blocks` and the CPU's `pack_kernels` make their decoders from it.
"""

from dataclasses import dataclass
from math import nan
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class BlockType:
    """A tensor type that stores `block_size` consecutive values of a row in `block_bytes` bytes.

    A float type has blocks of one value. A type without an id is not a type of GGML: other formats are converted to it.
    """

    name: str
    ggml_id: int | None
    block_size: int
    block_bytes: int
    tail_bytes: int = 0  # bytes after the blocks of a row: an f32 that multiplies the row's values

    @property
    def is_float(self) -> bool:
        return self.block_size == 1

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row. `columns` must be a multiple of the block size."""
        return columns // self.block_size * self.block_bytes + self.tail_bytes


BLOCK_TYPES: dict[str, BlockType] = {
    kind.name: kind
    for kind in (
        BlockType("F32", 0, 1, 4),
        BlockType("F16", 1, 1, 2),
        BlockType("BF16", 30, 1, 2),
        BlockType("Q4_0", 2, 32, 18),
        BlockType("Q4_1", 3, 32, 20),
        BlockType("Q5_0", 6, 32, 22),
        BlockType("Q5_1", 7, 32, 24),
        BlockType("Q8_0", 8, 32, 34),
        BlockType("Q2_K", 10, 256, 84),
        BlockType("Q3_K", 11, 256, 110),
        BlockType("Q4_K", 12, 256, 144),
        BlockType("Q5_K", 13, 256, 176),
        BlockType("Q6_K", 14, 256, 210),
        BlockType("IQ2_XXS", 16, 256, 66),
        BlockType("IQ2_XS", 17, 256, 74),
        BlockType("IQ3_XXS", 18, 256, 98),
        BlockType("IQ1_S", 19, 256, 50),
        BlockType("IQ4_NL", 20, 32, 18),
        BlockType("IQ3_S", 21, 256, 110),
        BlockType("IQ2_S", 22, 256, 82),
        BlockType("IQ4_XS", 23, 256, 136),
        BlockType("IQ1_M", 29, 256, 56),
        BlockType("TQ1_0", 34, 256, 54),
        BlockType("TQ2_0", 35, 256, 66),
        BlockType("MXFP4", 39, 32, 17),
        BlockType("NVFP4", 40, 64, 36),
        BlockType("Q1_0", 41, 128, 18),
        BlockType("Q2_0", 42, 64, 18),
        BlockType("NVFP4_SCALED", None, 64, 36, tail_bytes=4),
        BlockType("F8_E4M3", None, 128, 132),
    )
}


def _e4m3(code: int) -> float:
    """Return the value of an 8-bit number: a sign, 4 bits of exponent, 3 of mantissa (arXiv:2209.05433)."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return nan
    value = (mantissa + 8) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -value if code & 128 else value


IQ4_VALUES = (
    -127,
    -104,
    -83,
    -65,
    -49,
    -35,
    -22,
    -10,
    1,
    13,
    25,
    38,
    53,
    69,
    89,
    113,
)  # values of the codes of IQ4_NL and IQ4_XS
# Twice the values of the codes of MXFP4 and NVFP4.
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
# Values of the codes of grids. The first half is positive: a sign is the bit above a grid's own code.
IQ1_VALUES = (-7, 1, 9, 0, -9, -1, 7, 0)  # eight times the values, with the delta of 1/8 added or subtracted
IQ2_VALUES = (8, 25, 43, 0, -8, -25, -43, 0)
IQ3_XXS_VALUES = (2, 6, 10, 14, 18, 22, 26, 31, -2, -6, -10, -14, -18, -22, -26, -31)  # half of the values
IQ3_S_VALUES = (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)
E4M3_VALUES = tuple(map(_e4m3, range(256)))
FLOAT_TYPES = tuple(name for name, kind in BLOCK_TYPES.items() if kind.is_float)
TYPES_OF_FLOATS = frozenset({*FLOAT_TYPES, "F8_E4M3"})  # a load may quantise their values
GGML_TYPES = {kind.ggml_id: kind for kind in BLOCK_TYPES.values() if kind.ggml_id is not None}


class Field(NamedTuple):
    """Numbers of `bits` bits each, in the `num_bytes` bytes of a block from `at` on.

    Each run of bytes contains first its bytes' lowest bits as consecutive numbers, then the bits above these, and so
    on.
    """

    at: int
    num_bytes: int
    run: int
    bits: int


class Bits(NamedTuple):
    """Numbers of `bits` bits each, in little-endian words of `word_bytes` bytes, `stride` bytes apart from `at` on.

    A word has `per_word` numbers, `step` bits from one to the next; the lowest begins at bit `first`.
    """

    at: int
    bits: int
    stride: int = 1
    word_bytes: int = 1
    per_word: int = 1
    step: int = 0
    first: int = 0


class Trits(NamedTuple):
    """Numbers 0, 1 and 2, `per_byte` in each of the `run` bytes from `at` on.

    The highest digit of base 3 comes first. A byte is a fraction: ⌈256 × digits / 3^5⌉.
    """

    at: int
    run: int
    per_byte: int


class Grid(NamedTuple):
    """Codes from a table of patterns (`ggml_grids`), `width` consecutive codes per index.

    A sign is the bit above a grid's code. Signs have 8 bits for 8 codes, or 7 bits whose eighth makes the number of set
    bits even, or one bit for several codes. If the bit is set, a mirrored grid has codes 2 − c and a negative scale.
    """

    name: str
    width: int
    indices: tuple[Bits, ...]
    signs: Bits
    num_signs: int  # number of signs in a block
    is_mirrored: bool = False

    @property
    def code_bits(self) -> int:
        """Bits of a code in a pattern."""
        return 16 // self.width

    @property
    def sign_shift(self) -> int:
        """Position of the sign bit: magnitudes are numbers below 4 or 8."""
        return 2 if self.width == 8 else 3


ScaleFields = tuple[Field, ...] | Bits | Literal["6 bits"]


class BlockFields(NamedTuple):
    """Contents of a block. A code q means (q − offset, or its number in the table) × scale, plus or minus the minimum.

    The fields of a number have its lowest bits, then the bits above. A K type has several small scales, followed by
    minima: then scale_at and minimum_at are the numbers that multiply the scales and the minima. Its minima are
    subtracted.
    """

    codes: tuple[Field, ...] | tuple[Trits, ...] | Grid
    scale_at: int = 0  # an f16, or an exponent
    minimum_at: int | None = None  # an f16
    scales: ScaleFields = ()  # "6 bits": the 12 bytes from 4 on, as `six_bits` reads them
    scale_offset: int = 0  # offset of the small scales
    offset: int = 0
    table: tuple[float, ...] = ()
    is_signed: bool = False  # codes are signed bytes
    scale_form: Literal["f16", "f32", "exponent", "nibbles", "UE4M3"] = "f16"  # `ggml_blocks` explains them
    are_scales_odd: bool = False  # a small scale s means 2 s + 1
    factor: float = 1.0  # multiplies the super-block's scale: a power of two


_NIBBLES_16 = Field(2, 16, 16, 4)

BLOCK_FIELDS = {
    "Q4_0": BlockFields((_NIBBLES_16,), offset=8),
    "Q4_1": BlockFields((Field(4, 16, 16, 4),), minimum_at=2),
    "Q5_0": BlockFields((Field(6, 16, 16, 4), Field(2, 4, 1, 1)), offset=16),
    "Q5_1": BlockFields((Field(8, 16, 16, 4), Field(4, 4, 1, 1)), minimum_at=2),
    "Q8_0": BlockFields((Field(2, 32, 32, 8),), is_signed=True),
    "Q2_K": BlockFields((Field(16, 64, 32, 2),), 80, 82, scales=(Field(0, 16, 16, 4),)),
    "Q3_K": BlockFields(
        (Field(32, 64, 32, 2), Field(0, 32, 32, 1)),
        108,
        scales=(Field(96, 8, 8, 4), Field(104, 4, 4, 2)),
        scale_offset=32,
        offset=4,
    ),
    "Q4_K": BlockFields((Field(16, 128, 32, 4),), 0, 2, scales="6 bits"),
    "Q5_K": BlockFields((Field(48, 128, 32, 4), Field(16, 32, 32, 1)), 0, 2, scales="6 bits"),
    "Q6_K": BlockFields((Field(0, 128, 64, 4), Field(128, 64, 32, 2)), 208, scales=(Field(192, 16, 16, 8),), offset=32),
    "IQ4_NL": BlockFields((_NIBBLES_16,), table=IQ4_VALUES),
    "IQ4_XS": BlockFields(
        (Field(8, 128, 16, 4),), scales=(Field(4, 4, 1, 4), Field(2, 2, 1, 2)), scale_offset=32, table=IQ4_VALUES
    ),
    "MXFP4": BlockFields((Field(1, 16, 16, 4),), table=FP4_VALUES, scale_form="exponent"),
    "NVFP4": BlockFields((Field(4, 32, 8, 4),), table=FP4_VALUES, scale_form="UE4M3"),
    "Q1_0": BlockFields((Field(2, 16, 1, 1),), table=(-1, 1)),
    "Q2_0": BlockFields((Field(2, 16, 1, 2),), offset=1),
    "TQ1_0": BlockFields((Trits(0, 32, 5), Trits(32, 16, 5), Trits(48, 4, 4)), 52, offset=1),
    "TQ2_0": BlockFields((Field(0, 64, 32, 2),), 64, offset=1),
    "IQ1_S": BlockFields(
        Grid("IQ1", 8, (Bits(2, 8), Bits(34, 3, 2, 2, 4, 3)), Bits(34, 1, 2, 2, first=15), 8, is_mirrored=True),
        scales=Bits(34, 3, 2, 2, first=12),
        table=IQ1_VALUES[:4],
        are_scales_odd=True,
        factor=1 / 8,
    ),
    "IQ1_M": BlockFields(
        Grid("IQ1", 8, (Bits(0, 8), Bits(32, 3, per_word=2, step=4)), Bits(32, 1, per_word=2, step=4, first=3), 32),
        48,
        scales=Bits(48, 3, 2, 2, 4, 3),
        table=IQ1_VALUES,
        scale_form="nibbles",
        are_scales_odd=True,
        factor=1 / 8,
    ),
    "IQ2_XXS": BlockFields(
        Grid("IQ2_XXS", 8, (Bits(2, 8, 8, 4, 4, 8),), Bits(6, 7, 8, 4, 4, 7), 32),
        scales=Bits(6, 4, 8, 4, first=28),
        table=IQ2_VALUES,
        are_scales_odd=True,
        factor=1 / 8,
    ),
    "IQ2_XS": BlockFields(
        Grid("IQ2_XS", 8, (Bits(2, 9, 2, 2),), Bits(2, 7, 2, 2, first=9), 32),
        scales=(Field(66, 8, 1, 4),),
        table=IQ2_VALUES,
        are_scales_odd=True,
        factor=1 / 8,
    ),
    "IQ2_S": BlockFields(
        Grid("IQ2_S", 8, (Bits(2, 8), Bits(66, 2, per_word=4, step=2)), Bits(34, 8), 32),
        scales=(Field(74, 8, 1, 4),),
        table=IQ2_VALUES,
        are_scales_odd=True,
        factor=1 / 8,
    ),
    "IQ3_XXS": BlockFields(
        Grid("IQ3_XXS", 4, (Bits(2, 8),), Bits(66, 7, 4, 4, 4, 7), 32),
        scales=Bits(66, 4, 4, 4, first=28),
        table=IQ3_XXS_VALUES,
        are_scales_odd=True,
        factor=1 / 2,
    ),
    "IQ3_S": BlockFields(
        Grid("IQ3_S", 4, (Bits(2, 8), Bits(66, 1, per_word=8, step=1)), Bits(74, 8), 32),
        scales=(Field(106, 4, 1, 4),),
        table=IQ3_S_VALUES,
        are_scales_odd=True,
    ),
}
BLOCK_FIELDS["NVFP4_SCALED"] = BLOCK_FIELDS["NVFP4"]
BLOCK_FIELDS["F8_E4M3"] = BlockFields((Field(4, 128, 128, 8),), table=E4M3_VALUES, scale_form="f32")
