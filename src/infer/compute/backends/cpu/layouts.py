"""Layout of a packed matrix in memory: groups of 16 rows, so that each 32-bit lane accumulates its own row.

A group of a block type is a run of records of 32 inputs; a quad is 4 inputs × 16 rows = 64 values, one vector:

    low    4 bits: 4 × 64 bytes, quad j in the low nibbles and j + 4 in the high ones     8 bits: 8 × 64 bytes
           2 bits: 2 × 64 bytes, for quads 0–3 and 4–7, quad j in the bits from 2 (j mod 4) on
           1 bit: 64 bytes, bit j of a byte belongs to quad j
           patterns: 64 or 128 bytes, a byte for each number of a grid's pattern (`low_codes`)
           trits: 64 + 48 bytes for the 8 trits of quads 0–7, in 14 bits (`low_codes`)
    high   the bits above: 64 bytes, bit j of a byte belongs to quad j      2 bits: as the low 2 bits
    scale  f16 × 16 rows, twice in NVFP4, or an exponent u8 × 16; minimum f16 × 16 rows, if the type has one

An instruction that multiplies 8 inputs of a row (`isa`) needs another order of a pair of quads, in bits as in bytes.
First come the 8 inputs of rows 0–7, row by row, then those of rows 8–15.

K and IQ types have 8 records after the super-block's f16 scale (and minimum), and small integers in the records' place:

    [d × 16][dmin × 16] 8 × { low, high, scale u8 or i8 × 16, minimum u8 × 16 }      both twice in Q2_K, Q3_K, Q6_K

A super-block of Q4_K, which is 256 inputs of 16 rows in 2,368 bytes (a record begins at a multiple of 32 bytes):

    at 0    d: f16 of row 0, 1 … 15                                               32 bytes
       32   dmin: f16 of row 0, 1 … 15                                            32
       64   record 0, inputs 0–31                                                288
              byte    0      4      8           60
              at 0    row 0 | row 1 | row 2 | … | row 15     inputs 0–3 in the low nibbles, 16–19 in the high ones
                 64   row 0 | row 1 | row 2 | … | row 15     inputs 4–7 and 20–23
                 128  row 0 | row 1 | row 2 | … | row 15     inputs 8–11 and 24–27
                 192  row 0 | row 1 | row 2 | … | row 15     inputs 12–15 and 28–31
                 256  scale, u8 of row 0, 1 … 15                                  16
                 272  minimum, u8 of row 0, 1 … 15                                16
       352  record 1, inputs 32–63, and so on up to record 7

Q1_0, Q2_0 and ternary types have 4, 2 or 8 records after a scale, and none in the records. The two scales of a record
of IQ1_M, IQ2_XS and IQ2_S share a byte. After d some IQ types have 32 bits for each row, of which record i has the
four from 4 i on: its scale and sign (IQ1_S), or a bit for each 8 inputs, the sign of their delta (IQ1_M) or the ninth
of their pattern's number (IQ2_XS).

Every number keeps the value that the file gives it. An integer q is stored as q + offset ≥ 0, or as its code in the
type's table. Patterns of IQ2_S and IQ3_S are stored code by code. If rows have a scale, the group ends with f32 × 16
rows, and a row's sum is multiplied by it. A group of a float type is `[in_features, 16 rows]`, inputs padded by zeros
to a multiple of 32. In BF16 two inputs of a row lie side by side, for instructions that multiply pairs:
`[in_features / 2, 16 rows, 2]`. Records of E4M3 numbers follow a scale for each 128 inputs:

    [f32 × 16 rows] 4 × { u8 × 32 inputs × 16 rows }
"""

from dataclasses import dataclass, replace
from typing import Literal, final

from infer.compute.quantization.ggml_types import (
    BLOCK_FIELDS,
    BLOCK_TYPES,
    FP4_VALUES,
    IQ1_VALUES,
    IQ2_VALUES,
    IQ3_S_VALUES,
    IQ3_XXS_VALUES,
    IQ4_VALUES,
    Grid,
)

LANES = 16  # rows of a group, and 32-bit elements of a vector
PANEL = 16  # tokens whose activations lie together
SPARE_TOKENS = 3  # that a tile may read after them
BLOCK = 32  # inputs of a record, and of a block of activations
PLANE_BYTES = BLOCK + 8  # from one int8 plane of an activation record to the next
SCALE_AT = BLOCK  # where in an activation record its scale stands, and s ΣA after it
PLANES = {"exact": 2, "fast": 1}  # int8 planes of quantised activations, by their precision
WORDS = 4  # the form of activations is this + the planes where they lie as 16-bit words, else planes; of floats 0
PAIRS = 3  # the form of activations in BF16
QUADS_BYTES = 8 * 64  # of a record of a block type, once each value is a byte
TRITS_BYTES = 64 + 48  # of a record's trits


