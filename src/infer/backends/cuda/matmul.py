"""Quantised matrices times many tokens: integer products of blocks by tensor cores, one program per tile.

A row's blocks are added in the order that `matvec` describes, so both give a token the same bits. Here the lanes are
added one after another, and their tree needs one sum per level: a binary counter.
"""

import triton
import triton.language as tl

from infer.backends.cuda.activations import is_none, store_quantized
from infer.backends.cuda.blocks import block_values, integers
from infer.backends.cuda.epilogue import biased, gated, store


@triton.jit(do_not_specialize=["num_tokens"])
def matmul(
    x, matrix, y, left, num_tokens,
    PLANES: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, GATE: tl.constexpr,
    LEAVES: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    num_rows = y.num_rows
    read_tokens, read = tl.minimum(tokens, num_tokens - 1), tl.minimum(rows, num_rows - 1)
    if is_none(x.scales + read_tokens * matrix.num_blocks, num_tokens, TOKENS):
        sums = tl.full((TOKENS, ROWS), float("nan"), tl.float32)
    else:
        sums = biased(tile_sums(x, read_tokens, matrix, read, PLANES, TOKENS, ROWS, LANES), y, read[None, :])
        if GATE != "":
            up = tile_sums(x, read_tokens, matrix, read + num_rows, PLANES, TOKENS, ROWS, LANES)
            sums = gated(sums, biased(up, y, read[None, :] + num_rows), GATE)
    mask = (tokens < num_tokens)[:, None] & (rows < num_rows)[None, :]
    store(y, tokens[:, None], rows[None, :], sums, mask)
    if LEAVES:
        per_token: tl.constexpr = ROWS // 32
        count: tl.constexpr = TOKENS * per_token
        lines, num_blocks = tl.arange(0, count), num_rows // 32
        theirs = tl.program_id(0).to(tl.int64) * TOKENS + lines // per_token
        blocks = tl.program_id(1).to(tl.int64) * per_token + lines % per_token
        is_there = (theirs < num_tokens) & (blocks < num_blocks)
        store_quantized(left, tl.reshape(sums, (count, 32)), theirs, blocks, num_blocks, is_there, PLANES, count)


@triton.jit
def tile_sums(
    x, tokens, matrix, rows, PLANES: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr
):
    """Return the tile's sums, float32 [TOKENS, ROWS]."""
    ones = tl.zeros((TOKENS, ROWS), tl.float32)
    twos, fours, eights, sixteens, total = ones, ones, ones, ones, ones
    for lane in range(LANES):
        total = tl.zeros((TOKENS, ROWS), tl.float32)
        for block in range(lane, matrix.num_blocks, LANES):
            total += _block_products(x, tokens, matrix, rows, block, PLANES)
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
                    if lane & 8 == 0:
                        eights = total
                    else:
                        total = eights + total
                        if lane & 16 == 0:
                            sixteens = total
                        else:
                            total = sixteens + total
    return total


@triton.jit
def _block_products(x, tokens, matrix, rows, block, PLANES: tl.constexpr):
    """Return Σ w a of one block, float32 [TOKENS, ROWS]."""
    inputs, num_blocks = tl.arange(0, 32)[:, None], matrix.num_blocks
    q = integers(matrix, (rows * num_blocks + block)[None, :], inputs)
    codes = x.codes + (tokens * PLANES * num_blocks + block)[:, None] * 32 + tl.arange(0, 32)[None, :]
    at = (tokens * num_blocks + block)[:, None]
    first_sum, second_sum = tl.load(x.sums + at * 2), tl.load(x.sums + at * 2 + 1)
    if matrix.SCALES == 2:
        first = _products(codes, num_blocks * 32, tl.where(inputs < 16, q, 0), PLANES)
        second = _products(codes, num_blocks * 32, tl.where(inputs < 16, 0, q), PLANES)
    else:
        first = _products(codes, num_blocks * 32, q, PLANES)
        second = first * 0
    return tl.load(x.scales + at) * block_values(
        matrix, rows[None, :], block, first, second, first_sum, second_sum, (rows >= 0)[None, :]
    )


@triton.jit
def _products(codes, plane_bytes, q, PLANES: tl.constexpr):
    """Return Σ q a, int32. With two planes, a = 256 high + low."""
    dots = tl.dot(tl.load(codes), q, out_dtype=tl.int32)
    if PLANES == 2:
        dots = dots * 256 + tl.dot(tl.load(codes + plane_bytes), q, out_dtype=tl.int32)
    return dots
