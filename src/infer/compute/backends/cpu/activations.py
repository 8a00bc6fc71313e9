"""Activations in the form that the tiles read: normalised, quantised in blocks of 32, in panels of 16 tokens.

    panel 0 (tokens 0–15)                              panel 1 (16–31)      the last panel is as narrow as it has tokens
    [block 0: token 0, 1, … 15] [block 1: …] …         [block 0: …] …

So the distance between the records of neighbouring tokens is constant, whatever the number of tokens. `vector_tiles`
describes a record; for float weights a record is 32 floats, or 32 numbers in BF16. A block's scale is max |x| / 32512
(or / 127). For an instruction set that multiplies words, a record has 32 words in place of the two planes, 16 in each.

`normalize` is for RMSNorm before a product. `sum_norm` is for rows that are stored as floats: LayerNorm, norms of a
sum, and what a text's tokens add to their embeddings. Its rows are divided among the threads.
"""

import numpy as np
from llvmlite import ir
from llvmlite.ir import IRBuilder as Builder
from numba import njit, types

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.layouts import (
    BLOCK,
    LANES,
    PAIRS,
    PANEL,
    PLANE_BYTES,
    SCALE_AT,
    WORDS,
    activation_bytes,
)
from infer.compute.backends.cpu.simd import (
    F32,
    I16X16,
    I32,
    I32X16,
    Value,
    address,
    constant,
    f32x16,
    i32x16,
    load_f32,
    load_padded,
    load_scalar_f32,
    load_upto,
    nearest_i32,
    operation,
    splat_f32,
    splat_i32,
    store,
    store_f32,
    store_i8,
    store_i32,
    store_scalar_f32,
    store_upto,
    sum_f32,
)

_HALF = LANES // 2
_SMALLEST = np.float32(1e-33)  # a block below this counts as this, so that its scale is a normal number


@operation(types.float32, f32x16, f32x16)
def _largest_magnitude(b: Builder, x: Value, y: Value) -> Value:
    """Return max |x| over the 32 lanes of both, NaN if one is NaN.

    As integers, the bits of |x| have its order, with NaN on top.
    """

    def larger(left: Value, right: Value) -> Value:
        return b.select(b.icmp_signed(">", left, right), left, right)

    largest = larger(*(b.and_(b.bitcast(each, I32X16), constant(I32X16, 0x7FFFFFFF)) for each in (x, y)))
    for apart in (8, 4, 2, 1):
        largest = larger(largest, _neighbours(b, largest, apart))
    return b.bitcast(b.extract_element(largest, constant(I32, 0)), F32)


@operation(i32x16, i32x16, i32x16)
def _sum_both(b: Builder, x: Value, y: Value) -> Value:
    """Return a vector with Σ x in lane 0 and Σ y in lane 8."""
    halves = ([at + lane for at in (first, first + LANES) for lane in range(_HALF)] for first in (0, _HALF))
    total = b.add(*(b.shuffle_vector(x, y, ir.Constant(I32X16, half)) for half in halves))
    for apart in (4, 2, 1):
        total = b.add(total, _neighbours(b, total, apart))
    return total


def _neighbours(b: Builder, x: Value, apart: int) -> Value:
    return b.shuffle_vector(x, x, ir.Constant(I32X16, [lane ^ apart for lane in range(LANES)]))


@operation(types.int32, i32x16, types.int32)
def _lane(b: Builder, x: Value, lane: Value) -> Value:
    return b.extract_element(x, lane)


@njit(forceinline=True)
def record_address(base, token, num_tokens, num_records, record, record_bytes):
    """Return the address of a token's record in panels that begin at `base`. `num_records` is that of a token."""
    panel = token // PANEL * PANEL
    width = min(PANEL, num_tokens - panel)
    return base + (panel * num_records + record * width + token - panel) * record_bytes


record_size = njit(forceinline=True)(activation_bytes)


@operation(types.void, address, i32x16)
def _store_words(b: Builder, where: Value, x: Value) -> None:
    """Store x as i16. In each group of four, the even ones precede the odd ones."""
    order = ir.Constant(I32X16, [4 * quad + at for quad in range(4) for at in (0, 2, 1, 3)])
    store(b, where, b.trunc(b.shuffle_vector(x, x, order), I16X16), 2)


