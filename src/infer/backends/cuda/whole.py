"""The same filters by one program that reads the row at each step, for rows whose kept tokens do not fit a tile.

The tokens kept so far are the first of the total order. Their last token identifies them: a pivot key and, among the
tokens equal to it, an id.
"""

import triton
import triton.language as tl

from infer.backends.cuda.batch import LOG_MIN_P, SEED, TOP_K, TOP_P, double, integer, single
from infer.backends.cuda.edits import INFINITY, edited, raw_logits, shift_of, tempered
from infer.backends.cuda.noise import gumbel_of, hash_tokens
from infer.backends.cuda.order import MAX_ID, MIN, best_of, key_of
from infer.backends.cuda.weight import goal_of, weights


@triton.jit
def choose_of_row(batch, row, first, last, largest, is_lifted, BLOCK: tl.constexpr, EDITS: tl.constexpr):
    shift = shift_of(largest, first)
    top = tempered(largest, first, shift)
    view = (first, shift, top, is_lifted)
    pivot, last_id = tl.full((), MIN, tl.int32), tl.full((), MAX_ID, tl.int32)
    top_k, top_p = integer(batch, row, TOP_K), double(batch, row, TOP_P)
    if top_k > 0:
        pivot, last_id = _shortened(batch, row, view, pivot, last_id, top_k.to(tl.float64), False, BLOCK, EDITS)
    if top_p < 1:
        goal = goal_of(_above(batch, row, view, pivot, last_id, MIN, True, BLOCK, EDITS), top_p)
        pivot, last_id = _shortened(batch, row, view, pivot, last_id, goal, True, BLOCK, EDITS)
    lowest = key_of(top + single(batch, row, LOG_MIN_P))
    last_id = tl.where(lowest > pivot, MAX_ID, last_id)
    pivot = tl.maximum(pivot, lowest)
    best, best_id = tl.full((), -INFINITY, tl.float32), tl.full((), MAX_ID, tl.int32)
    for start in range(0, batch.vocab_size, BLOCK):
        ids, y, keys, _ = _tile(batch, row, view, pivot, last_id, start, False, BLOCK, EDITS)
        h = hash_tokens(integer(batch, row, SEED), tl.load(batch.positions + row), ids)
        scores = tempered(y, last, shift_of(top, last)) + gumbel_of(h)
        score, token = best_of(tl.where(keys > MIN, scores, -INFINITY), ids)
        best_id = tl.where(score > best, token, best_id)
        best = tl.maximum(best, score)
    return best_id, pivot, last_id


@triton.jit
def _shortened(batch, row, view, pivot, last_id, goal, WEIGHED: tl.constexpr, BLOCK: tl.constexpr, EDITS: tl.constexpr):
    """Return the last key and id of the fewest kept tokens, in the total order, whose amounts reach the goal."""
    low, high = tl.full((), MIN, tl.int64), key_of(view[2]).to(tl.int64)
    while low < high:
        middle = low + ((high - low) >> 1)
        above = _above(batch, row, view, pivot, last_id, middle.to(tl.int32), WEIGHED, BLOCK, EDITS)
        is_short = above.to(tl.float64) < goal
        high = tl.where(is_short, middle, high)
        low = tl.where(is_short, low, middle + 1)
    new_pivot = low.to(tl.int32)
    above = _above(batch, row, view, pivot, last_id, new_pivot, WEIGHED, BLOCK, EDITS)
    num_before, new_last_id = tl.full((), -1, tl.int32), tl.full((), -1, tl.int32)
    for start in range(0, batch.vocab_size, BLOCK):
        ids, _, keys, amounts = _tile(batch, row, view, pivot, last_id, start, WEIGHED, BLOCK, EDITS)
        is_equal = keys == new_pivot
        places = num_before + tl.cumsum(is_equal.to(tl.int32), 0)
        is_kept = is_equal & ((above + places.to(tl.int64) * amounts).to(tl.float64) < goal)
        new_last_id = tl.maximum(new_last_id, tl.max(tl.where(is_kept, ids, -1)))
        num_before += tl.sum(is_equal.to(tl.int32))
    return new_pivot, new_last_id


@triton.jit
def _above(
    batch, row, view, pivot, last_id, key,
    WEIGHED: tl.constexpr, BLOCK: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    """Return the number, or the weight, of the kept tokens above the key."""
    above = tl.full((), 0, tl.int64)
    for start in range(0, batch.vocab_size, BLOCK):
        _, _, keys, amounts = _tile(batch, row, view, pivot, last_id, start, WEIGHED, BLOCK, EDITS)
        above += tl.sum(tl.where(keys > key, amounts, 0))
    return above


@triton.jit
def _tile(
    batch, row, view, pivot, last_id, start,
    WEIGHED: tl.constexpr, BLOCK: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    """Return ids, logits before the filters, keys (MIN for tokens that are not kept) and amounts from `start` on."""
    divisor, shift, top, is_lifted = view
    ids = start + tl.arange(0, BLOCK)
    y = tempered(edited(raw_logits(batch, row, ids), batch, row, ids, is_lifted, EDITS), divisor, shift)
    keys = key_of(y)
    is_kept = (ids < batch.vocab_size) & ((keys > pivot) | ((keys == pivot) & (ids <= last_id)))
    keys = tl.where(is_kept, keys, MIN)
    amounts = is_kept.to(tl.int64)
    if WEIGHED:
        amounts = tl.where(is_kept, weights(y, top), 0)
    return ids, y, keys, amounts
