"""Forms of keys and values that kernels read: as they are cached, or widened to f32 for many queries.

`infer.compute.quantization.kv_layout` defines the meaning of the bytes. A block's elements are stored 16 per row:
a row of keys is one dimension of 16 positions, a row of values 16 dimensions of one position. Elements of q8 and q4 are
stored in records of 32 dimensions: codes, then 16 scales (f16), then 16 minima in values of q4. A widened block has the
same order, in f32.

With the dot products of `bf16 pairs`, a step multiplies two rows at once: two dimensions of keys, or two positions of
values. A lane then has an element of each, as an i32. Cached rows are paired as they are read, and for many queries
once, in blocks of the same size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

from llvmlite.ir import IRBuilder as Builder
from numba import types
from numba.core import cgutils

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.isa import BF16_PAIRS
from infer.compute.backends.cpu.layouts import BLOCK, LANES
from infer.compute.backends.cpu.simd import (
    F32X16,
    I8X16,
    I16X16,
    I32,
    I32X16,
    I64,
    Value,
    address,
    constant,
    load,
    multiply,
    offset,
    operation,
    store,
)

_ROWS = 2 * LANES  # of a record


def _f32(b: Builder, where: Value) -> Value:
    return load(b, where, F32X16, 4)


def _f16(b: Builder, where: Value) -> Value:
    return simd.widen_f16(b, load(b, where, I16X16, 2))


def _bf16(b: Builder, where: Value) -> Value:
    return simd.widen_bf16(b, load(b, where, I16X16, 2))


def _pair(b: Builder, first: Value, second: Value) -> Value:
    """Load 16 bf16 at `first` and 16 at `second` as pairs: i32 × 16, the first in the low halves."""
    low, high = (b.zext(load(b, row, I16X16, 2), I32X16) for row in (first, second))
    return b.or_(low, b.shl(high, constant(I32X16, 16)))


def _paired(b: Builder, where: Value) -> Value:
    return load(b, where, I32X16, 4)


def _i8(b: Builder, where: Value) -> Value:
    return b.sitofp(b.sext(load(b, where, I8X16), I32X16), F32X16)


@final
@dataclass(frozen=True)
class Form:
    row_bytes: int
    load: Callable[[Builder, Value], Value]  # a row as floats
    load_side: Callable[[Builder, Value], Value] = _f16  # 16 scales, or minima
    side_bytes: int = 0  # 0: floats, which have none
    has_minima: bool = False
    has_nibbles: bool = False  # a row is the low halves of 16 bytes, the next one the high halves
    depth: int = 1  # rows that a step multiplies: 2 of bf16 pairs
    is_paired: bool = False  # the two rows are stored as pairs

    @property
    def is_coded(self) -> bool:
        return self.side_bytes > 0

    @property
    def vector_bytes(self) -> int:
        """Bytes from 16 dims of a value to the next 16 dims of the same position, or of the same pair of positions."""
        return self.row_bytes * (self.depth if self.is_paired else 1)

    @property
    def codes_bytes(self) -> int:
        """Bytes of the codes of a record: 32 rows of 16."""
        return _ROWS * self.row_bytes

    @property
    def record_bytes(self) -> int:
        return self.codes_bytes + self.side_bytes * (1 + self.has_minima)

    @property
    def dim_bytes(self) -> int:
        """Bytes per dim of a block of 16 positions."""
        return self.record_bytes // _ROWS

    def load_step(self, b: Builder, where: Value, row_apart: Value) -> Value:
        """Load the operand of one step of a product: the row at `where` as floats, or pairs of bf16 with the next row.

        The next row is `row_apart` bytes after the first one, unless rows are stored as pairs.
        """
        if self.depth == 1 or self.is_paired:
            return self.load(b, where)
        return _pair(b, where, b.add(where, row_apart))

    def load_factor(self, b: Builder, where: Value) -> Value:
        """Load the factor of one step, in all 16 lanes: an f32 of a query or of softmax weights, or a pair of bf16."""
        return simd.broadcast(b, where) if self.depth == 1 else simd.splat(b, load(b, where, I32, 4))

    def load_element(self, b: Builder, where: Value) -> Value:
        """Load one element of a form of floats as an f32. `where` is its address."""
        if self.row_bytes == 64:
            return simd.load_scalar_f32(b, where)
        bits = simd.load_u16(b, where)
        return simd.widen_f16(b, bits) if self.load is _f16 else simd.widen_bf16(b, bits)

    def load_half(self, b: Builder, record: Value, position: Value, half: Value) -> Value:
        """Load 16 of a position's 32 codes in a record of values, as f32 × 16. `half` is 0 or 1, known at run time."""
        if not self.has_nibbles:
            row = b.add(multiply(b, position, 2), half)
            return self.load(b, b.add(record, multiply(b, row, self.row_bytes)))
        wide = b.zext(load(b, b.add(record, multiply(b, position, LANES)), I8X16), I32X16)
        shift = simd.splat(b, b.trunc(multiply(b, half, 4), I32))
        return b.sitofp(b.and_(b.lshr(wide, shift), constant(I32X16, 15)), F32X16)

    def load_scales(self, b: Builder, record: Value) -> Value:
        return self.load_side(b, offset(b, record, self.codes_bytes))

    def load_minima(self, b: Builder, record: Value) -> Value:
        return self.load_side(b, offset(b, record, self.codes_bytes + self.side_bytes))


