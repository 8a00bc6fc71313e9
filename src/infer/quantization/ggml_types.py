"""GGML's tensor types: their names, and the number of bytes per block of values."""

from dataclasses import dataclass


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
