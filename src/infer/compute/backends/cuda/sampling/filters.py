"""Rows with top-k, top-p or min-p, exactly and without a sort of the vocabulary.

The tokens that a filter keeps are the first of the total order. Their last token identifies them: a pivot key and,
among the tokens equal to it, an id. Top-k counts tokens and top-p adds weights, by the same bisection.

`score_blocks` has stored the largest key of each chunk of 16 tokens. The search first reads the chunks with the largest
maxima, as many as fit a tile, and holds them in registers. They contain every token above the largest maximum that was
left out: nearly always all that the filters keep. Otherwise (a flat distribution, a large k, many ties) the same search
reads the whole row at each step.
"""

import triton
import triton.language as tl

from infer.compute.backends.cuda.sampling.edits import INFINITY, divisors_of, edited, raw_logits, shift_of, tempered
from infer.compute.backends.cuda.sampling.kernel_arguments import FILTER_FIELDS, IS_FILTERED, SEED, double, integer
from infer.compute.backends.cuda.sampling.noise import (
    MAX_ID,
    MIN,
    best_of,
    goal_of,
    gumbel_of,
    hash_tokens,
    key_of,
    logit_of,
    weights,
)
from infer.compute.backends.cuda.sampling.unfiltered import code_of, largest_of_row, lifted_largest_of_row

TOP_K, TOP_P, LOG_MIN_P = (FILTER_FIELDS[name] for name in ("top_k", "top_p", "min_p"))


