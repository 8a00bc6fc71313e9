"""The inner loop: one or two groups of 16 rows of a packed weight × `columns` tokens of activations, in registers.

A tile of 2 groups × 4 tokens. Each sum is a vector of 16 rows, a register of AVX-512 or two of AVX2:

                          token 0     token 1     token 2     token 3
                          A[4 inputs] A[4 inputs] A[4 inputs] A[4 inputs]    4 bytes of a record, in every lane
    group 0  q[4 × 16]    sums[0][0]  sums[0][1]  sums[0][2]  sums[0][3]     a quad: 4 inputs × 16 rows
    group 1  q[4 × 16]    sums[1][0]  sums[1][1]  sums[1][2]  sums[1][3]

Eight quads are a record. A tile reads its groups' records once, from the first input to the last, beside the records
of the same inputs of its tokens. Two groups share each broadcast activation: on an Ice Lake Xeon, one dot per cycle
runs with a broadcast from memory, and two per cycle between registers.

For each record of 32 inputs, row r, token t, with activation a = s × A (A an integer of 16 or 8 bits):

    Σ (d q + m) a  =  d s Σ q A  +  m s Σ A          q stored as q + offset:  Σ q A = Σ (q + offset) A − offset Σ A

Σ q A is exact in 32-bit integers. Then sum = fma(d × s, Σ q A, sum), and fma(m, s ΣA, sum) if there is a minimum. If
the halves of a record have scales (and minimums) of their own, each half is summed by itself. So a row's result is one
chain of float operations over the records, the same for every number of columns. A of 16 bits is stored as two int8
planes, A = 256 hi + lo.

An activation record, one per block and token: [hi × 32] scale f32, scale × ΣA f32 [lo × 32] −ΣA of each half i32
"""

from functools import reduce
from typing import NamedTuple

from llvmlite.ir import IRBuilder as Builder
from numba.core import cgutils

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.activation_record import ActivationRecord, Dots
from infer.compute.backends.cpu.arithmetic import arithmetic_of
from infer.compute.backends.cpu.isa import InstructionSet
from infer.compute.backends.cpu.layouts import BLOCK, LAYOUTS, SCALE_AT, Layout
from infer.compute.backends.cpu.prefetch import Ahead, prefetch
from infer.compute.backends.cpu.simd import F32, F32X16, I32, I64, Value, constant, load
from infer.compute.backends.cpu.weight_streams import FAR, bytes_ahead
from infer.compute.backends.cpu.weights.unpacking import PackedRecords, UnpackedRecords, float_scale, floats_of

Chain = list[list[Value]]  # a variable for the sum of each group and column
_PARTS = 4  # of a record of floats, in a loop: more code at once is no faster
_INPUTS = BLOCK // _PARTS


def num_chains(layout: Layout) -> int:
    """Return the number of chains of additions per sum: 2 for floats, of even and of odd inputs, else 1."""
    return 2 if layout.is_float else 1


class Operands(NamedTuple):
    """Operands of a tile: packed groups of weights, and a panel's activation records.

    Attributes:
        weights: Address of each group, one or two. A group is aligned to 16 bytes.
        activations: Address of the first record of the tile's first token. The records of the other tokens follow.
        stride: Bytes from a token's record to its next one: the panel's width × the size of a record.
        num_records: Number of records of a row, a multiple of the records of a super-block.
    """

    weights: list[Value]
    activations: Value
    stride: Value
    num_records: Value


def zeros(b: Builder, columns: int, operands: Operands) -> Chain:
    zero = constant(F32X16, 0.0)
    return [[cgutils.alloca_once_value(b, zero) for _ in range(columns)] for _ in operands.weights]