def activation_bytes(form: int) -> int:
    """Return the size of a record of activations: floats, one plane of bytes, or two, BF16 or words."""
    if form == 0:
        return 4 * BLOCK
    if form == PAIRS:
        return 2 * BLOCK
    return BLOCK + 16 if form == 1 else 2 * BLOCK + 16


def number_at(i: int, lane: int, neighbours: int, num_bytes: int) -> int:
    """Return the offset of input i of a row in a group of a float type, whose numbers have `num_bytes` bytes."""
    return ((i // neighbours * LANES + lane) * neighbours + i % neighbours) * num_bytes


@final
@dataclass(frozen=True)
class Layout:
    type: str
    low_bits: int  # of a block type 1, 2, 4 or 8; of a float type its width
    high_bits: int = 0
    offset: int = 0
    has_minimum: bool = False
    scales_per_record: int = 1  # 0: the super-block's is the only one
    records_per_super: int = 1  # above 1: records of a super-block, whose scales are small integers under its f16
    codes: tuple[int, ...] = ()  # what the values, 16 at most, stand for; (): themselves
    has_exponent: bool = False  # the record's own scale is a power of two
    factor: float = 1.0  # of the super-block's scale
    has_nibbles: bool = False  # two scales of a record are 4 bits each of a byte: s means 2 s + 1
    grid: str = ""  # whose patterns' numbers are stored in place of the codes' low bits
    has_trits: bool = False  # codes are 0, 1 or 2
    nibbles: Literal["", "scales", "deltas", "numbers"] = ""  # contents of a super-block's 4 bits per record and row
    is_float: bool = False
    neighbours: int = 1  # inputs of a row that lie side by side, of a float type

    @property
    def per_block(self) -> int:
        """Number of records of a block in a file."""
        return BLOCK_TYPES[self.type].block_size // BLOCK

    @property
    def has_small_scales(self) -> bool:
        return self.records_per_super > 1 and self.scales_per_record > 0

    @property
    def has_half(self) -> bool:
        """True if a block in a file has an f16 scale."""
        return BLOCK_FIELDS[self.type].scale_form in ("f16", "nibbles")

    @property
    def high_at(self) -> int:
        """Offset of the high bits in a record."""
        if self.has_trits:
            return TRITS_BYTES
        return LANES * BLOCK // self.pattern_width if self.grid else BLOCK * LANES * self.low_bits // 8

    @property
    def pattern_width(self) -> int:
        """Number of codes in a pattern of the grid."""
        codes = BLOCK_FIELDS[self.type].codes
        assert isinstance(codes, Grid)
        return codes.width

    @property
    def nibbles_at(self) -> int:
        """Offset of the bits for the records of a super-block."""
        return 2 * LANES * (1 + self.has_minimum)

    @property
    def scale_at(self) -> int:
        return self.high_at + (0 if self.is_float else BLOCK * LANES * self.high_bits // 8)

    @property
    def scale_bytes(self) -> int:
        """Bytes of one scale, and of one minimum, of a row's record."""
        return 1 if self.has_small_scales or self.has_exponent else 2

    @property
    def minimum_at(self) -> int:
        if self.nibbles == "scales":
            return self.scale_at
        return self.scale_at + LANES * self.scale_bytes * (1 if self.has_nibbles else self.scales_per_record)

    @property
    def record_bytes(self) -> int:
        return self.high_at if self.is_float else self.minimum_at + LANES * self.scale_bytes * self.minima

    @property
    def super_header(self) -> int:
        if self.records_per_super == 1:
            return 0
        return 4 * LANES if self.is_float else self.nibbles_at + 4 * LANES * (self.nibbles != "")

    @property
    def super_bytes(self) -> int:
        return self.super_header + self.records_per_super * self.record_bytes

    @property
    def parts(self) -> int:
        """Number of parts of a record with a scale each."""
        return max(1, self.scales_per_record)

    @property
    def minima(self) -> int:
        return self.parts * self.has_minimum

    @property
    def has_signed_scales(self) -> bool:
        """True if integer scales are signed: scales beside minima are never negative."""
        return not self.has_minimum

    @property
    def unpacking_steps(self) -> int:
        """Rough number of vector instructions that unpack 64 values, or the 16 of a float type's input."""
        if self.is_float:
            return {"F32": 0, "F16": 1, "BF16": 1}.get(self.type, 5)
        return (
            (self.low_bits < 8)
            + 2 * (self.high_bits > 0)
            + (self.codes != ())
            + 3 * (self.grid != "" or self.has_trits)
        )

    @property
    def largest(self) -> int:
        """Largest multiplied value. Multiplied values are never negative."""
        return max(self.codes) + self.offset if self.codes else (1 << (self.low_bits + self.high_bits)) - 1

    @property
    def unpacked_bytes(self) -> int:
        """Size of a record as `unpacking` writes it."""
        if self.is_float:
            return 4 * BLOCK * LANES
        return QUADS_BYTES + 4 * LANES * (self.parts + self.minima)

    def num_records(self, in_features: int) -> int:
        return -(-in_features // BLOCK)

    def token_bytes(self, form: int, in_features: int) -> int:
        """Return the bytes of a token's activations."""
        return self.num_records(in_features) * activation_bytes(form)

    @property
    def row_scale_bytes(self) -> int:
        """Bytes of the scales of rows at the end of a group."""
        return LANES * BLOCK_TYPES[self.type].tail_bytes

    def group_bytes(self, in_features: int) -> int:
        return self.num_records(in_features) // self.records_per_super * self.super_bytes + self.row_scale_bytes


def _grid_layout(
    type_: str, bits: int, offset: int, codes: tuple[int, ...], scales_per_record: int = 1, factor: float = 1.0
) -> Layout:
    """Return the layout of a type whose codes come from a grid, with a sign above `bits` each."""
    return Layout(type_, bits, 1, offset, False, scales_per_record, 8, codes, factor=factor)


def _ternary_layout(type_: str, nibbles: Literal["scales", "deltas"]) -> Layout:
    return Layout(
        type_, 2, offset=16, codes=IQ1_VALUES, records_per_super=8, factor=1 / 8, has_trits=True, nibbles=nibbles
    )


_IQ2_S = replace(_grid_layout("IQ2_S", 2, 64, IQ2_VALUES, scales_per_record=2, factor=1 / 8), has_nibbles=True)

LAYOUTS = {
    layout.type: layout
    for layout in (
        Layout("Q4_0", low_bits=4, offset=8),
        Layout("Q4_1", low_bits=4, has_minimum=True),
        Layout("Q5_0", low_bits=4, high_bits=1, offset=16),
        Layout("Q5_1", low_bits=4, high_bits=1, has_minimum=True),
        Layout("Q8_0", low_bits=8, offset=128),
        Layout("Q2_K", low_bits=2, has_minimum=True, scales_per_record=2, records_per_super=8),
        Layout("Q3_K", low_bits=2, high_bits=1, offset=4, scales_per_record=2, records_per_super=8),
        Layout("Q4_K", low_bits=4, has_minimum=True, records_per_super=8),
        Layout("Q5_K", low_bits=4, high_bits=1, has_minimum=True, records_per_super=8),
        Layout("Q6_K", low_bits=4, high_bits=2, offset=32, scales_per_record=2, records_per_super=8),
        Layout("IQ4_NL", low_bits=4, offset=128, codes=IQ4_VALUES),
        Layout("IQ4_XS", low_bits=4, offset=128, codes=IQ4_VALUES, records_per_super=8),
        Layout("MXFP4", low_bits=4, offset=16, codes=FP4_VALUES, has_exponent=True),
        Layout("NVFP4", low_bits=4, offset=16, codes=FP4_VALUES, scales_per_record=2),
        Layout("NVFP4_SCALED", low_bits=4, offset=16, codes=FP4_VALUES, scales_per_record=2),
        Layout("Q1_0", low_bits=1, offset=1, codes=(-1, 1), scales_per_record=0, records_per_super=4),
        Layout("Q2_0", low_bits=2, offset=1, scales_per_record=0, records_per_super=2),
        Layout("TQ1_0", low_bits=2, offset=1, scales_per_record=0, records_per_super=8),
        Layout("TQ2_0", low_bits=2, offset=1, scales_per_record=0, records_per_super=8),
        _ternary_layout("IQ1_S", "scales"),
        replace(_ternary_layout("IQ1_M", "deltas"), scales_per_record=2, has_nibbles=True),
        replace(_grid_layout("IQ2_XXS", 2, 64, IQ2_VALUES, factor=1 / 8), grid="IQ2_XXS"),
        replace(_IQ2_S, type="IQ2_XS", grid="IQ2_XS", nibbles="numbers"),
        _IQ2_S,
        replace(_grid_layout("IQ3_XXS", 3, 32, IQ3_XXS_VALUES, factor=1 / 2), grid="IQ3_XXS"),
        Layout("IQ3_S", low_bits=4, offset=16, codes=IQ3_S_VALUES, records_per_super=8),
        Layout("F32", low_bits=32, is_float=True),
        Layout("F16", low_bits=16, is_float=True),
        Layout("BF16", low_bits=16, is_float=True, neighbours=2),
        Layout("F8_E4M3", low_bits=8, records_per_super=4, is_float=True),
    )
}
