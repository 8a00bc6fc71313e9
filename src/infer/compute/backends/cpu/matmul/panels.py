"""One or two groups of 16 rows × a panel of tokens, by tiles of the instruction set's shapes."""

from typing import Any

from llvmlite.ir import IRBuilder as Builder
from numba import types
from numba.core import cgutils

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.isa import InstructionSet, Shape
from infer.compute.backends.cpu.layouts import LANES, PAIRS, PANEL, Layout, activation_bytes
from infer.compute.backends.cpu.matmul.matrix_tiles import MatrixTile
from infer.compute.backends.cpu.matmul.pair_tiles import emit_pair_tile
from infer.compute.backends.cpu.matmul.vector_tiles import Operands, emit_block_tile, emit_float_tile
from infer.compute.backends.cpu.simd import I64, Value, address, constant, operation

COLUMN_BYTES = 4 * LANES  # of a result: a vector of 16 rows for each token
TILE_BYTES = COLUMN_BYTES * PANEL  # from a group's results to the next one's


def make_multiply_panel(layout: Layout, form: int, isa: InstructionSet, num_groups: int) -> Any:
    """Return multiply(first_weights, second_weights, activations, width, num_records, out, scratch).

    It reads one packed group (the second is ignored) or two neighbouring ones, and `width` × `num_records` activation
    records of a panel. It stores f32 [group, token, 16 rows] at `out`, with `TILE_BYTES` from group to group.

    `scratch` is for `matrix_tiles`. A tile may also compute tokens beyond the last, from the memory there; their
    results are ignored.
    """
    shapes = isa.shapes(layout, form, num_groups)

    @operation(types.void, *(address,) * 7)
    def multiply_panel(
        b: Builder, first: Value, second: Value, activations: Value, width: Value, num_records: Value, out: Value,
        scratch: Value,
    ) -> None:  # fmt: skip
        record_bytes, group_bytes = constant(I64, activation_bytes(form)), b.sub(second, first)
        done = constant(I64, 0)
        for shape in shapes:
            columns, left = constant(I64, shape.columns), b.sub(width, done)
            count = b.sdiv(b.add(left, constant(I64, shape.columns - shape.fewest)), columns)
            if shape.widest < PANEL:
                count = b.select(b.icmp_signed("<=", width, constant(I64, shape.widest)), count, constant(I64, 0))
            turns = constant(I64, num_groups // shape.groups)
            with cgutils.for_range(b, turns) as turn, cgutils.for_range(b, count) as loop:
                token = b.add(done, b.mul(loop.index, columns))
                at = b.add(activations, b.mul(token, record_bytes))
                to = place_of(b, turn.index, token)
                weights = [first, second] if shape.groups == 2 else [b.add(first, b.mul(turn.index, group_bytes))]
                operands = Operands(weights, at, b.mul(width, record_bytes), num_records)
                emit_tile(b, layout, form, isa, shape, operands, b.add(out, to), scratch)
            done = b.add(done, b.mul(count, columns))

    return multiply_panel


def emit_tile(
    b: Builder, layout: Layout, form: int, isa: InstructionSet, shape: Shape, operands: Operands, out: Value,
    scratch: Value,
) -> None:  # fmt: skip
    """Emit a tile of this shape, and the stores of its sums at `out`, which is the place of its first token."""
    if shape.on_matrices:
        weights, activations, stride, num_records = operands
        all_operands = [*weights, activations, stride, out, constant(I64, TILE_BYTES), scratch]
        MatrixTile(b, layout, form, isa, shape.columns, all_operands, is_unpacked=False).emit(num_records)
        return
    if form == PAIRS:
        sums = emit_pair_tile(b, layout, shape.columns, operands)
    elif layout.is_float:
        sums = emit_float_tile(b, layout, shape.columns, operands)
    else:
        sums = emit_block_tile(b, layout, form, isa, shape.columns, operands)
    store_sums(b, sums, out)


def place_of(b: Builder, group: Value, token: Value) -> Value:
    """Return the offset in bytes of a token's 16 results of a group, in f32 [group, 16 tokens, 16 rows]."""
    return b.add(simd.multiply(b, token, COLUMN_BYTES), simd.multiply(b, group, TILE_BYTES))


def store_sums(b: Builder, sums: list[list[Value]], out: Value) -> None:
    """Emit the stores of a tile's sums, by group and column, at `out`: f32 [group, 16 tokens, 16 rows]."""
    for group, totals in enumerate(sums):
        for column, total in enumerate(totals):
            simd.store_f32(b, simd.offset(b, out, TILE_BYTES * group + COLUMN_BYTES * column), total)
