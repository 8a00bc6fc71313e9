"""Quantised matrices times tokens in integers, `matvec` for few tokens and `matmul` for many; and few rows of floats.

`matvec` multiplies words by dp4a, one program for some rows and one token. `matmul` multiplies blocks on tensor cores,
one program per tile, a quad per trip.

The order of a row's sum depends only on the number of its blocks. Four neighbouring blocks are a quad, (b0 + b1) + (b2
+ b3): 128 inputs. Lane l of L / 4 (`num_lanes` is L) adds quads l, l + L / 4, l + 2 L / 4, … one after another. Then
neighbouring lanes are added, then neighbouring pairs, and so on. In `matmul` the lanes are added one after another, and
their tree needs one sum per level: a binary counter. So any number of tokens gives the same bits.

The few rows of a router in F32 would be few programs of `dense`, each of which reads long rows. `multiply_few_rows` has
a program per row for few tokens, and an order of its own for any number of tokens.
"""

import triton
import triton.language as tl

from infer.compute.backends.cuda.activations import is_none, store_quantized
from infer.compute.backends.cuda.blocks import block_values, scaled_values, signed_integers, word_pair
from infer.compute.backends.cuda.epilogue import biased, gated, store

MAX_LANES = 32


def num_lanes(num_blocks: int) -> int:
    """Return the number of blocks that a program adds at a time, a power of two and at least a quad."""
    return max(4, min(MAX_LANES, 1 << (num_blocks - 1).bit_length()))


