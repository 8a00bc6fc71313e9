"""Attention's inner loops over blocks that are quantised along the head: integers are made floats once for all columns.

A block of 16 positions is a record for each 32 of the head's dimensions, in keys and in values alike:

    q8    512 bytes of codes, then f16 scale × 16 positions: x = scale × code
    q4    256 bytes of codes, f16 scale × 16, f16 minimum × 16: x = scale × code + minimum

In keys a row of 16 bytes is one dimension of 16 positions, or of q4 dimensions i (low nibbles) and i + 16 (high ones).
In values a row is the 32 codes of one position, or of q4 its 16 bytes of two dimensions each.
A score is summed for each record by itself, then scaled. p is multiplied by a position's scale before it meets codes;
what the minima add is summed over 16 positions and added behind them.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from infer.kernels.cpu import simd
from infer.kernels.cpu.layouts import BLOCK, LANES
from infer.kernels.cpu.simd import F32, F32X16, I8X16, I16X16, I32, I32X16, I64, Value, constant, load, offset

CODES_BYTES = {"q8": BLOCK * LANES, "q4": BLOCK * LANES // 2}
RECORD_BYTES = {"q8": CODES_BYTES["q8"] + 2 * LANES, "q4": CODES_BYTES["q4"] + 4 * LANES}


def _row(b: Builder, kv_type: str, where: Value) -> list[Value]:
    """The floats of 16 bytes: one vector of int8, or the low and the high nibbles."""
    bits = load(b, where, I8X16)
    if kv_type == "q8":
        return [b.sitofp(b.sext(bits, I32X16), F32X16)]
    wide = b.zext(bits, I32X16)
    halves = [b.and_(wide, constant(I32X16, 15)), b.lshr(wide, constant(I32X16, 4))]
    return [b.sitofp(half, F32X16) for half in halves]


def _halves(b: Builder, where: Value) -> Value:
    return simd.widen_f16(b, load(b, where, I16X16, 2))


def _broadcast(b: Builder, where: Value) -> Value:
    return simd.splat(b, load(b, where, F32, 4))


def _zeros(b: Builder, count: int) -> list[Value]:
    """Variables, zero from here on whenever control comes by."""
    slots = [cgutils.alloca_once(b, F32X16) for _ in range(count)]
    for slot in slots:
        b.store(constant(F32X16, 0.0), slot)
    return slots


def _add_product(b: Builder, slot: Value, x: Value, y: Value) -> None:
    b.store(simd.fma(b, x, y, b.load(slot)), slot)


def _times(b: Builder, x: Value, factor: int) -> Value:
    return b.mul(x, constant(I64, factor))


@intrinsic(prefer_literal=True)
def sum_queries(context: Any, kv_type: Any, columns: Any, queries: Any, dim: Any, out: Any) -> Any:
    """out[column × 16 + record] = Σ of a query's 32 elements, which minima are multiplied with: only q4 has them."""
    name, width = kv_type.literal_value, columns.literal_value

    def emit(context: Any, b: Builder, signature: Any, arguments: Any) -> Any:
        *_, queries, dim, out = arguments
        if name != "q4":
            return context.get_dummy_value()
        for column in range(width):
            query = b.add(queries, _times(b, dim, 4 * column))
            with cgutils.for_range(b, b.udiv(dim, constant(I64, BLOCK))) as loop:
                at = b.add(query, _times(b, loop.index, 4 * BLOCK))
                total = simd.sum_f32(b, b.fadd(simd.load_f32(b, at), simd.load_f32(b, offset(b, at, 4 * LANES))))
                to = b.add(out, _times(b, loop.index, 4))
                simd.store_scalar_f32(b, offset(b, to, 4 * LANES * column), total)
        return context.get_dummy_value()

    return types.void(kv_type, columns, *(types.int64,) * 3), emit


