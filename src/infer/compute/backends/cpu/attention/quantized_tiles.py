"""Scores and sums of values like those of `tiles`, for keys and values that are cached as q8 or q4.

A record has 32 dims × 16 positions of codes, 16 scales (one per position), and 16 minima for values of q4. Codes are
converted to floats once for all columns. A score is summed over each record of 32 dims by itself, then scaled. A weight
p is multiplied by a position's scale before it is multiplied with codes. The minima's contribution is summed over 16
positions and added after them.
"""

from collections.abc import Sequence

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from numba.core import cgutils

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.attention import registers
from infer.compute.backends.cpu.attention.cached_forms import Form
from infer.compute.backends.cpu.layouts import BLOCK, LANES
from infer.compute.backends.cpu.prefetch import LoopPrefetch
from infer.compute.backends.cpu.simd import F32X16, I32X16, I64, Value, constant, multiply, offset

_ZERO = constant(F32X16, 0.0)


def emit_mix(b: Builder, where: Value) -> None:
    """Emit `kv_layout.mix` of the 32 floats at `where`, in place: a Hadamard rotation, divided by √32."""
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


def emit_scores(
    b: Builder, form: Form, queries: Sequence[Value], blocks: Sequence[Value], dim: Value, ahead: LoopPrefetch
) -> list[Value]:
    """Emit a tile's scores: `queries`, addresses of f32 [dim], × `blocks`, addresses of 16 cached keys each.

    A block has dim / 32 records of 32 dims × 16 positions of codes, and a scale per position.

    Returns:
        Variables of f32 × 16 positions, by query and block: index query × number of blocks + block.
    """
    width, count = len(queries), len(blocks)
    totals = registers.variables(b, [_ZERO] * (width * count))
    with cgutils.for_range(b, b.udiv(dim, constant(I64, BLOCK))) as loop:
        records = [b.add(block, multiply(b, loop.index, form.record_bytes)) for block in blocks]
        first = multiply(b, loop.index, 4 * BLOCK)
        sums = registers.variables(b, [_ZERO] * (width * count))
        with cgutils.for_range(b, constant(I64, BLOCK)) as row:
            ahead()
            codes = [form.load(b, b.add(record, multiply(b, row.index, form.row_bytes))) for record in records]
            element = b.add(first, multiply(b, row.index, 4))
            for column, query in enumerate(queries):
                registers.add_products(b, sums[column * count :], simd.broadcast(b, b.add(query, element)), codes)
        scales = [form.load_scales(b, record) for record in records]
        for index, total in enumerate(totals):
            registers.add_products(b, [total], b.load(sums[index]), [scales[index % count]])
    return totals


def emit_values(
    b: Builder, form: Form, p: Sequence[Value], values: Value, dim: Value, vector: Value, num_vectors: int,
    num_positions: Value, out: Sequence[Value], ahead: LoopPrefetch,
) -> None:  # fmt: skip
    """Emit out[column] += Σ weight × value over the positions, for `num_vectors` × 16 dims from `vector` on.

    Args:
        b: The builder.
        form: The form of the cached values.
        p: Addresses of each column's softmax weights, f32 by position.
        values: Address of the first block: for each 16 positions dim / 32 records of 16 positions × 32 dims of codes.
        dim: Number of dims of a head.
        vector: The first of the tile's vectors of 16 dims. Two vectors are a record, so one is half of one.
        num_vectors: Number of the tile's vectors, 1 or even.
        num_positions: Number of positions. What the last block has after them may be anything.
        out: Addresses of the tile's first dims of each column's sums, f32.
        ahead: The prefetch of each position.
    """
    places = [offset(b, to, 4 * LANES * v) for to in out for v in range(num_vectors)]
    sums = registers.variables(b, [simd.load_f32(b, place) for place in places])
    per_record = min(2, num_vectors)
    halves = [constant(I64, 0), constant(I64, 1)] if per_record == 2 else [b.and_(vector, constant(I64, 1))]
    start = b.add(values, multiply(b, b.lshr(vector, constant(I64, 1)), form.record_bytes))
    scaled = [[registers.lanes(b) for _ in p] for _ in range(num_vectors // per_record)]
    with cgutils.for_range(b, b.udiv(b.add(num_positions, constant(I64, LANES - 1)), constant(I64, LANES))) as block:
        left = b.sub(num_positions, multiply(b, block.index, LANES))
        inside = b.select(b.icmp_signed("<", left, constant(I64, LANES)), left, constant(I64, LANES))
        at = b.add(start, b.mul(block.index, multiply(b, dim, form.dim_bytes)))
        records = [offset(b, at, form.record_bytes * r) for r in range(len(scaled))]
        weights = [simd.load_f32(b, b.add(where, multiply(b, block.index, 4 * LANES))) for where in p]
        for record, row in zip(records, scaled, strict=True):
            scale = form.load_scales(b, record)
            for to, x in zip(row, weights, strict=True):
                simd.store_f32(b, to, b.fmul(x, scale))
        with cgutils.for_range(b, inside) as position:
            ahead()
            element = multiply(b, position.index, 4)
            for r, record in enumerate(records):
                codes = [form.load_half(b, record, position.index, half) for half in halves]
                for column, where in enumerate(scaled[r]):
                    first = column * num_vectors + r * per_record
                    registers.add_products(b, sums[first:], simd.broadcast(b, b.add(where, element)), codes)
        if form.has_minima:
            for r, record in enumerate(records):
                for column, added in enumerate(_of_minima(b, form, record, weights, inside)):
                    first = column * num_vectors + r * per_record
                    for slot in sums[first : first + per_record]:
                        b.store(b.fadd(b.load(slot), added), slot)
    registers.store_variables(b, sums, places)


def _of_minima(b: Builder, form: Form, record: Value, weights: Sequence[Value], inside: Value) -> list[Value]:
    """Return Σ p × minimum over the block's first `inside` positions, for each column, in all 16 lanes.

    The values after them may be anything, even infinite or NaN.
    """
    seen, minima = simd.first_lanes(b, inside), form.load_minima(b, record)
    return [simd.splat(b, simd.sum_f32(b, b.select(seen, b.fmul(x, minima), _ZERO))) for x in weights]
