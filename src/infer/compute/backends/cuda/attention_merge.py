"""Parts of attention, merged: the largest score, the sum of weights, and the values times weights of some slots.

Scores are logarithms of base 2. A part's largest score is rounded up to an integer, so its factor in a merge is a power
of two and exact. Chunks are merged from the left, in a program's registers or by the last program of a tile.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))
AT_ONCE = tl.constexpr(4)  # chunks whose parts are loaded before the first of them is merged


class ChunkParts(NamedTuple):
    """Parts of the chunks of split tiles, by [slot, kv head]."""

    largests: Any  # [..., queries]
    sums: Any  # [..., queries]
    weighted: Any  # [..., queries, dims]


@triton.jit
def nothing(ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Return the part of no slots."""
    return (
        tl.full((ROWS,), -INFINITY, tl.float32),
        tl.full((ROWS,), 0.0, tl.float32),
        tl.full((ROWS, SIZE), 0.0, tl.float32),
    )


@triton.jit
def merged(largest, total, values, other_largest, other_total, other_values):
    """Return two parts of the same queries merged into one. Either may cover no slots."""
    both = tl.maximum(largest, other_largest)
    mine, other = tl.exp2(largest - finite(both)), tl.exp2(other_largest - finite(both))
    return both, total * mine + other_total * other, values * mine[:, None] + other_values * other[:, None]


@triton.jit
def finite(largest):
    """Return 0 for −inf, so that −inf minus it stays −inf and does not become NaN."""
    return tl.where(largest == -INFINITY, 0.0, largest)


@triton.jit
def store_part(
    parts, part, is_mine, largest, total, values, DIM: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr
):
    at = part.to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
    i = tl.arange(0, SIZE)
    tl.store(parts.largests + at, largest, mask=is_mine)
    tl.store(parts.sums + at, total, mask=is_mine)
    tl.store(parts.weighted + at[:, None] * DIM + i[None, :], values, mask=is_mine[:, None] & (i < DIM)[None, :])


@triton.jit
def merged_parts(parts, part, step, count, is_mine, DIM: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr):
    """Return `count` parts, `step` apart from `part` on, merged from the left."""
    largest, total, values = nothing(QUERIES, SIZE)
    at_once: tl.constexpr = AT_ONCE if SIZE <= 256 else 1  # as many as the registers have room for
    for start in range(0, count, at_once):
        for index in tl.static_range(at_once):
            is_there = is_mine & (tl.zeros((QUERIES,), tl.int32) + start + index < count)
            at = (part + (start + index) * step).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
            i = tl.arange(0, SIZE)
            largest, total, values = merged(
                largest, total, values,
                tl.load(parts.largests + at, mask=is_there, other=-INFINITY),
                tl.load(parts.sums + at, mask=is_there, other=0.0),
                tl.load(
                    parts.weighted + at[:, None] * DIM + i[None, :],
                    mask=is_there[:, None] & (i < DIM)[None, :], other=0.0,
                ),
            )  # fmt: skip
    return largest, total, values
