"""Quantised matrices times many tokens: integer products of blocks by tensor cores, one program per tile.

A trip takes a quad, which is 128 inputs. Quads are added in the order that `matvec` describes, so both give a token the
same bits. Here the lanes are added one after another, and their tree needs one sum per level: a binary counter.
"""

import triton
import triton.language as tl

from infer.compute.backends.cuda.activations import is_none, store_quantized
from infer.compute.backends.cuda.blocks import scaled_values, signed_integers
from infer.compute.backends.cuda.epilogue import biased, gated, store


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
