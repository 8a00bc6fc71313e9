"""Weights unpacked once for many tokens: a strip of two groups' records at a time, which stays in the first cache.

The tiles of all panels are multiplied with a strip before the next strip is unpacked. A tile continues a chain of its
sums, which is stored between strips. So a row's sum is one chain over its records, as without strips. Floats have two
chains, of even and of odd inputs: a tile continues one of them, so it has twice the tokens.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from numba import njit, types
from numba.core import cgutils

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.isa import InstructionSet, Shape
from infer.compute.backends.cpu.layouts import PANEL, Layout, activation_bytes
from infer.compute.backends.cpu.matmul.panels import COLUMN_BYTES, TILE_BYTES, place_of, store_sums
from infer.compute.backends.cpu.matmul.vector_tiles import Chain, Operands, emit_unpacked_tile, num_chains, total_of
from infer.compute.backends.cpu.simd import F32X16, I64, Value, address, constant, load, operation
from infer.compute.backends.cpu.weights.unpacking import make_unpack

PANELS = 8  # that are multiplied with a strip
_GROUPS = 2
_CHAIN_BYTES = _GROUPS * TILE_BYTES  # of a panel's chain of sums


def _num_records(layout: Layout) -> int:
    """Return the number of records of a strip."""
    return 4 if layout.is_float else 16


def _strip_bytes(layout: Layout) -> int:
    return _GROUPS * _num_records(layout) * layout.unpacked_bytes


def scratch_bytes(layout: Layout) -> int:
    """Return the bytes of scratch: a strip, and the panels' second chain of sums.

    The first chain is kept in the results.
    """
    return _strip_bytes(layout) + (num_chains(layout) - 1) * PANELS * _CHAIN_BYTES


def make_multiply_strips(layout: Layout, form: int, isa: InstructionSet, panel_bytes: int) -> Any:
    """Return multiply(first_weights, second_weights, activations, num_records, num_panels, out, scratch).

    It reads two packed groups and `num_panels` full panels of activation records. It stores f32 [panel, group, token,
    16 rows] at `out`, with `panel_bytes` from panel to panel. `scratch` has `scratch_bytes`, aligned to 64.
    """
    unpack, multiply_panel = make_unpack(layout, isa, keeps_offset=True), _make_multiply_panel(layout, form, isa)
    record_bytes, group_bytes = PANEL * activation_bytes(form), _num_records(layout) * layout.unpacked_bytes
    chain, strip_records = _strip_bytes(layout), _num_records(layout)

    @njit(inline="always")
    def multiply(first, second, activations, num_records, num_panels, out, scratch):
        for start in range(0, num_records, strip_records):
            count = min(strip_records, num_records - start)
            unpack(first, start, count, scratch)
            unpack(second, start, count, scratch + group_bytes)
            is_first, is_last = start == 0, start + count == num_records
            for panel in range(num_panels):
                at = activations + (panel * num_records + start) * record_bytes
                to, second_chain = out + panel * panel_bytes, scratch + chain + panel * _CHAIN_BYTES
                multiply_panel(scratch, at, count, to, second_chain, is_first, is_last)

    return multiply


def _make_multiply_panel(layout: Layout, form: int, isa: InstructionSet) -> Any:
    """Return multiply(strip, activations, num_records, out, second_chain, is_first, is_last), for one full panel.

    It reads a strip of two groups, unpacked, and the records of 16 tokens. It continues the sums at `out`, f32 [group,
    token, 16 rows], and for floats those at `second_chain`. In the first strip they start from 0. After the last one
    both chains are added at `out`.
    """
    record_bytes, group_bytes = activation_bytes(form), _num_records(layout) * layout.unpacked_bytes
    shapes = [shape for shape in isa.shapes(layout, form, _GROUPS) if shape.widest == PANEL]
    cover = list(_cover(_of_one_chain(shape, num_chains(layout)) for shape in shapes))

    @operation(types.void, *(address,) * 5, types.boolean, types.boolean)
    def multiply_panel(
        b: Builder, strip: Value, activations: Value, num_records: Value, out: Value, second_chain: Value,
        is_first: Value, is_last: Value,
    ) -> None:  # fmt: skip
        chains = (out, second_chain)[: num_chains(layout)]
        for (parity, where), (shape, first, count) in product(enumerate(chains), cover):
            turns = constant(I64, _GROUPS // shape.groups)
            with cgutils.for_range(b, turns) as turn, cgutils.for_range(b, constant(I64, count)) as loop:
                token = simd.offset(b, simd.multiply(b, loop.index, shape.columns), first)
                weights = b.add(strip, simd.multiply(b, turn.index, group_bytes))
                operands = Operands(
                    [simd.offset(b, weights, group * group_bytes) for group in range(shape.groups)],
                    b.add(activations, simd.multiply(b, token, record_bytes)),
                    constant(I64, PANEL * record_bytes),
                    num_records,
                )
                to = place_of(b, turn.index, token)
                chain = _continued(b, b.add(where, to), shape, is_first)
                emit_unpacked_tile(b, layout, form, isa, operands, chain, parity)
                store_sums(b, total_of(b, [chain]), b.add(where, to))
                if parity:
                    with b.if_then(is_last):
                        before = _continued(b, b.add(out, to), shape, ir.Constant(ir.IntType(1), 0))
                        store_sums(b, total_of(b, [before, chain]), b.add(out, to))

    return multiply_panel


def _of_one_chain(shape: Shape, num_chains: int) -> Shape:
    """Return the shape of a tile with one chain of sums, in the registers of `num_chains`."""
    columns = shape.columns * num_chains
    return shape._replace(columns=columns, fewest=columns - (columns > 2))


def _cover(shapes: Iterable[Shape]) -> Iterator[tuple[Shape, int, int]]:
    """Yield (shape, first token, number of tiles) for each shape of tiles that together cover a full panel."""
    done = 0
    for shape in shapes:
        count = (PANEL - done + shape.columns - shape.fewest) // shape.columns
        if count > 0:
            yield shape, done, count
        done += count * shape.columns


def _continued(b: Builder, where: Value, shape: Shape, is_first: Value) -> Chain:
    """Return variables with the sums that a tile continues: those at address `where`, or zeros in the first strip."""

    def variable(group: int, column: int) -> Value:
        slot = cgutils.alloca_once(b, F32X16)
        before = load(b, simd.offset(b, where, TILE_BYTES * group + COLUMN_BYTES * column), F32X16, 4)
        b.store(b.select(is_first, constant(F32X16, 0), before), slot)
        return slot

    return [[variable(group, column) for column in range(shape.columns)] for group in range(shape.groups)]