def emit_block_tile(
    b: Builder, layout: Layout, form: int, isa: InstructionSet, columns: int, operands: Operands
) -> list[list[Value]]:
    """Emit a tile of packed weights of a block type × `columns` tokens.

    Returns:
        f32 × 16 rows, by group and column. Memory is only read.
    """
    weights, activations, stride, num_records = operands
    records, arithmetic, per_super = PackedRecords(b, layout, isa), arithmetic_of(isa), layout.records_per_super
    sums, ahead = zeros(b, columns, operands), Ahead(b, weights, bytes_ahead(len(weights), columns))
    with cgutils.for_range(b, b.sdiv(num_records, constant(I64, per_super))) as outer:
        past = b.mul(outer.index, constant(I64, layout.super_bytes))
        bases = [b.add(where, past) for where in weights]
        supers = [records.super_scales(base) for base in bases]
        first = b.mul(outer.index, constant(I64, per_super))
        with cgutils.for_range(b, constant(I64, per_super)) as inner:
            at = b.add(activations, b.mul(b.add(first, inner.index), stride))
            inputs = ActivationRecord(b, layout, form, range(columns), at)
            places = [records.record(base, inner.index) for base in bases]
            distance = ahead.of(places[0].where)
            for record in places:
                prefetch(b, b.add(record.where, distance), layout.record_bytes)
            dots = arithmetic.dots(inputs, [records.quads(record) for record in places])
            scales = [records.scales(record, *of_super) for record, of_super in zip(places, supers, strict=True)]
            _add_records(inputs, sums, dots, scales)
    return [[b.load(slot) for slot in of_group] for of_group in sums]


def emit_unpacked_tile(
    b: Builder, layout: Layout, form: int, isa: InstructionSet, operands: Operands, chain: Chain, parity: int
) -> None:
    """Emit a tile of unpacked weights, which continues a chain of its sums.

    The weights are records as `unpacking` writes them, contiguous and aligned to 64 bytes. The chain has variables,
    f32 × 16 by group and column. For floats it is that of even (0) or of odd inputs (1), by `parity`. Memory is only
    read.
    """
    if layout.is_float:
        _emit_float_records(b, LAYOUTS["F32"], operands, {parity: chain})
        return
    weights, activations, stride, num_records = operands
    records, arithmetic = UnpackedRecords(b, layout), arithmetic_of(isa)
    with cgutils.for_range(b, num_records) as loop:
        at = b.add(activations, b.mul(loop.index, stride))
        inputs = ActivationRecord(b, layout, form, range(len(chain[0])), at)
        past = simd.multiply(b, loop.index, layout.unpacked_bytes)
        places = [b.add(where, past) for where in weights]
        dots = arithmetic.dots(inputs, [records.quads(place) for place in places])
        _add_records(inputs, chain, dots, [records.scales(place) for place in places])


def _add_records(
    activations: ActivationRecord, sums: Chain, dots: Dots, scales: list[tuple[list[Value], list[Value]]]
) -> None:
    """Emit the addition of one record of each group to the tile's sums. `scales` has (scales, minima) of each group."""
    b = activations.b
    for slots, of_group, dots_of_group in zip(sums, scales, dots, strict=True):
        for column, slot in enumerate(slots):
            b.store(add_record(activations, column, b.load(slot), dots_of_group[column], *of_group), slot)


def add_record(
    activations: ActivationRecord,
    column: int,
    total: Value,
    dots: list[Value],
    scales: list[Value],
    minima: list[Value],
) -> Value:
    """Emit total + d s Σ q A + m s ΣA for 16 rows × one token, f32 × 16, over the whole record or each half.

    `dots` are Σ q A, i32 × 16. `scales` (d) and `minima` (m) are f32 × 16. There is one of each per part of the record.
    s and s ΣA are loaded from the activation record of `column`.
    """
    b = activations.b
    scale = load(b, activations.at(column, SCALE_AT), F32, 4)
    factor = simd.splat(b, scale)
    for dot, weight_scale in zip(dots, scales, strict=True):
        total = simd.fma(b, b.fmul(weight_scale, factor), b.sitofp(dot, F32X16), total)
    if len(minima) == 1:
        sums = [load(b, activations.at(column, SCALE_AT + 4), F32, 4)]
    else:
        negative = [activations.negative_sum(column, half) for half in range(len(minima))]
        sums = [b.fmul(scale, b.sitofp(b.sub(constant(I32, 0), one), F32)) for one in negative]
    for minimum, scaled_sum in zip(minima, sums, strict=True):
        total = simd.fma(b, minimum, simd.splat(b, scaled_sum), total)
    return total