@njit(forceinline=True)
def quantize_block(first, second, form, at):
    """Store an activation record at `at`: the integers, scale and sums of 32 values, as `activation_record` draws it.

    `first` and `second` are f32 × 16: inputs 0–15 and 16–31. With NaN or infinity among them, the scale is not finite.
    For float weights the values themselves are stored, or rounded to BF16.
    """
    if form == 0:
        store_f32(at, first)
        store_f32(at + 4 * LANES, second)
        return
    if form == PAIRS:
        simd.store_bf16(at, first)
        simd.store_bf16(at + 2 * LANES, second)
        return
    unit = np.float32(32512.0) if form % WORDS == 2 else np.float32(127.0)
    largest = _largest_magnitude(first, second)
    if largest < _SMALLEST:
        largest = _SMALLEST
    inverse = splat_f32(unit / largest)
    scale = largest / unit
    a, b = nearest_i32(first * inverse), nearest_i32(second * inverse)
    if form > WORDS:
        _store_words(at, a)
        _store_words(at + PLANE_BYTES, b)
    elif form == 2:
        high_a, high_b = simd.shift_round_8(a), simd.shift_round_8(b)
        store_i8(at, high_a)
        store_i8(at + 16, high_b)
        store_i8(at + PLANE_BYTES, a - high_a * splat_i32(np.int32(256)))
        store_i8(at + PLANE_BYTES + 16, b - high_b * splat_i32(np.int32(256)))
    else:
        store_i8(at, a)
        store_i8(at + 16, b)
    sums = _sum_both(a, b)
    sum_a, sum_b = _lane(sums, np.int32(0)), _lane(sums, np.int32(_HALF))
    store_scalar_f32(at + SCALE_AT, scale)
    store_scalar_f32(at + SCALE_AT + 4, scale * np.float32(sum_a + sum_b))
    end = at + record_size(form) - 8
    store_i32(end, -sum_a)
    store_i32(end + 4, -sum_b)


@njit(forceinline=True)
def _mean_square(x, features, mean):
    """Return the mean of (x − mean)² over f32 [features] at x. Its order of additions does not depend on the mean."""
    squares, shift, whole = splat_f32(np.float32(0)), splat_f32(mean), features // LANES * LANES
    for i in range(0, whole, LANES):
        apart = load_f32(x + 4 * i) - shift
        squares = simd.fma(apart, apart, squares)
    total = sum_f32(squares)
    for i in range(whole, features):
        total += (load_scalar_f32(x + 4 * i) - mean) * (load_scalar_f32(x + 4 * i) - mean)
    return total / np.float32(features)


@njit(forceinline=True)
def inverse_rms(x, features, eps):
    """Return 1 / sqrt(mean(x²) + eps) of f32 [features] at x."""
    return np.float32(1) / np.sqrt(_mean_square(x, features, np.float32(0)) + eps)


@njit
def quantize_row(x, weight, factor, args, token, num_tokens, out):
    """Store x × factor × weight as a token's activation records of `args.form`, with zeros after the last input.

    Reads f32 [features] at the address `x` and at `weight`, which is 0 for none. Writes the token's records in panels
    at `out` (`record_address`).
    """
    num_records = (args.features + BLOCK - 1) // BLOCK
    record_bytes = record_size(args.form)
    scale, form = splat_f32(factor), args.form
    to = record_address(out, token, num_tokens, num_records, 0, record_bytes)
    step = record_address(out, token, num_tokens, num_records, 1, record_bytes) - to
    for record in range(num_records):
        at, room = 4 * BLOCK * record, args.features - BLOCK * record
        first, second = load_padded(x + at, room), load_padded(x + at + 64, room - LANES)
        if weight != 0:
            first = first * scale * load_padded(weight + at, room)
            second = second * scale * load_padded(weight + at + 64, room - LANES)
        quantize_block(first, second, form, to + record * step)


@njit(forceinline=True)
def _token_at(args, state, token):
    source = state.logit_indices[token] if args.of_logits else token
    return args.x + 4 * args.features * source


@njit(forceinline=True)
def _factor_of(args, state, token):
    if args.weight == 0:
        return np.float32(1)
    return inverse_rms(_token_at(args, state, token), args.features, args.eps)


