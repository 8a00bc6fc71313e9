"""Projections: every tile of a thread's rows × every panel of tokens. Each result is passed to an epilogue.

A unit is one or two groups of 16 rows (with their partners from `up` if gate and up are computed together). A thread
takes units (`work_stealing`). For each panel of 16 tokens, or for several if their weights are unpacked once
(`strips`), it computes the unit's tiles into buffers on its stack. Then it calls the epilogue of each panel through its
address: store, add to the residual, or gate (and quantise for the next projection). So the inner loop is compiled once
per type of weights, whatever follows it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.activations import quantize_block, record_address, record_size
from infer.compute.backends.cpu.isa import BY_NAME, InstructionSet
from infer.compute.backends.cpu.layouts import BLOCK, LANES, LAYOUTS, PANEL, Layout, activation_bytes
from infer.compute.backends.cpu.math_functions import GATED, sigmoid, softcapped, xielu
from infer.compute.backends.cpu.matmul.matrix_tiles import SCRATCH_BYTES, make_configure, make_matrix_tile, release
from infer.compute.backends.cpu.matmul.panels import TILE_BYTES, make_multiply_panel
from infer.compute.backends.cpu.matmul.strips import PANELS, make_multiply_strips, scratch_bytes
from infer.compute.backends.cpu.simd import load_f32, load_i64, load_upto, store_f32, store_upto
from infer.compute.backends.cpu.threads import atomics
from infer.compute.backends.cpu.threads.work_stealing import begin_units, take_units
from infer.compute.backends.cpu.weights.unpacking import make_unpack

_FEWEST_UNPACKED = 2 * PANEL  # tokens for which weights are unpacked once
# A buffer: i64 × 6 (first token, number of tokens, number of groups, first row that is written, tokens in all, first
# bias), then from here on f32 [tiles ≤ 4, 16 tokens, 16 rows]: gate's groups, then up's.
_HEADER = 64
BUFFER_BYTES = _HEADER + 4 * TILE_BYTES


@njit(inline="always")
def _tile_weights(args, shift, unit, groups, index):
    """Return the address of the packed group of a unit's tile. From `groups` on, tiles are those of `up`."""
    weights = args.first_weights if index < groups else args.second_weights
    return weights + shift + (unit * args.groups_per_unit + index % groups) * args.group_bytes


@njit(inline="always")
def _tile_row(buffer, index, token):
    """Return the address of 16 rows' results for a token of a buffer's panel."""
    return buffer + _HEADER + index * TILE_BYTES + token * 64


def _make_panel(layout: Layout, form: int, isa: InstructionSet) -> Any:
    """Return compute(args, shift, unit, groups, num_tiles, panel, width, out, scratch).

    It multiplies a panel of `width` tokens with a unit's packed tiles, two groups at a time. It reads the panel's
    records at `panel`, and stores f32 [num_tiles, 16 tokens, 16 rows] at `out`.
    """
    multiply_one, multiply_two = (make_multiply_panel(layout, form, isa, num_groups) for num_groups in (1, 2))

    @njit(inline="always")
    def compute(args, shift, unit, groups, num_tiles, panel, width, out, scratch):
        records = args.num_records
        for index in range(0, num_tiles, 2):
            first, to = _tile_weights(args, shift, unit, groups, index), out + index * TILE_BYTES
            if index + 1 < num_tiles:
                second = _tile_weights(args, shift, unit, groups, index + 1)
                multiply_two(first, second, panel, width, records, to, scratch)
            else:
                multiply_one(first, first, panel, width, records, to, scratch)

    return compute


def _make_matrices(layout: Layout, form: int, isa: InstructionSet) -> tuple[Any, Any]:
    """Return two functions for the matrix unit.

    The first unpacks a unit's weights. The second multiplies a panel of 16 tokens with the unit's tiles, whose number
    is even.
    """
    unpack, matrix_tile = make_unpack(layout, isa), make_matrix_tile(layout, form, isa)
    record_bytes = layout.unpacked_bytes

    @njit(inline="always")
    def unpack_unit(args, shift, unit, groups, num_tiles, unpacked):
        for index in range(num_tiles):
            to = unpacked + index * args.num_records * record_bytes
            unpack(_tile_weights(args, shift, unit, groups, index), 0, args.num_records, to)

    @njit(inline="always")
    def compute(args, num_tiles, unpacked, panel, stride, out, scratch):
        records = args.num_records
        size = records * record_bytes
        for index in range(0, num_tiles, 2):
            first, to = unpacked + index * size, out + index * TILE_BYTES
            matrix_tile(first, first + size, panel, stride, records, to, TILE_BYTES, scratch)

    return unpack_unit, compute