@triton.jit(do_not_specialize=["num_tokens"])
def matvec(
    x, matrix, y, left, num_tokens,
    PLANES: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, GATE: tl.constexpr, LEAVES: tl.constexpr,
    DP4A: tl.constexpr,
):  # fmt: skip
    """Store the products of some rows and one token. With LEAVES, also store them in integers.

    Integers need blocks of 32 rows, and a program computes whole blocks.
    """
    program, num_rows = tl.program_id(0), y.num_rows
    token = (program % num_tokens).to(tl.int64)
    rows = (program // num_tokens).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    read = tl.minimum(rows, num_rows - 1)
    if is_none(x.scales + token * matrix.num_blocks + tl.arange(0, 1), num_tokens, 1):
        sums = tl.full((ROWS,), float("nan"), tl.float32)
    else:
        sums = biased(row_sums(x, token, matrix, read, PLANES, ROWS, LANES, DP4A), y, read)
        if GATE != "":
            up = row_sums(x, token, matrix, read + num_rows, PLANES, ROWS, LANES, DP4A)
            sums = gated(sums, biased(up, y, read + num_rows), GATE)
    store(y, token * y.stride, rows, sums, rows < num_rows)
    if LEAVES:
        count: tl.constexpr = ROWS // 32
        blocks, num_blocks = (program // num_tokens).to(tl.int64) * count + tl.arange(0, count), num_rows // 32
        is_there, value = blocks < num_blocks, tl.reshape(sums, (count, 32))
        store_quantized(left, value, token + blocks * 0, blocks, num_blocks, is_there, PLANES, count)


@triton.jit
def row_sums(x, token, matrix, rows, PLANES: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, DP4A: tl.constexpr):
    """Return the rows' sums, float32 [ROWS]. Activations have one line for all rows, so they are loaded once."""
    lanes, words = tl.arange(0, LANES)[None, :], tl.arange(0, 4)[None, None, :]
    row, num_blocks = rows[:, None] + lanes * 0, matrix.num_blocks
    total = tl.zeros((ROWS, LANES // 4), tl.float32)
    for start in range(0, num_blocks, LANES):
        block = start + lanes
        is_there = block < num_blocks
        own_block = block + rows[:, None] * 0
        mask = own_block < num_blocks
        first, second = word_pair(matrix, (row * num_blocks + own_block)[:, :, None], words, mask[:, :, None], DP4A)
        at = token * num_blocks + block
        codes = x.codes + (token * PLANES * num_blocks + block)[:, :, None] * 8 + words
        first, second = _word_products(codes, num_blocks * 8, first, second, is_there[:, :, None], PLANES, DP4A)
        first_sum = tl.load(x.sums + at * 2, mask=is_there, other=0)
        second_sum = tl.load(x.sums + at * 2 + 1, mask=is_there, other=0)
        scale = tl.load(x.scales + at, mask=is_there, other=0)
        value = block_values(
            matrix, row, own_block, tl.sum(first, axis=2), tl.sum(second, axis=2), first_sum, second_sum, mask
        )
        total += tree_sums(scale * value, ROWS, LANES, LANES // 4)
    return tl.reshape(tree_sums(total, ROWS, LANES // 4, 1), (ROWS,))


@triton.jit
def _word_products(codes, plane_words, first, second, mask, PLANES: tl.constexpr, DP4A: tl.constexpr):
    """Return Σ q a of each word's four inputs, int32. With two planes, a = 256 high + low."""
    first_dot = dot4(first, tl.load(codes, mask=mask, other=0), DP4A)
    second_dot = dot4(second, tl.load(codes + 4, mask=mask, other=0), DP4A)
    if PLANES == 2:
        low = codes + plane_words
        first_dot = first_dot * 256 + dot4(first, tl.load(low, mask=mask, other=0), DP4A)
        second_dot = second_dot * 256 + dot4(second, tl.load(low + 4, mask=mask, other=0), DP4A)
    return first_dot, second_dot


@triton.jit
def dot4(a, b, DP4A: tl.constexpr):
    """Return the dot product of two words' signed bytes."""
    if DP4A:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, 0;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:  # noqa: RET505 - a constant condition: only one of the two is compiled
        total = (a >> 24) * (b >> 24)
        for i in tl.static_range(1, 4):
            total += ((a << (8 * i)) >> 24) * ((b << (8 * i)) >> 24)
        return total


@triton.jit
def tree_sums(x, ROWS: tl.constexpr, COUNT: tl.constexpr, LEFT: tl.constexpr):
    """Return sums [ROWS, LEFT] of x [ROWS, COUNT], adding neighbours first. A sum of two has one order, so a compiler's
    layout cannot change it.
    """
    for level in tl.static_range(1, (COUNT // LEFT).bit_length()):
        x = tl.sum(tl.reshape(x, (ROWS, COUNT >> level, 2)), axis=2)
    return x


@triton.jit(do_not_specialize=["num_tokens"])
def matmul(
    x, matrix, y, left, num_tokens,
    PLANES: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, GATE: tl.constexpr,
    LEAVES: tl.constexpr, DP4A: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    num_rows = y.num_rows
    read_tokens, read = tl.minimum(tokens, num_tokens - 1), tl.minimum(rows, num_rows - 1)
    if is_none(x.scales + read_tokens * matrix.num_blocks, num_tokens, TOKENS):
        sums = tl.full((ROWS, TOKENS), float("nan"), tl.float32)
    else:
        sums = biased(tile_sums(x, read_tokens, matrix, read, PLANES, TOKENS, ROWS, LANES, DP4A), y, read[:, None])
        if GATE != "":
            up = tile_sums(x, read_tokens, matrix, read + num_rows, PLANES, TOKENS, ROWS, LANES, DP4A)
            sums = gated(sums, biased(up, y, read[:, None] + num_rows), GATE)
    mask = (tokens < num_tokens)[None, :] & (rows < num_rows)[:, None]
    store(y, 0, tokens[None, :] * y.stride + rows[:, None], sums, mask)
    if LEAVES:
        per_token: tl.constexpr = ROWS // 32
        count: tl.constexpr = TOKENS * per_token
        lines, num_blocks = tl.arange(0, count), num_rows // 32
        theirs = tl.program_id(0).to(tl.int64) * TOKENS + lines // per_token
        blocks = tl.program_id(1).to(tl.int64) * per_token + lines % per_token
        is_there = (theirs < num_tokens) & (blocks < num_blocks)
        store_quantized(
            left, tl.reshape(tl.trans(sums), (count, 32)), theirs, blocks, num_blocks, is_there, PLANES, count
        )


@triton.jit
def tile_sums(
    x, tokens, matrix, rows, PLANES: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    DP4A: tl.constexpr,
):  # fmt: skip
    """Return the tile's sums, float32 [ROWS, TOKENS]."""
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    ones, twos, fours = total, total, total
    lanes: tl.constexpr = LANES // 4
    per_lane = tl.cdiv(matrix.num_blocks, LANES)
    lane, place = 0, 0
    for _ in range(per_lane * lanes):
        total += _quad_products(x, tokens, matrix, rows, (lane + place * lanes) * 4, PLANES, DP4A)
        place += 1
        if place == per_lane:
            if lane & 1 == 0:
                ones = total
            else:
                total = ones + total
                if lane & 2 == 0:
                    twos = total
                else:
                    total = twos + total
                    if lane & 4 == 0:
                        fours = total
                    else:
                        total = fours + total
            lane, place = lane + 1, 0
            if lane < lanes:
                total = tl.zeros((ROWS, TOKENS), tl.float32)
    return total


@triton.jit
def _quad_products(x, tokens, matrix, rows, first_block, PLANES: tl.constexpr, DP4A: tl.constexpr):
    """Return Σ w a of four neighbouring blocks, float32 [ROWS, TOKENS]. Blocks beyond the last add 0."""
    pair = _block_products(x, tokens, matrix, rows, first_block, PLANES, DP4A)
    pair += _block_products(x, tokens, matrix, rows, first_block + 1, PLANES, DP4A)
    other = _block_products(x, tokens, matrix, rows, first_block + 2, PLANES, DP4A)
    return pair + (other + _block_products(x, tokens, matrix, rows, first_block + 3, PLANES, DP4A))


@triton.jit
def _block_products(x, tokens, matrix, rows, place, PLANES: tl.constexpr, DP4A: tl.constexpr):
    """Return Σ w a of one block, float32 [ROWS, TOKENS]. Offsets are subtracted from weights, not from each product."""
    inputs, num_blocks = tl.arange(0, 32), matrix.num_blocks
    block = tl.minimum(place, num_blocks - 1)
    q = signed_integers(matrix, (rows * num_blocks + block)[:, None], inputs[None, :], DP4A)
    codes = x.codes + (tokens * PLANES * num_blocks + block)[None, :] * 32 + inputs[:, None]
    at = (tokens * num_blocks + block)[None, :]
    first_sum, second_sum = 0, 0
    if matrix.HAS_MINIMUM:
        first_sum, second_sum = tl.load(x.sums + at * 2), tl.load(x.sums + at * 2 + 1)
    if matrix.SCALES == 2:
        first = _products(codes, num_blocks * 32, tl.where(inputs[None, :] < 16, q, 0), PLANES)
        second = _products(codes, num_blocks * 32, tl.where(inputs[None, :] < 16, 0, q), PLANES)
    else:
        first = _products(codes, num_blocks * 32, q, PLANES)
        second = first * 0
    value = scaled_values(matrix, rows[:, None], block, first, second, first_sum, second_sum, (rows >= 0)[:, None])
    return tl.load(x.scales + at, mask=at * 0 + place < num_blocks, other=0) * value


@triton.jit
def _products(codes, plane_bytes, q, PLANES: tl.constexpr):
    """Return Σ q a, int32 [ROWS, TOKENS]. With two planes, a = 256 high + low."""
    dots = tl.dot(q, tl.load(codes), out_dtype=tl.int32)
    if PLANES == 2:
        dots = tl.dot(q, tl.load(codes + plane_bytes), dots * 256, out_dtype=tl.int32)
    return dots


@triton.jit(do_not_specialize=["num_tokens"])
def multiply_few_rows(
    x, weights, y, num_tokens, num_inputs, TOKENS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr
):
    """Store the products of some rows of float32 weights and some tokens, whose inputs x are float32.

    Lane l adds inputs l, l + 32, l + 64, … one after another. Then neighbouring lanes are added, and so on. A
    trip reads PARTS inputs per lane, which changes no order.
    """
    lane_count: tl.constexpr = 32
    tokens, rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    lanes, read = tl.arange(0, lane_count), tl.minimum(rows, y.num_rows - 1).to(tl.int64)
    x += tl.minimum(tokens, num_tokens - 1).to(tl.int64)[:, None] * num_inputs + lanes[None, :]
    weights += read[:, None] * num_inputs + lanes[None, :]
    total = tl.zeros((TOKENS, ROWS, lane_count), tl.float32)
    for start in range(0, num_inputs, lane_count * PARTS):
        for part in tl.static_range(PARTS):
            at = start + part * lane_count
            is_there = (at + lanes < num_inputs)[None, :]
            a, w = tl.load(x + at, mask=is_there, other=0), tl.load(weights + at, mask=is_there, other=0)
            total = tl.fma(a[:, None, :], w[None, :, :], total)
    count: tl.constexpr = TOKENS * ROWS
    sums = tl.reshape(tree_sums(tl.reshape(total, (count, lane_count)), count, lane_count, 1), (TOKENS, ROWS))
    mask = (tokens < num_tokens)[:, None] & (rows < y.num_rows)[None, :]
    offsets = tokens.to(tl.int64)[:, None] * y.stride + rows[None, :]
    store(y, 0, offsets, biased(sums, y, read[None, :]), mask)