def normalize(args, state, thread, num_threads):
    """Store x × weight / rms(x) as activation records. Without a weight, store x.

    Reads f32 [tokens, features] at `x`, the rows of `state.logit_indices` if `of_logits`, and f32 [features] at
    `weight`. Writes panels of records of `form` at `out`.

    Neighbouring tokens go to one thread, because their records share cache lines. If `private_bytes` is set, every
    thread computes a single token itself, into a copy that many bytes after the previous thread's.
    """
    num_tokens = state.num_logits if args.of_logits else state.num_tokens
    first, end, out = num_tokens * thread // num_threads, num_tokens * (thread + 1) // num_threads, args.out
    if num_tokens == 1 and args.private_bytes != 0:
        first, end, out = 0, 1, args.out + thread * args.private_bytes
    next_factor = _factor_of(args, state, first) if first < end else np.float32(1)
    for token in range(first, end):
        x, factor = _token_at(args, state, token), next_factor
        if token + 1 < end:  # its sum is one long chain, which the blocks of this one do not wait for
            next_factor = _factor_of(args, state, token + 1)
        quantize_row(x, args.weight, factor, args, token, num_tokens, out)


def add_rows(args, state, thread, num_threads):
    """Add y, or y × weight / rms(y), to residual, or to residual × own weight / rms(residual), and scale the sum.

    Reads f32 [tokens × rows_per_token, features] at `y`, and f32 [features] at the weights, which are 0 for none.
    Changes f32 of the same shape at `residual`. Rows are divided among the threads.
    """
    scale = splat_f32(args.scale)
    for row in range(thread, state.num_tokens * args.rows_per_token, num_threads):
        y, residual = args.y + 4 * args.features * row, args.residual + 4 * args.features * row
        factor = splat_f32(np.float32(1) if args.weight == 0 else inverse_rms(y, args.features, args.eps))
        own = splat_f32(np.float32(1) if args.own_weight == 0 else inverse_rms(residual, args.features, args.eps))
        for i in range(0, args.features, LANES):
            at, room = residual + 4 * i, args.features - i
            value, before = load_upto(y + 4 * i, room), load_upto(at, room)
            if args.weight != 0:
                value = value * factor * load_upto(args.weight + 4 * i, room)
            if args.own_weight != 0:
                before = before * own * load_upto(args.own_weight + 4 * i, room)
            store_upto(at, room, (before + value) * scale)


def clear_rows(args, state, thread, num_threads):
    """Set f32 [tokens, features] at `residual` to 0. Tokens are divided among the threads."""
    zero = splat_f32(np.float32(0))
    for token in range(thread, state.num_tokens, num_threads):
        for i in range(0, args.features, LANES):
            store_upto(args.residual + 4 * (args.features * token + i), args.features - i, zero)


@njit
def _add(target, source, features):
    for i in range(0, features, LANES):
        room = features - i
        store_upto(target + 4 * i, room, load_upto(target + 4 * i, room) + load_upto(source + 4 * i, room))


@njit
def _mean(x, features):
    sums, whole = splat_f32(np.float32(0)), features // LANES * LANES
    for i in range(0, whole, LANES):
        sums = sums + load_f32(x + 4 * i)
    total = sum_f32(sums)
    for i in range(whole, features):
        total += load_scalar_f32(x + 4 * i)
    return total / np.float32(features)


def sum_norm(args, state, thread, num_threads):
    """Store norm(x + y + type + position) for each token. Tokens are divided among the threads.

    Reads f32 [tokens, features] at `x` and `y`, the token's row of `types` (0 or 1) and of `embedded_positions`, and
    f32 [features] at `weight` and `bias`. An address of 0 means that there is none. Without a weight there is no norm.
    Writes f32 [tokens, features] at `out`, which may be x. If `is_centred`, the mean is subtracted (LayerNorm).
    """
    features = args.features
    for token in range(thread, state.num_tokens, num_threads):
        x, out = args.x + 4 * features * token, args.out + 4 * features * token
        if x != out:
            for i in range(0, features, LANES):
                store_upto(out + 4 * i, features - i, load_upto(x + 4 * i, features - i))
        if args.y != 0:
            _add(out, args.y + 4 * features * token, features)
        if args.types != 0:
            is_second = state.positions[token] >= args.second_starts[state.rows[token]]
            _add(out, args.types + 4 * features * (min(1, args.last_type) if is_second else 0), features)
        if args.embedded_positions != 0:
            _add(out, args.embedded_positions + 4 * features * state.positions[token], features)
        if args.weight == 0:
            continue
        mean = _mean(out, features) if args.is_centred != 0 else np.float32(0)
        factor = np.float32(1) / np.sqrt(_mean_square(out, features, mean) + args.eps)
        for i in range(0, features, LANES):
            at, room = out + 4 * i, features - i
            value = (load_upto(at, room) - splat_f32(mean)) * splat_f32(factor) * load_upto(args.weight + 4 * i, room)
            if args.bias != 0:
                value = value + load_upto(args.bias + 4 * i, room)
            store_upto(at, room, value)