def _make_strips(layout: Layout, form: int, isa: InstructionSet) -> Any:
    """Return compute(args, shift, unit, groups, num_tiles, panels, num_panels, out, scratch), for full panels.

    It multiplies `num_panels` panels of 16 tokens with a unit's tiles, whose number is even. It stores f32 [num_tiles,
    16 tokens, 16 rows] in the buffer of each panel, `BUFFER_BYTES` apart, from `out` on.
    """
    multiply = make_multiply_strips(layout, form, isa, BUFFER_BYTES)

    @njit(inline="always")
    def compute(args, shift, unit, groups, num_tiles, panels, num_panels, out, scratch):
        for index in range(0, num_tiles, 2):
            first = _tile_weights(args, shift, unit, groups, index)
            second = _tile_weights(args, shift, unit, groups, index + 1)
            multiply(first, second, panels, args.num_records, num_panels, out + index * TILE_BYTES, scratch)

    return compute


@njit(inline="always")
def _scale_rows(args, shift, unit, groups, num_tiles, width, buffer):
    """Multiply a panel's sums in the buffer by the scales of their rows, f32 × 16 at the end of each group."""
    for index in range(num_tiles):
        end = _tile_weights(args, shift, unit, groups, index) + args.group_bytes
        scales = load_f32(end - 4 * LANES)
        for token in range(width):
            at = _tile_row(buffer, index, token)
            store_f32(at, load_f32(at) * scales)


def _make_finish(layout: Layout) -> Any:
    """Return finish(…), which writes a buffer's header and calls the epilogue of its panel with the buffer.

    If rows have scales, it multiplies the results by them first.
    """
    has_row_scales = layout.row_scale_bytes > 0

    @njit(inline="always")
    def finish(args, state, unit, groups, num_tiles, panel, width, num_tokens, buffer, shift, first_slot, first_bias):
        if has_row_scales:
            _scale_rows(args, shift, unit, groups, num_tiles, width, buffer)
        simd.store_i64(buffer, panel)
        simd.store_i64(buffer + 8, width)
        simd.store_i64(buffer + 16, groups)
        simd.store_i64(buffer + 24, first_slot)
        simd.store_i64(buffer + 32, num_tokens)
        simd.store_i64(buffer + 40, first_bias)
        row = unit * args.groups_per_unit * LANES
        atomics.call_command(args.epilogue, args.epilogue_arguments, simd.address_of(state), buffer, row)

    return finish


