"""Rows without filters: mask, bias, penalties, temperature, noise and argmax in one read of the logits.

`score_blocks` finds the best token of each block of the vocabulary, and `choose_plain` the best of these. Two cases are
known only after the whole row is read: only the end is left below the minimum length, or dividing by the temperature
overflows. Both are rare, and the row is then read again.
"""

import triton
import triton.language as tl

from infer.compute.backends.cuda.sampling.edits import INFINITY, bans_ends, edited, raw_logits, shift_of, tempered
from infer.compute.backends.cuda.sampling.kernel_arguments import (
    IS_FILTERED,
    IS_UNUSED,
    SEED,
    TEMPERATURE,
    integer,
    single,
)
from infer.compute.backends.cuda.sampling.noise import (
    MAX_ID,
    ROUGH_ERROR,
    best_of,
    gumbel_of,
    hash_tokens,
    key_of,
    rough_gumbel,
)

NOT_A_NUMBER, NOTHING_ALLOWED = tl.constexpr(-1), tl.constexpr(-2)


@triton.jit
def score_blocks(
    batch, scores, score_ids, largests, raw_largests, maxima,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, EDITS: tl.constexpr, FILTERS: tl.constexpr, LOGPROBS: tl.constexpr,
):  # fmt: skip
    """Store each block's best score and its id, and its largest logit (NaN if one is NaN or +inf).

    For rows with filters, store the key of each chunk's largest logit instead of the score. With LOGPROBS, also store
    the largest raw logit.
    """
    block, row, num_blocks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    if integer(batch, row, IS_UNUSED) == 0:
        ids = block * BLOCK + tl.arange(0, BLOCK)
        raw = raw_logits(batch, row, ids)
        x = edited(raw, batch, row, ids, 0, EDITS)
        is_faulty = tl.max(((raw != raw) | (raw == INFINITY)).to(tl.int32)) > 0
        at = row * num_blocks + block
        tl.store(largests + at, tl.where(is_faulty, float("nan"), tl.max(x)))
        if LOGPROBS:
            tl.store(raw_largests + at, tl.max(raw))
        is_filtered = FILTERS
        if FILTERS:
            is_filtered = integer(batch, row, IS_FILTERED) != 0
        if is_filtered:
            num_chunks = tl.cdiv(batch.vocab_size, CHUNK)
            chunks = block * (BLOCK // CHUNK) + tl.arange(0, BLOCK // CHUNK)
            keys = tl.max(tl.reshape(key_of(x), (BLOCK // CHUNK, CHUNK)), axis=1)
            tl.store(maxima + row * num_chunks + chunks, keys, mask=chunks < num_chunks)
        else:
            score, token = _best_token(x, batch, row, ids)
            tl.store(scores + at, score)
            tl.store(score_ids + at, token)


@triton.jit
def _best_token(x, batch, row, ids):
    """Return the best score and token of a tile: by rough scores if they leave no doubt, else by exact ones."""
    temperature = single(batch, row, TEMPERATURE)
    if temperature == 0:
        score, token = best_of(x, ids)
    else:
        h = hash_tokens(integer(batch, row, SEED), tl.load(batch.positions + row), ids)
        rough = tl.fma(x, 1.0 / temperature, rough_gumbel(h))
        best = tl.max(rough)
        is_candidate = rough >= best - (2 * ROUGH_ERROR + 1e-5 * tl.abs(best))
        if tl.sum(is_candidate.to(tl.int32)) == 1:
            token = tl.min(tl.where(is_candidate, ids, MAX_ID))
            its_x = tl.max(tl.where(is_candidate, x, -INFINITY))
            its_hash = tl.max(tl.where(is_candidate, h, 0).to(tl.uint32))
            score = tempered(its_x, temperature, 0.0) + gumbel_of(its_hash)
        else:
            score, token = best_of(tempered(x, temperature, 0.0) + gumbel_of(h), ids)
    return score, token


@triton.jit
def choose_plain(
    batch, scores, score_ids, largests, token_ids, num_blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    """Store the best token of the row's blocks, or the code of its failure."""
    row = tl.program_id(0).to(tl.int64)
    if (integer(batch, row, IS_FILTERED) == 0) & (integer(batch, row, IS_UNUSED) == 0):
        blocks = tl.arange(0, BLOCKS)
        at = row * num_blocks + blocks
        has_fault, largest = largest_of_row(largests, row, num_blocks, BLOCKS)
        score, token = best_of(
            tl.load(scores + at, mask=blocks < num_blocks, other=-INFINITY),
            tl.load(score_ids + at, mask=blocks < num_blocks, other=MAX_ID),
        )
        temperature = single(batch, row, TEMPERATURE)
        divisor = tl.where(temperature == 0, 1.0, temperature)
        is_lifted = (largest == -INFINITY) & bans_ends(batch, row, EDITS)
        if is_lifted | (shift_of(largest, divisor) != 0):
            score, token = _best_of_row(batch, row, divisor, is_lifted.to(tl.int32), BLOCK, EDITS)
        tl.store(token_ids + row, code_of(token, has_fault, score > -INFINITY))


@triton.jit
def largest_of_row(largests, row, num_blocks, BLOCKS: tl.constexpr):
    """Return whether the row holds NaN or +inf, and its largest logit."""
    blocks = tl.arange(0, BLOCKS)
    values = tl.load(largests + row * num_blocks + blocks, mask=blocks < num_blocks, other=-INFINITY)
    is_faulty = values != values
    return tl.max(is_faulty.to(tl.int32)) > 0, tl.max(tl.where(is_faulty, -INFINITY, values))


@triton.jit
def lifted_largest_of_row(
    batch, row, largests, num_blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EDITS: tl.constexpr
):
    """Return the same, and whether the minimum length would leave nothing, so that it is not enforced."""
    has_fault, largest = largest_of_row(largests, row, num_blocks, BLOCKS)
    is_lifted = ((largest == -INFINITY) & bans_ends(batch, row, EDITS)).to(tl.int32)
    if is_lifted != 0:
        largest = largest_edited(batch, row, is_lifted, BLOCK, EDITS)
    return has_fault, largest, is_lifted


@triton.jit
def code_of(token, has_fault, is_allowed):
    return tl.where(has_fault, NOT_A_NUMBER, tl.where(is_allowed, token, NOTHING_ALLOWED)).to(tl.int64)


@triton.jit
def largest_edited(batch, row, is_lifted, BLOCK: tl.constexpr, EDITS: tl.constexpr):
    largest = tl.full((), -INFINITY, tl.float32)
    for start in range(0, batch.vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = edited(raw_logits(batch, row, ids), batch, row, ids, is_lifted, EDITS)
        largest = tl.maximum(largest, tl.max(x))
    return largest


@triton.jit
def _best_of_row(batch, row, divisor, is_lifted, BLOCK: tl.constexpr, EDITS: tl.constexpr):
    shift = shift_of(largest_edited(batch, row, is_lifted, BLOCK, EDITS), divisor)
    is_greedy = single(batch, row, TEMPERATURE) == 0
    best, best_id = tl.full((), -INFINITY, tl.float32), tl.full((), MAX_ID, tl.int32)
    for start in range(0, batch.vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tempered(edited(raw_logits(batch, row, ids), batch, row, ids, is_lifted, EDITS), divisor, shift)
        h = hash_tokens(integer(batch, row, SEED), tl.load(batch.positions + row), ids)
        score, token = best_of(tl.where(is_greedy, x, x + gumbel_of(h)), ids)
        best_id = tl.where(score > best, token, best_id)
        best = tl.maximum(best, score)
    return best, best_id