@triton.jit
def weigh_blocks(batch, largests, sums, num_blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EDITS: tl.constexpr):
    """Store the weight of each block of the rows with a top-p and no top-k. They add up to the vocabulary's weight."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if (double(batch, row, TOP_P) < 1) & (double(batch, row, TOP_K) == 0):
        _, largest = largest_of_row(largests, row, num_blocks, BLOCKS)
        divisor, _ = divisors_of(batch, row)
        shift = shift_of(largest, divisor)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        y = tempered(edited(raw_logits(batch, row, ids), batch, row, ids, 0, EDITS), divisor, shift)
        amounts = weights(y, tempered(largest, divisor, shift))
        total = tl.sum(tl.where(largest > -INFINITY, amounts, 0))
        tl.store(sums + row * num_blocks + block, total)


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
        has_fault, largest, is_lifted = lifted_largest_of_row(batch, row, largests, num_blocks, BLOCK, BLOCKS, EDITS)
        is_allowed = largest > -INFINITY
        token = tl.full((), -1, tl.int32)
        pivot, last_id = tl.full((), MIN, tl.int32), tl.full((), MAX_ID, tl.int32)
        if is_allowed & (has_fault == 0):
            first, last = divisors_of(batch, row)
            shift = shift_of(largest, first)
            view = (first, shift, last, tempered(largest, first, shift), is_lifted)
            blocks = tl.arange(0, BLOCKS)
            total = tl.sum(tl.load(sums + row * num_blocks + blocks, mask=blocks < num_blocks, other=0))
            if is_lifted == 0:
                num_gathered, floor = _gather(batch, row, view, maxima, gathered, CHUNK, CHUNKS, CAPACITY)
                tile, floor = _gathered_tile(batch, row, view, gathered, num_gathered, floor, CHUNK, CAPACITY, EDITS)
                token, pivot, last_id = _choose(batch, row, view, tile, floor, total, False, CAPACITY, EDITS)
            if token < 0:
                nothing = tl.full((), MIN, tl.int32)
                token, pivot, last_id = _choose(batch, row, view, view, nothing, total, True, BLOCK, EDITS)
        if LOGPROBS:
            tl.store(ends + 2 * row, pivot)
            tl.store(ends + 2 * row + 1, last_id)
        tl.store(token_ids + row, code_of(token, has_fault, is_allowed))


@triton.jit
def _gather(batch, row, view, maxima, gathered, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CAPACITY: tl.constexpr):
    """List the chunks with the largest maxima, in ascending order. They contain all tokens above the returned floor
    key.
    """
    num_chunks = tl.cdiv(batch.vocab_size, CHUNK)
    chunks = tl.arange(0, CHUNKS)
    keys = tl.load(maxima + row * num_chunks + chunks, mask=chunks < num_chunks, other=MIN)
    room: tl.constexpr = CAPACITY // CHUNK
    nothing = tl.full((), MIN, tl.int32)
    tile, kept = (chunks, keys, keys, keys), (nothing, nothing)
    floor = _pivot_of(batch, row, view, tile, kept, tl.max(keys), room + 1.0, False, False, CHUNKS, 0)
    is_gathered = keys > floor
    places = tl.cumsum(is_gathered.to(tl.int32), 0) - 1
    tl.store(gathered + row * room + places, chunks, mask=is_gathered)
    tl.debug_barrier()
    return tl.sum(is_gathered.to(tl.int32)), floor


@triton.jit
def _gathered_tile(
    batch, row, view, gathered, num_gathered, floor, CHUNK: tl.constexpr, CAPACITY: tl.constexpr, EDITS: tl.constexpr
):
    """Return the ids, logits, keys and weights of the gathered tokens, and the floor as a key of such logits."""
    first, shift, top = view[0], view[1], view[3]
    slots = tl.arange(0, CAPACITY) // CHUNK
    chunk = tl.load(gathered + row * (CAPACITY // CHUNK) + slots, mask=slots < num_gathered, other=-1)
    ids = tl.where(chunk >= 0, chunk * CHUNK + tl.arange(0, CAPACITY) % CHUNK, MAX_ID)
    y = _logits_of(batch, row, view, ids, EDITS)
    amounts = tl.zeros((CAPACITY,), tl.int64)
    if double(batch, row, TOP_P) < 1:
        amounts = weights(y, top)
    if floor > MIN:
        floor = key_of(tempered(logit_of(floor), first, shift))
    return (ids, y, tl.where(ids < batch.vocab_size, key_of(y), MIN), amounts), floor


@triton.jit
def _choose(batch, row, view, tile, floor, total, WHOLE: tl.constexpr, BLOCK: tl.constexpr, EDITS: tl.constexpr):
    """Return the token, and the key and id of the last token kept, among the tokens above the floor.

    The token is −1 if they do not contain all that is kept. `total` is the vocabulary's weight for a top-p without a
    top-k; the whole row is weighed again.
    """
    last, top = view[2], view[3]
    goal, top_p = double(batch, row, TOP_K), double(batch, row, TOP_P)
    has_top_k = goal > 0
    pivot, last_id = floor, tl.full((), -1, tl.int32)
    is_complete = tl.full((), 1, tl.int1)
    if has_top_k:
        num_tokens = _above(batch, row, view, tile, (pivot, last_id), pivot, False, WHOLE, BLOCK, EDITS)
        is_complete = num_tokens.to(tl.float64) >= goal
        pivot, last_id = _shortened(batch, row, view, tile, (pivot, last_id), goal, False, WHOLE, BLOCK, EDITS)
    if top_p < 1:
        nothing = tl.full((), MIN, tl.int32)
        weight = _above(batch, row, view, tile, (pivot, last_id), nothing, True, WHOLE, BLOCK, EDITS)
        if WHOLE:
            total = weight
        goal = goal_of(tl.where(has_top_k, weight, total), top_p)
        is_complete = is_complete & (weight.to(tl.float64) >= goal)
        pivot, last_id = _shortened(batch, row, view, tile, (pivot, last_id), goal, True, WHOLE, BLOCK, EDITS)
    lowest = key_of(top + double(batch, row, LOG_MIN_P).to(tl.float32))
    is_complete = is_complete & (WHOLE | has_top_k | (top_p < 1) | (lowest > floor))
    last_id = tl.where(lowest > pivot, MAX_ID, last_id)
    pivot = tl.maximum(pivot, lowest)
    best, best_id = tl.full((), -INFINITY, tl.float32), tl.full((), -1, tl.int32)
    if is_complete:
        for start in range(0, batch.vocab_size if WHOLE else 1, BLOCK):
            ids, y, keys, _ = _tokens(batch, row, view, tile, (pivot, last_id), start, False, WHOLE, BLOCK, EDITS)
            h = hash_tokens(integer(batch, row, SEED), tl.load(batch.positions + row), ids)
            scores = tempered(y, last, shift_of(top, last)) + gumbel_of(h)
            score, token = best_of(tl.where(keys > MIN, scores, -INFINITY), ids)
            best_id = tl.where(score > best, token, best_id)
            best = tl.maximum(best, score)
    return best_id, pivot, last_id


@triton.jit
def _shortened(
    batch, row, view, tile, kept, goal,
    WEIGHED: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    """Return the last key and id of the fewest kept tokens, in the total order, whose amounts reach the goal.

    Equal keys have equal amounts.
    """
    pivot = _pivot_of(batch, row, view, tile, kept, key_of(view[3]), goal, WEIGHED, WHOLE, BLOCK, EDITS)
    above = _above(batch, row, view, tile, kept, pivot, WEIGHED, WHOLE, BLOCK, EDITS).to(tl.int64)
    num_before, last_id = tl.full((), -1, tl.int32), tl.full((), -1, tl.int32)
    for start in range(0, batch.vocab_size if WHOLE else 1, BLOCK):
        ids, _, keys, amounts = _tokens(batch, row, view, tile, kept, start, WEIGHED, WHOLE, BLOCK, EDITS)
        is_equal = keys == pivot
        places = num_before + tl.cumsum(is_equal.to(tl.int32), 0)
        is_short = (above + places.to(tl.int64) * amounts).to(tl.float64) < goal
        last_id = tl.maximum(last_id, tl.max(tl.where(is_equal & is_short, ids, -1)))
        num_before += tl.sum(is_equal.to(tl.int32))
    return pivot, last_id


@triton.jit
def _pivot_of(
    batch, row, view, tile, kept, highest, goal,
    WEIGHED: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    """Return the smallest key, from the last kept one to `highest`, such that the kept tokens above it do not reach the
    goal.
    """
    low, high = kept[0].to(tl.int64), highest.to(tl.int64)
    while low < high:
        middle = low + ((high - low) >> 1)
        above = _above(batch, row, view, tile, kept, middle.to(tl.int32), WEIGHED, WHOLE, BLOCK, EDITS)
        is_short = above.to(tl.float64) < goal
        high = tl.where(is_short, middle, high)
        low = tl.where(is_short, low, middle + 1)
    return low.to(tl.int32)


@triton.jit
def _above(
    batch, row, view, tile, kept, key,
    WEIGHED: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    """Return the number, or the weight, of the kept tokens above the key."""
    above = tl.full((), 0, tl.int64 if WEIGHED else tl.int32)
    for start in range(0, batch.vocab_size if WHOLE else 1, BLOCK):
        _, _, keys, amounts = _tokens(batch, row, view, tile, kept, start, WEIGHED, WHOLE, BLOCK, EDITS)
        above += tl.sum(tl.where(keys > key, amounts, 0))
    return above


@triton.jit
def _tokens(
    batch, row, view, tile, kept, start,
    WEIGHED: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    """Return ids, logits before the filters, keys (MIN for tokens that are not kept) and amounts.

    The tokens are those of the tile, or a block of the whole row from `start` on.
    """
    pivot, last_id = kept
    if WHOLE:
        ids = start + tl.arange(0, BLOCK)
        y = _logits_of(batch, row, view, ids, EDITS)
        keys = tl.where(ids < batch.vocab_size, key_of(y), MIN)
    else:
        ids, y, keys, amounts = tile
    is_kept = (keys > pivot) | ((keys == pivot) & (ids <= last_id))
    if not WEIGHED:
        amounts = is_kept.to(tl.int32)
    elif WHOLE:
        amounts = weights(y, view[3])
    return ids, y, tl.where(is_kept, keys, MIN), tl.where(is_kept, amounts, 0)


@triton.jit
def _logits_of(batch, row, view, ids, EDITS: tl.constexpr):
    divisor, shift, is_lifted = view[0], view[1], view[4]
    return tempered(edited(raw_logits(batch, row, ids), batch, row, ids, is_lifted, EDITS), divisor, shift)
