"""Quantised matrices times few tokens: integer products of words by dp4a, one program for some rows and one token.

The order of a row's sum depends only on the number of its blocks. Four neighbouring blocks are a quad, (b0 + b1) + (b2
+ b3): 128 inputs. Lane l of L / 4 (`num_lanes` is L) adds quads l, l + L / 4, l + 2 L / 4, … one after another. Then
neighbouring lanes are added, then neighbouring pairs, and so on. `matmul` has the same order, and any number of tokens
gives the same bits.
"""

import triton
import triton.language as tl

from infer.compute.backends.cuda.activations import is_none, store_quantized
from infer.compute.backends.cuda.blocks import block_values, word_pair
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
        first, second = _products(codes, num_blocks * 8, first, second, is_there[:, :, None], PLANES, DP4A)
        first_sum = tl.load(x.sums + at * 2, mask=is_there, other=0)
        second_sum = tl.load(x.sums + at * 2 + 1, mask=is_there, other=0)
        scale = tl.load(x.scales + at, mask=is_there, other=0)
        value = block_values(
            matrix, row, own_block, tl.sum(first, axis=2), tl.sum(second, axis=2), first_sum, second_sum, mask
        )
        total += tree_sums(scale * value, ROWS, LANES, LANES // 4)
    return tl.reshape(tree_sums(total, ROWS, LANES // 4, 1), (ROWS,))


@triton.jit
def _products(codes, plane_words, first, second, mask, PLANES: tl.constexpr, DP4A: tl.constexpr):
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
