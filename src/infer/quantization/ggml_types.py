"""GGML's tensor types: their names, the number of bytes per block of values, and the contents of a block.

`BLOCK_FIELDS` describes the contents once: `ggml_blocks` and the CPU's `packing` make their decoders from it.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class BlockType:
    """A tensor type that stores `block_size` consecutive values of a row in `block_bytes` bytes.

    A float type has blocks of one value.
    """

    name: str
    ggml_id: int
    block_size: int
    block_bytes: int

    @property
    def is_float(self) -> bool:
        return self.block_size == 1

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row. `columns` must be a multiple of the block size."""
        return columns // self.block_size * self.block_bytes


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
        BlockType("IQ4_NL", 20, 32, 18),
        BlockType("IQ4_XS", 23, 256, 136),
        BlockType("MXFP4", 39, 32, 17),
    )
}
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
)  # of IQ4_NL's and IQ4_XS's codes
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # of MXFP4's, twice what they mean
FLOAT_TYPES = tuple(name for name, kind in BLOCK_TYPES.items() if kind.is_float)


class Field(NamedTuple):
    """Numbers of `bits` bits each, in the `num_bytes` bytes of a block from `at` on.

    Each run of bytes holds first its bytes' lowest bits, as consecutive numbers, then the bits above these, and so on.
    """

    at: int
    num_bytes: int
    run: int
    bits: int


class BlockFields(NamedTuple):
    """Contents of a block. A code q means (q − offset, or its number in the table) × scale, plus or minus the minimum.

    The fields of a number are its lowest bits, then the bits above. A K type has several small scales, and minima after
    them: scale_at and minimum_at are then what scales and minima are multiplied with. Its minima are subtracted.
    """

    codes: tuple[Field, ...]
    scale_at: int = 0  # an f16, or an exponent
    minimum_at: int | None = None  # an f16
    scales: tuple[Field, ...] | Literal["6 bits"] = ()  # "6 bits": the 12 bytes from 4 on, as `six_bits` reads them
    scale_offset: int = 0  # of the small scales
    offset: int = 0
    table: tuple[int, ...] = ()
    is_signed: bool = False  # codes are signed bytes
    has_exponent: bool = False  # the scale is a power of two: e means 2^(e − 128)


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
    "MXFP4": BlockFields((Field(1, 16, 16, 4),), table=FP4_VALUES, has_exponent=True),
}