_CODES = Form(LANES, _i8, side_bytes=2 * LANES)
_NIBBLES = Form(LANES // 2, _i8, side_bytes=2 * LANES, has_minima=True, has_nibbles=True)
_FLOATS = {"f32": Form(64, _f32), "f16": Form(32, _f16), "bf16": Form(32, _bf16)}
_FLOATS[BF16_PAIRS] = Form(32, _bf16, depth=2)


def _widened(form: Form) -> Form:
    if form.depth == 2:
        return replace(form, load=_paired, is_paired=True)
    if not form.is_coded:
        return _FLOATS["f32"]
    return replace(form, row_bytes=64, load=_f32, load_side=_f32, side_bytes=64, has_nibbles=False)


def _with_widened(forms: dict[str, Form]) -> dict[str, Form]:
    return forms | {f"wide {kv_type}": _widened(form) for kv_type, form in forms.items()}


KEYS = _with_widened(_FLOATS | {"q8": _CODES, "q4": _CODES})
VALUES = _with_widened(_FLOATS | {"q8": _CODES, "q4": _NIBBLES})


def make_widen(form: Form, *, of_keys: bool) -> Any:
    """Return widen(blocks, dim, count, to), which widens `count` contiguous blocks of 16 positions.

    It reads blocks of `form` at `blocks`. It writes blocks of the form "wide …" at `to`: the same order in f32, or
    pairs of rows of bf16. The two pieces of memory must not overlap.
    """

    @operation(types.void, *(address,) * 4)
    def widen(b: Builder, blocks: Value, dim: Value, count: Value, to: Value) -> None:
        if form.is_coded:
            _widen_records(b, form, blocks, b.mul(count, b.udiv(dim, constant(I64, BLOCK))), to)
        elif form.depth == 2:
            rows_apart = constant(I64, 1) if of_keys else b.udiv(dim, constant(I64, LANES))
            _pair_rows(b, form, blocks, b.mul(count, dim), rows_apart, to)
        else:
            _widen_rows(b, form, blocks, b.mul(count, dim), to)

    return widen


def _widen_rows(b: Builder, form: Form, rows: Value, count: Value, to: Value) -> None:
    with cgutils.for_range(b, count) as loop:
        wide = form.load(b, b.add(rows, multiply(b, loop.index, form.row_bytes)))
        simd.store_f32(b, b.add(to, multiply(b, loop.index, 64)), wide)


def _pair_rows(b: Builder, form: Form, rows: Value, count: Value, rows_apart: Value, to: Value) -> None:
    """Store `count` rows of bf16 as pairs of a row and the row that is `rows_apart` rows after it.

    The pairs have the order of their first rows. Keys pair neighbouring dims. Values pair neighbouring positions, which
    are dim / 16 rows apart.
    """
    apart = multiply(b, rows_apart, form.row_bytes)
    with cgutils.for_range(b, b.udiv(count, multiply(b, rows_apart, 2))) as group:
        first = b.mul(group.index, multiply(b, apart, 2))
        with cgutils.for_range(b, rows_apart) as row:
            pair = form.load_step(b, b.add(rows, b.add(first, multiply(b, row.index, form.row_bytes))), apart)
            store(b, b.add(to, b.add(first, multiply(b, row.index, 2 * form.row_bytes))), pair, 4)


def _widen_records(b: Builder, form: Form, records: Value, count: Value, to: Value) -> None:
    wide, size = _widened(form), constant(I64, form.record_bytes)
    with cgutils.for_range(b, count) as record:
        at, out = b.add(records, b.mul(record.index, size)), b.add(to, multiply(b, record.index, wide.record_bytes))
        with cgutils.for_range(b, constant(I64, LANES)) as pair:
            row = b.add(out, multiply(b, pair.index, 2 * wide.row_bytes))
            for half in range(2):
                simd.store_f32(
                    b, offset(b, row, half * wide.row_bytes), form.load_half(b, at, pair.index, constant(I64, half))
                )
        simd.store_f32(b, offset(b, out, wide.codes_bytes), form.load_scales(b, at))
        if form.has_minima:
            simd.store_f32(b, offset(b, out, wide.codes_bytes + wide.side_bytes), form.load_minima(b, at))
