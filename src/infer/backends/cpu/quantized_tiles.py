"""Attention's inner loops over blocks that are quantised along the head: integers are made floats once for all columns.

A block of 16 positions is a record for each 32 of the head's dimensions (`infer.quantization.kv_layout`):

    8 bits    512 bytes of codes, then f16 scale × 16 positions
    4 bits    256 bytes of codes, f16 scale × 16, f16 minimum × 16

In keys, which have 8 bits, a row of 16 bytes is one dimension of 16 positions. In values a row is the codes of one
position, 32 bytes or 16. A score is summed for each record by itself, then scaled. p is multiplied by a position's
scale before it meets codes; what the minima add is summed over 16 positions and added after them.
"""

from collections.abc import Sequence

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from numba.core import cgutils

from infer.backends.cpu import simd
from infer.backends.cpu.ahead import Ahead
from infer.backends.cpu.layouts import BLOCK, LANES
from infer.backends.cpu.simd import F32, F32X16, I8X16, I16X16, I32, I32X16, I64, Value, constant, load, offset
from infer.quantization.kv_formats import key_block_bytes, value_block_bytes

KEY_CODES, VALUE_CODES = BLOCK * LANES, {"q8": BLOCK * LANES, "q4": BLOCK * LANES // 2}  # bytes of a record
KEY_RECORD, VALUE_RECORD = key_block_bytes("q8", BLOCK), {name: value_block_bytes(name, BLOCK) for name in VALUE_CODES}


def _bytes(b: Builder, where: Value) -> Value:
    return b.sitofp(b.sext(load(b, where, I8X16), I32X16), F32X16)


def _nibbles(b: Builder, where: Value) -> list[Value]:
    """The low ones of 16 bytes, and the high ones."""
    wide = b.zext(load(b, where, I8X16), I32X16)
    halves = b.and_(wide, constant(I32X16, 15)), b.lshr(wide, constant(I32X16, 4))
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


def emit_mix(b: Builder, where: Value) -> None:
    """`kv_blocks.mix` of the 32 floats at `where`, in place."""
    places = [where, offset(b, where, 4 * LANES)]
    left, right = (simd.load_f32(b, place) for place in places)
    mixed, apart = [b.fadd(left, right), b.fsub(left, right)], LANES // 2
    while apart:
        neighbours = ir.Constant(I32X16, [lane ^ apart for lane in range(LANES)])
        signs = ir.Constant(F32X16, [-1.0 if lane & apart else 1.0 for lane in range(LANES)])
        mixed = [b.fadd(b.shuffle_vector(x, x, neighbours), b.fmul(x, signs)) for x in mixed]
        apart //= 2
    for place, x in zip(places, mixed, strict=True):
        simd.store_f32(b, place, b.fmul(x, constant(F32X16, BLOCK**-0.5)))


def emit_scores(b: Builder, width: int, count: int, arguments: Sequence[Value], ahead: Ahead) -> None:
    """`score_tile` for columns × blocks."""
    queries, keys, dim, out, stride = arguments
    totals = _zeros(b, width * count)
    records = b.udiv(dim, constant(I64, BLOCK))
    block_bytes = _times(b, records, KEY_RECORD)
    with cgutils.for_range(b, records) as record:
        first = b.add(keys, _times(b, record.index, KEY_RECORD))
        at = [b.add(first, _times(b, block_bytes, k)) for k in range(count)]
        query = b.add(queries, _times(b, record.index, 4 * BLOCK))
        parts = _zeros(b, width * count)
        with cgutils.for_range(b, constant(I64, BLOCK)) as row:
            ahead.ask(b)
            codes = [_bytes(b, b.add(where, _times(b, row.index, LANES))) for where in at]
            element = b.add(query, _times(b, row.index, 4))
            for column in range(width):
                q = _broadcast(b, b.add(element, _times(b, dim, 4 * column)))
                for block in range(count):
                    _add_product(b, parts[column * count + block], q, codes[block])
        for block in range(count):
            scale = _halves(b, offset(b, at[block], KEY_CODES))
            for column in range(width):
                index = column * count + block
                _add_product(b, totals[index], b.load(parts[index]), scale)
    for column in range(width):
        to = b.add(out, _times(b, stride, column))
        for block in range(count):
            simd.store_f32(b, offset(b, to, 64 * block), b.load(totals[column * count + block]))


def emit_values(b: Builder, name: str, width: int, count: int, arguments: Sequence[Value], ahead: Ahead) -> None:
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
    block_bytes = _times(b, b.udiv(dim, constant(I64, BLOCK)), VALUE_RECORD[name])
    start = b.add(values, _times(b, first, VALUE_RECORD[name]))
    blocks = b.udiv(b.add(num_positions, constant(I64, LANES - 1)), constant(I64, LANES))
    with cgutils.for_range(b, blocks) as block:
        left = b.sub(num_positions, _times(b, block.index, LANES))
        inside = b.select(b.icmp_signed("<", left, constant(I64, LANES)), left, constant(I64, LANES))
        record = b.add(start, b.mul(block.index, block_bytes))
        records_at = [offset(b, record, VALUE_RECORD[name] * r) for r in range(count)]
        p_at = b.add(probabilities, _times(b, block.index, 4 * LANES))
        p = [simd.load_f32(b, b.add(p_at, _times(b, stride, column))) for column in range(width)]
        for r, at in enumerate(records_at):
            scale = _halves(b, offset(b, at, VALUE_CODES[name]))
            for column in range(width):
                simd.store_f32(b, scaled[column * count + r], b.fmul(p[column], scale))
        with cgutils.for_range(b, inside) as position:
            ahead.ask(b)
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


def _position(b: Builder, name: str, record: Value, position: Value) -> list[Value]:
    """A position's 32 codes as two vectors."""
    at = b.add(record, _times(b, position, VALUE_CODES[name] // LANES))
    return _nibbles(b, at) if name == "q4" else [_bytes(b, at), _bytes(b, offset(b, at, LANES))]


def _add_minima(b: Builder, records_at: list[Value], p: list[Value], inside: Value, sums: list[Value]) -> None:
    """Of the block's first `inside` positions: after them nothing may be believed, not even that it is finite."""
    count = len(records_at)
    lanes = ir.Constant(I32X16, list(range(LANES)))
    seen = b.icmp_signed("<", lanes, simd.splat(b, b.trunc(inside, I32)))
    for r, at in enumerate(records_at):
        minimum = _halves(b, offset(b, at, VALUE_CODES["q4"] + 2 * LANES))
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