def make_unit(layout: Layout, form: int, isa: InstructionSet) -> Any:
    """Return a function that multiplies a unit with the panels of the tokens [first, end) of `num_tokens` tokens.

    For an expert, `shift` is where its weights begin, in bytes, `first_slot` its first row of what the epilogue writes,
    and `first_bias` its first bias. Otherwise they are 0. `buffers` and `scratch` have the sizes of `stack_sizes`.
    """
    record_bytes, has_matrices = activation_bytes(form), isa.may_use_matrices(layout)
    compute, finish = _make_panel(layout, form, isa), _make_finish(layout)
    has_strips = isa.unpacks_strips(layout, form)
    batch = PANEL * (PANELS if has_strips else 1)
    if has_matrices:
        unpack_unit, compute_matrices = _make_matrices(layout, form, isa)
    if has_strips:
        compute_strips = _make_strips(layout, form, isa)

    @njit(inline="always")
    def multiply_unit(
        args, state, unit, first, end, num_tokens, activations, unpacked, buffers, scratch,
        shift, first_slot, first_bias,
    ):  # fmt: skip
        groups = min(args.groups_per_unit, args.num_groups - unit * args.groups_per_unit)
        num_tiles = groups * (1 if args.second_weights == 0 else 2)
        even_tiles = num_tiles if num_tiles % 2 == 0 and end - first >= _FEWEST_UNPACKED else 0
        if has_matrices:  # a constant: what follows is not compiled elsewhere
            unpack_unit(args, shift, unit, groups, even_tiles, unpacked)
        num_done = 0
        for panel in range(first, end, PANEL):
            index = (panel - first) % batch // PANEL
            width, buffer = min(PANEL, num_tokens - panel), buffers + index * BUFFER_BYTES
            at, stride = activations + panel * args.num_records * record_bytes, width * record_bytes
            if has_strips and index == 0:
                num_done = min(batch, end - panel) // PANEL
                num_done = num_done if even_tiles > 0 and num_done * PANEL >= _FEWEST_UNPACKED else 0
                compute_strips(args, shift, unit, groups, even_tiles, at, num_done, buffer + _HEADER, scratch)
            on_matrices = even_tiles if has_matrices and width == PANEL else 0
            if has_matrices:
                compute_matrices(args, on_matrices, unpacked, at, stride, buffer + _HEADER, scratch)
            if on_matrices == 0 and not (has_strips and index < num_done):
                compute(args, shift, unit, groups, num_tiles, at, width, buffer + _HEADER, scratch)
            finish(
                args, state, unit, groups, num_tiles, panel, width, num_tokens, buffer, shift, first_slot, first_bias
            )

    return multiply_unit


def stack_sizes(layout: Layout, form: int, isa: InstructionSet) -> tuple[int, int]:
    """Return (bytes of a unit's buffers, bytes of its scratch), both on the stack."""
    if isa.unpacks_strips(layout, form):
        return PANELS * BUFFER_BYTES, scratch_bytes(layout)
    return BUFFER_BYTES, SCRATCH_BYTES


def fewest_on_matrices(layout: Layout, form: int, isa: InstructionSet) -> int:
    """Return the number of tokens from which on a core's matrix unit may be used."""
    on_matrices = [shape.fewest for shape in isa.shapes(layout, form, 2) if shape.on_matrices]
    return min([*on_matrices, _FEWEST_UNPACKED])


def make_matmul(type_: str, planes: int, isa: str) -> Callable[..., None]:
    """Return the command of a projection: y = x Wᵀ, each panel's results of a unit passed to an epilogue.

    It reads packed groups at `first_weights` (and `second_weights`, if gate and up are computed together) and panels of
    activation records at `activations`. It writes only buffers on its stack, and `unpacked`, its thread's memory for a
    matrix unit. `isa` names the instruction set, and `planes` is the precision.
    """
    layout, instructions = LAYOUTS[type_], BY_NAME[isa]
    form, has_matrices = instructions.form(layout, planes), instructions.may_use_matrices(layout)
    multiply_unit, configure = make_unit(layout, form, instructions), make_configure(layout)
    fewest = fewest_on_matrices(layout, form, instructions)
    buffer_size, scratch_size = stack_sizes(layout, form, instructions)

    def matmul(args, state, thread, num_threads):
        num_tokens = state.num_logits if args.of_logits else state.num_tokens
        activations = args.activations + (thread * args.private_bytes if num_tokens == 1 else 0)
        num_units = (args.num_groups + args.groups_per_unit - 1) // args.groups_per_unit
        buffers, scratch = simd.stack(buffer_size), simd.stack(scratch_size)
        unpacked = args.unpacked + thread * args.unpacked_bytes
        if has_matrices:
            configure(num_tokens >= fewest, scratch)
        for first in range(0, num_tokens, args.tokens_per_block):
            last = min(num_tokens, first + args.tokens_per_block)
            begin_units(state, thread)
            unit, end = take_units(state, thread, num_threads, num_units)
            while unit < end:
                multiply_unit(
                    args, state, unit, first, last, num_tokens, activations, unpacked, buffers, scratch, 0, 0, 0
                )
                unit += 1
                if unit == end:
                    unit, end = take_units(state, thread, num_threads, num_units)
        if has_matrices:
            release(num_tokens >= fewest)

    return matmul


