"""Forms of keys and values that kernels read: as they are cached, or widened to f32 for many queries.

`infer.compute.quantization.kv_layout` defines the meaning of the bytes. A block's elements are stored 16 per row:
a row of keys is one dimension of 16 positions, a row of values 16 dimensions of one position. Elements of q8 and q4 are
stored in records of 32 dimensions: codes, then 16 scales (f16), then 16 minima in values of q4. A widened block has the
same order, in f32.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

from llvmlite.ir import IRBuilder as Builder
from numba import types
from numba.core import cgutils

from infer.compute.backends.cpu import simd
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
)

_ROWS = 2 * LANES  # of a record


def _f32(b: Builder, where: Value) -> Value:
    return load(b, where, F32X16, 4)


def _f16(b: Builder, where: Value) -> Value:
    return simd.widen_f16(b, load(b, where, I16X16, 2))


def _bf16(b: Builder, where: Value) -> Value:
    return simd.widen_bf16(b, load(b, where, I16X16, 2))


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

    @property
    def is_coded(self) -> bool:
        return self.side_bytes > 0

    @property
    def codes_bytes(self) -> int:
        """Bytes of a record's codes."""
        return _ROWS * self.row_bytes

    @property
    def record_bytes(self) -> int:
        return self.codes_bytes + self.side_bytes * (1 + self.has_minima)

    @property
    def dim_bytes(self) -> int:
        """Bytes per dim of a block of 16 positions."""
        return self.record_bytes // _ROWS

    def load_element(self, b: Builder, where: Value) -> Value:
        """Load one element of a form of floats."""
        if self.row_bytes == 64:
            return simd.load_scalar_f32(b, where)
        bits = simd.load_u16(b, where)
        return simd.widen_f16(b, bits) if self.load is _f16 else simd.widen_bf16(b, bits)

    def load_half(self, b: Builder, record: Value, position: Value, half: Value) -> Value:
        """Load the first or the second 16 of a value's 32 codes."""
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


def _widened(form: Form) -> Form:
    if not form.is_coded:
        return _FLOATS["f32"]
    return replace(form, row_bytes=64, load=_f32, load_side=_f32, side_bytes=64, has_nibbles=False)


def _with_widened(forms: dict[str, Form]) -> dict[str, Form]:
    return forms | {f"wide {kv_type}": _widened(form) for kv_type, form in forms.items()}


KEYS = _with_widened(_FLOATS | {"q8": _CODES, "q4": _CODES})
VALUES = _with_widened(_FLOATS | {"q8": _CODES, "q4": _NIBBLES})


def make_widen(form: Form) -> Any:
    """Return widen(blocks, dim, count, to), which widens `count` blocks to f32."""

    @operation(types.void, *(address,) * 4)
    def widen(b: Builder, blocks: Value, dim: Value, count: Value, to: Value) -> None:
        if form.is_coded:
            _widen_records(b, form, blocks, b.mul(count, b.udiv(dim, constant(I64, BLOCK))), to)
        else:
            _widen_rows(b, form, blocks, b.mul(count, dim), to)

    return widen


def _widen_rows(b: Builder, form: Form, rows: Value, count: Value, to: Value) -> None:
    with cgutils.for_range(b, count) as loop:
        wide = form.load(b, b.add(rows, multiply(b, loop.index, form.row_bytes)))
        simd.store_f32(b, b.add(to, multiply(b, loop.index, 64)), wide)


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