def emit_float_tile(b: Builder, layout: Layout, columns: int, operands: Operands) -> list[list[Value]]:
    """Emit a tile of a float type, and return its sums, f32 × 16 rows by group and column.

    It reads packed groups [in_features, 16 rows] and records of 32 f32 per token, `operands.stride` bytes apart. Even
    and odd inputs form one chain each, added at the end. A number with a scale is multiplied by it before it is
    multiplied with activations, so the sums are those of a matrix of such products in F32.
    """
    sums = [zeros(b, columns, operands) for _ in range(num_chains(layout))]
    _emit_float_records(b, layout, operands, dict(enumerate(sums)))
    return total_of(b, sums)


def total_of(b: Builder, sums: list[Chain]) -> list[list[Value]]:
    """Emit the sum over the chains, f32 × 16 by group and column. `sums` are variables."""
    return [
        [reduce(b.fadd, [b.load(slot) for slot in slots]) for slots in zip(*of_group, strict=True)]
        for of_group in zip(*sums, strict=True)
    ]


def _emit_float_records(b: Builder, layout: Layout, operands: Operands, chains: dict[int, Chain]) -> None:
    """Emit the loop over a tile's records, which continues the chains of even (0) and of odd inputs (1), or of some."""
    weights, activations, stride, num_records = operands
    per_super, part_bytes = layout.records_per_super, layout.record_bytes // _PARTS

    def add_inputs(places: list[Value], inputs: Value, scales: list[Value]) -> None:
        numbers = zip(*[floats_of(b, layout, place, _INPUTS) for place in places], strict=True)
        for i, values in enumerate(numbers):
            chain = chains.get(i % num_chains(layout), [])
            if not chain:
                continue
            scaled = [b.fmul(*pair) for pair in zip(values, scales, strict=True)] if scales else values
            for column in range(len(chain[0])):
                x = simd.splat(b, load(b, simd.offset(b, inputs, 4 * (BLOCK * column + i)), F32, 4))
                for weight, of_group in zip(scaled, chain, strict=True):
                    b.store(simd.fma(b, weight, x, b.load(of_group[column])), of_group[column])

    def inputs_of(first: Value, part: Value) -> Value:
        """Return the address of the inputs of a part of the records from `first` on."""
        record = b.add(first, b.lshr(part, constant(I64, _PARTS.bit_length() - 1)))
        within = b.and_(part, constant(I64, _PARTS - 1))
        return b.add(b.add(activations, b.mul(record, stride)), simd.multiply(b, within, 4 * _INPUTS))

    if per_super == 1:
        with cgutils.for_range(b, simd.multiply(b, num_records, _PARTS)) as part:
            past = simd.multiply(b, part.index, part_bytes)
            add_inputs([b.add(where, past) for where in weights], inputs_of(constant(I64, 0), part.index), [])
        return
    ahead = Ahead(b, weights, FAR)
    with cgutils.for_range(b, b.sdiv(num_records, constant(I64, per_super))) as outer:
        past = b.mul(outer.index, constant(I64, layout.super_bytes))
        bases, first = [b.add(where, past) for where in weights], b.mul(outer.index, constant(I64, per_super))
        scales = [float_scale(b, base) for base in bases]
        with cgutils.for_range(b, constant(I64, per_super * _PARTS)) as part:
            within = simd.offset(b, simd.multiply(b, part.index, part_bytes), layout.super_header)
            places = [b.add(base, within) for base in bases]
            distance = ahead.of(places[0])
            for place in places:
                prefetch(b, b.add(place, distance), part_bytes)
            add_inputs(places, inputs_of(first, part.index), scales)