def emit_scores(b: Builder, name: str, width: int, count: int, arguments: Sequence[Value]) -> None:
    """`score_tile` for columns × blocks."""
    queries, sums, keys, dim, out, stride = arguments
    totals = _zeros(b, width * count)
    records = b.udiv(dim, constant(I64, BLOCK))
    block_bytes = _times(b, records, RECORD_BYTES[name])
    with cgutils.for_range(b, records) as record:
        first = b.add(keys, _times(b, record.index, RECORD_BYTES[name]))
        at = [b.add(first, _times(b, block_bytes, k)) for k in range(count)]
        query = b.add(queries, _times(b, record.index, 4 * BLOCK))
        parts = _zeros(b, width * count)
        with cgutils.for_range(b, constant(I64, CODES_BYTES[name] // LANES)) as row:
            codes = [_row(b, name, b.add(where, _times(b, row.index, LANES))) for where in at]
            for half in range(len(codes[0])):
                element = offset(b, b.add(query, _times(b, row.index, 4)), 4 * LANES * half)
                for column in range(width):
                    q = _broadcast(b, b.add(element, _times(b, dim, 4 * column)))
                    for block in range(count):
                        _add_product(b, parts[column * count + block], q, codes[block][half])
        for block in range(count):
            scale = _halves(b, offset(b, at[block], CODES_BYTES[name]))
            for column in range(width):
                index = column * count + block
                _add_product(b, totals[index], b.load(parts[index]), scale)
            if name == "q8":
                continue
            minimum = _halves(b, offset(b, at[block], CODES_BYTES[name] + 2 * LANES))
            for column in range(width):
                total = b.add(sums, _times(b, record.index, 4))
                q = _broadcast(b, offset(b, total, 4 * LANES * column))
                _add_product(b, totals[column * count + block], q, minimum)
    for column in range(width):
        to = b.add(out, _times(b, stride, column))
        for block in range(count):
            simd.store_f32(b, offset(b, to, 64 * block), b.load(totals[column * count + block]))


def emit_values(b: Builder, name: str, width: int, count: int, arguments: Sequence[Value]) -> None:
    """`value_tile` for columns × records of 32 dimensions."""
    probabilities, stride, values, dim, first_dim, num_positions, out, out_stride = arguments
    to, first = b.add(out, _times(b, first_dim, 4)), b.udiv(first_dim, constant(I64, BLOCK))
    places = [
        offset(b, b.add(to, _times(b, out_stride, column)), 64 * vector)
        for column in range(width)
        for vector in range(2 * count)
    ]
    sums = _zeros(b, len(places))
    for slot, place in zip(sums, places, strict=True):
        b.store(simd.load_f32(b, place), slot)
    scaled = [_lanes(b) for _ in range(width * count)]
    block_bytes = _times(b, b.udiv(dim, constant(I64, BLOCK)), RECORD_BYTES[name])
    start = b.add(values, _times(b, first, RECORD_BYTES[name]))
    blocks = b.udiv(b.add(num_positions, constant(I64, LANES - 1)), constant(I64, LANES))
    with cgutils.for_range(b, blocks) as block:
        left = b.sub(num_positions, _times(b, block.index, LANES))
        inside = b.select(b.icmp_signed("<", left, constant(I64, LANES)), left, constant(I64, LANES))
        record = b.add(start, b.mul(block.index, block_bytes))
        records_at = [offset(b, record, RECORD_BYTES[name] * r) for r in range(count)]
        p_at = b.add(probabilities, _times(b, block.index, 4 * LANES))
        p = [simd.load_f32(b, b.add(p_at, _times(b, stride, column))) for column in range(width)]
        for r, at in enumerate(records_at):
            scale = _halves(b, offset(b, at, CODES_BYTES[name]))
            for column in range(width):
                simd.store_f32(b, scaled[column * count + r], b.fmul(p[column], scale))
        with cgutils.for_range(b, inside) as position:
            element = _times(b, position.index, 4)
            for r, at in enumerate(records_at):
                codes = _position(b, name, at, position.index)
                for column in range(width):
                    share = _broadcast(b, b.add(scaled[column * count + r], element))
                    for half in range(2):
                        _add_product(b, sums[(column * count + r) * 2 + half], share, codes[half])
        if name == "q4":
            _add_minima(b, records_at, p, inside, sums)
    for slot, place in zip(sums, places, strict=True):
        simd.store_f32(b, place, b.load(slot))


def _position(b: Builder, kv_type: str, record: Value, position: Value) -> list[Value]:
    """A position's 32 codes as two vectors."""
    row = CODES_BYTES[kv_type] // LANES
    at = b.add(record, _times(b, position, row))
    return [vector for part in range(0, row, LANES) for vector in _row(b, kv_type, offset(b, at, part))]


def _add_minima(b: Builder, records_at: list[Value], p: list[Value], inside: Value, sums: list[Value]) -> None:
    """Of the block's first `inside` positions: behind them nothing may be believed, not even that it is finite."""
    count = len(records_at)
    lanes = ir.Constant(I32X16, list(range(LANES)))
    seen = b.icmp_signed("<", lanes, simd.splat(b, b.trunc(inside, I32)))
    for r, at in enumerate(records_at):
        minimum = _halves(b, offset(b, at, CODES_BYTES["q4"] + 2 * LANES))
        for column, shares in enumerate(p):
            products = b.select(seen, b.fmul(shares, minimum), constant(F32X16, 0.0))
            added = simd.splat(b, simd.sum_f32(b, products))
            for half in range(2):
                slot = sums[(column * count + r) * 2 + half]
                b.store(b.fadd(b.load(slot), added), slot)


def _lanes(b: Builder) -> Value:
    """The address of 16 floats in the frame."""
    with b.goto_entry_block():
        slot = b.alloca(F32X16)
    slot.align = 64
    return b.ptrtoint(slot, I64)