def make_store(kind: str) -> Callable[..., None]:
    """Return the epilogue of this kind, store(args, state, buffer, first_row).

    It reads a buffer (`_HEADER`) with the results of rows from `first_row` on, and changes f32 [tokens, row_stride] at
    `args.out`, from `first_column` on.

    plain: out = y + bias. add: out += y + bias. capped: out = softcap × tanh((y + bias) / softcap). The name of an
    activation: out = activation(out, y + bias); "gate_" before it: out = activation(y + bias, factor); "only_" before
    it: out = activation(y + bias). sigmoid: out = sigmoid(y + bias). weighted: out[its token] += weight × (y + bias);
    by_token: without the weight.
    """
    capping, gating, weighing, by_token = kind == "capped", kind in GATED, kind == "weighted", kind == "by_token"
    adding, squashing = kind == "add", kind == "sigmoid"
    gating_factors, activating, curving = (kind.startswith(each) for each in ("gate_", "only_", "only_xielu"))
    activate: Any = (GATED | {"xielu": xielu}).get(kind.removeprefix("gate_").removeprefix("only_"))

    def store(args, state, buffer, first_row):
        panel, width, groups = load_i64(buffer), load_i64(buffer + 8), load_i64(buffer + 16)
        first_slot, first_bias = load_i64(buffer + 24), load_i64(buffer + 40)
        for index in range(groups):
            row = first_row + index * LANES
            room = args.num_columns - row
            for token in range(width):
                slot = first_slot + panel + token
                to = slot
                if (weighing or by_token) and simd.address_of(args.tokens) != 0:
                    to = args.tokens[slot]
                out = args.out + 4 * (to * args.row_stride + args.first_column + row)
                value = load_f32(_tile_row(buffer, index, token))
                if args.bias != 0:
                    value = value + load_upto(args.bias + 4 * (first_bias + row), room)
                if weighing:
                    value = value * simd.splat_f32(args.weights[slot])
                if adding or weighing or by_token:
                    value = load_upto(out, room) + value
                if squashing:
                    value = sigmoid(value)
                if capping:
                    value = softcapped(value, args.softcap)
                if activating:
                    value = activate(value, args.curve if curving else simd.splat_f32(np.float32(1)))
                if gating_factors:
                    factors = args.factors + 4 * (to * args.factor_stride + row)
                    value = activate(value, load_upto(factors, room))
                if gating:
                    value = activate(load_upto(out, room), value)
                store_upto(out, room, value)

    return store


def make_gate(activation: str) -> Callable[..., None]:
    """Return the epilogue out = activation(gate + bias, up + bias).

    It reads and overwrites a buffer of gate's tiles and then up's. It writes f32 [tokens, row_stride] at `args.out`,
    and activation records of the same values at `args.quantized`. Either may be 0: it is not written then.
    """
    activate = GATED[activation]

    def gate(args, state, buffer, first_row):
        panel, width, groups = load_i64(buffer), load_i64(buffer + 8), load_i64(buffer + 16)
        first_slot, num_tokens, first_bias = load_i64(buffer + 24), load_i64(buffer + 32), load_i64(buffer + 40)
        for token in range(width):
            for index in range(groups):
                row = first_row + index * LANES
                at = _tile_row(buffer, index, token)
                left, right = load_f32(at), load_f32(_tile_row(buffer, groups + index, token))
                if args.bias != 0:
                    left = left + load_f32(args.bias + 4 * (first_bias + row))
                    right = right + load_f32(args.second_bias + 4 * (first_bias + row))
                value = activate(left, right)
                store_f32(at, value)
                if args.out != 0:
                    out = args.out + 4 * ((first_slot + panel + token) * args.row_stride + args.first_column + row)
                    store_upto(out, args.num_columns - row, value)
            if args.quantized != 0:
                record, num_records = (args.first_column + first_row) // BLOCK, args.row_stride // BLOCK
                size = record_size(args.form)
                own = args.quantized + first_slot * num_records * size
                to = record_address(own, panel + token, num_tokens, num_records, record, size)
                first, second = load_f32(_tile_row(buffer, 0, token)), load_f32(_tile_row(buffer, 1, token))
                quantize_block(first, second, args.form, to)

    return gate
