"""Rows with top-k, top-p or min-p, exactly and without a sort of the vocabulary.

`score_blocks` has stored the largest key of each chunk of 16 tokens. The chunks with the largest maxima, as many as fit
a tile, are gathered. They hold every token above the largest maximum that was left out: nearly always all that the
filters keep. The pivots are then found in registers. Otherwise (a flat distribution, a large k, many ties) `whole`
reads the row at each step.
"""

import triton
import triton.language as tl

from infer.backends.cuda.batch import (
    IS_FILTERED,
    LOG_MIN_P,
    SEED,
    TEMPERATURE,
    TEMPERATURE_LAST,
    TOP_K,
    TOP_P,
    double,
    integer,
    single,
)
from infer.backends.cuda.edits import INFINITY, bans_ends, edited, raw_logits, shift_of, tempered
from infer.backends.cuda.noise import gumbel_of, hash_tokens
from infer.backends.cuda.order import MAX_ID, MIN, best_of, kept_of, key_of, logit_of, pivot_of
from infer.backends.cuda.plain import code_of, largest_edited, largest_of_row
from infer.backends.cuda.weight import goal_of, weights
from infer.backends.cuda.whole import choose_of_row


@triton.jit
def weigh_blocks(
    batch, largests, sums, num_blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    """Store the weight of each block of the rows with a top-p and no top-k. They add up to the vocabulary's weight."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if (double(batch, row, TOP_P) < 1) & (integer(batch, row, TOP_K) == 0):
        blocks = tl.arange(0, BLOCKS)
        _, largest = largest_of_row(largests, row * num_blocks + blocks, blocks < num_blocks)
        divisor, _ = divisors_of(batch, row)
        shift = shift_of(largest, divisor)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        y = tempered(edited(raw_logits(batch, row, ids), batch, row, ids, 0, EDITS), divisor, shift)
        amounts = weights(y, tempered(largest, divisor, shift))
        total = tl.sum(tl.where(largest > -INFINITY, amounts, 0))
        tl.store(sums + row * num_blocks + block, total)


@triton.jit
def divisors_of(batch, row):
    """Return the divisors of the logits before the filters and after them."""
    temperature, is_last = single(batch, row, TEMPERATURE), integer(batch, row, TEMPERATURE_LAST) != 0
    return tl.where(is_last, 1.0, temperature), tl.where(is_last, temperature, 1.0)


@triton.jit
def choose_filtered(
    batch, largests, sums, maxima, gathered, token_ids, ends, num_blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CAPACITY: tl.constexpr,
    EDITS: tl.constexpr, LOGPROBS: tl.constexpr,
):  # fmt: skip
    """Store the token of each row with filters, or the code of its failure.

    With LOGPROBS, also store the key and the id of the last token that is kept.
    """
    row = tl.program_id(0).to(tl.int64)
    if integer(batch, row, IS_FILTERED) != 0:
        blocks = tl.arange(0, BLOCKS)
        at = row * num_blocks + blocks
        has_fault, largest = largest_of_row(largests, at, blocks < num_blocks)
        is_lifted = ((largest == -INFINITY) & bans_ends(batch, row, EDITS)).to(tl.int32)
        if is_lifted != 0:
            largest = largest_edited(batch, row, is_lifted, BLOCK, EDITS)
        is_allowed = largest > -INFINITY
        token = tl.full((), -1, tl.int32)
        pivot, last_id = tl.full((), MIN, tl.int32), tl.full((), MAX_ID, tl.int32)
        if is_allowed & (has_fault == 0):
            if is_lifted == 0:
                total = tl.sum(tl.load(sums + at, mask=blocks < num_blocks, other=0))
                num_gathered, floor = _gather(batch, row, maxima, gathered, CHUNK, CHUNKS, CAPACITY)
                token, pivot, last_id = _choose_of_tile(
                    batch, row, largest, total, gathered, num_gathered, floor, CHUNK, CAPACITY, EDITS
                )
            if token < 0:
                first, last = divisors_of(batch, row)
                token, pivot, last_id = choose_of_row(batch, row, first, last, largest, is_lifted, BLOCK, EDITS)
        if LOGPROBS:
            tl.store(ends + 2 * row, pivot)
            tl.store(ends + 2 * row + 1, last_id)
        tl.store(token_ids + row, code_of(token, has_fault, is_allowed))


@triton.jit
def _gather(batch, row, maxima, gathered, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CAPACITY: tl.constexpr):
    """List the chunks with the largest maxima, in ascending order. They contain all tokens above the returned floor
    key.
    """
    num_chunks = tl.cdiv(batch.vocab_size, CHUNK)
    chunks = tl.arange(0, CHUNKS)
    keys = tl.load(maxima + row * num_chunks + chunks, mask=chunks < num_chunks, other=MIN)
    room: tl.constexpr = CAPACITY // CHUNK
    floor = pivot_of(keys, (keys > MIN).to(tl.int32), room + 1.0, tl.full((), MIN, tl.int64))
    is_gathered = keys > floor
    places = tl.cumsum(is_gathered.to(tl.int32), 0) - 1
    tl.store(gathered + row * room + places, chunks, mask=is_gathered)
    tl.debug_barrier()
    return tl.sum(is_gathered.to(tl.int32)), floor


@triton.jit
def _choose_of_tile(
    batch, row, largest, total, gathered, num_gathered, floor,
    CHUNK: tl.constexpr, CAPACITY: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    """Return the token, and the key and id of the last token kept.

    The token is −1 if the gathered tokens do not contain all that is kept.
    """
    first, last = divisors_of(batch, row)
    shift = shift_of(largest, first)
    slots = tl.arange(0, CAPACITY) // CHUNK
    chunk = tl.load(gathered + row * (CAPACITY // CHUNK) + slots, mask=slots < num_gathered, other=-1)
    ids = tl.where(chunk >= 0, chunk * CHUNK + tl.arange(0, CAPACITY) % CHUNK, -1)
    y = tempered(edited(raw_logits(batch, row, ids), batch, row, ids, 0, EDITS), first, shift)
    top = tempered(largest, first, shift)
    if floor > MIN:
        floor = key_of(tempered(logit_of(floor), first, shift))
    keys = key_of(y)
    keys = tl.where((ids >= 0) & (ids < batch.vocab_size) & (keys > floor), keys, MIN)
    keys, is_complete = _filtered(batch, row, keys, y, top, total, floor)
    token = tl.full((), -1, tl.int32)
    if is_complete:
        h = hash_tokens(integer(batch, row, SEED), tl.load(batch.positions + row), ids)
        scores = tempered(y, last, shift_of(top, last)) + gumbel_of(h)
        _, token = best_of(tl.where(keys > MIN, scores, -INFINITY), ids)
    pivot = tl.min(tl.where(keys > MIN, keys, tl.max(keys)))
    return token, pivot, tl.max(tl.where(keys == pivot, ids, -1))


@triton.jit
def _filtered(batch, row, keys, y, top, total, floor):
    """Return the keys that steps 7 to 9 keep, and whether they are complete."""
    top_k, top_p, log_min_p = integer(batch, row, TOP_K), double(batch, row, TOP_P), single(batch, row, LOG_MIN_P)
    is_complete = tl.full((), 1, tl.int1)
    if top_k > 0:
        is_there = (keys > MIN).to(tl.int32)
        is_complete = tl.sum(is_there) >= top_k
        keys = tl.where(kept_of(keys, is_there, top_k.to(tl.float64)), keys, MIN)
    if top_p < 1:
        amounts = tl.where(keys > MIN, weights(y, top), 0)
        total_kept = tl.sum(amounts)
        goal = goal_of(tl.where(top_k > 0, total_kept, total), top_p)
        is_complete = is_complete & (total_kept.to(tl.float64) >= goal)
        keys = tl.where(kept_of(keys, amounts, goal), keys, MIN)
    if log_min_p > -INFINITY:
        lowest = top + log_min_p
        is_complete = is_complete & ((top_k > 0) | (top_p < 1) | (key_of(lowest) > floor))
        keys = tl.where(y < lowest, MIN, keys)
    return keys, is_complete
