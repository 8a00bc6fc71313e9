"""Float matrices times any number of tokens on tensor cores: one program per tile of 16 tokens and some rows.

For one token or a thousand, products are summed by the same instructions in the same order: all tiles are alike. A
float32 is the sum of two TF32 numbers to 22 bits, and F16 and BF16 are TF32 numbers. So two products keep the bits that
one would lose. F32 matrices are multiplied by the scalar units.
"""

import triton
import triton.language as tl

from infer.backends.cuda.activations import is_none
from infer.backends.cuda.epilogue import biased, gated, store

TF32_BITS = tl.constexpr(-(1 << 13))  # sign, exponent and 10 bits


@triton.jit(do_not_specialize=["num_tokens"])
def dense(
    x, codes, y, num_tokens, num_inputs,
    SPLITS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    num_rows = y.num_rows
    read = tl.minimum(rows, num_rows - 1)
    x += tl.minimum(tokens, num_tokens - 1)[:, None] * num_inputs
    if is_none(x, num_tokens, TOKENS):
        sums = tl.full((TOKENS, ROWS), float("nan"), tl.float32)
    else:
        sums = biased(_tile_sums(x, codes, read, num_inputs, SPLITS, TOKENS, ROWS, DEPTH), y, read[None, :])
        if GATE != "":
            up = _tile_sums(x, codes, read + num_rows, num_inputs, SPLITS, TOKENS, ROWS, DEPTH)
            sums = gated(sums, biased(up, y, read[None, :] + num_rows), GATE)
    mask = (tokens < num_tokens)[:, None] & (rows < num_rows)[None, :]
    store(y, tokens[:, None], rows[None, :], sums, mask)


@triton.jit
def _tile_sums(
    x, codes, rows, num_inputs, SPLITS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr
):
    """Return the tile's sums, float32 [TOKENS, ROWS]."""
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    for start in range(0, num_inputs, DEPTH):
        inputs = start + tl.arange(0, DEPTH)
        mask = inputs < num_inputs
        a = tl.load(x + inputs[None, :], mask=mask[None, :], other=0)
        w = tl.load(codes + rows[None, :] * num_inputs + inputs[:, None], mask=mask[:, None], other=0).to(tl.float32)
        if SPLITS:
            high = (a.to(tl.int32, bitcast=True) & TF32_BITS).to(tl.float32, bitcast=True)
            total = tl.dot(a - high, w, total, input_precision="tf32")
            total = tl.dot(high, w, total, input_precision="tf32")
        else:
            total = tl.dot(a, w, total, input_precision="ieee")
    return total
