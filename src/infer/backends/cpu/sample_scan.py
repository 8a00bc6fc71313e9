"""The sampler's first command: steps 2 to 4 in place, and the largest logit of each group. Raw logits whose
log-probabilities are asked for are copied first.

Each thread edits and reads its own part of the vocabulary. Edits change finite logits only, so that NaN and +inf are
found; they touch the ids that have one, in the reference's order and with its rounding. Masks come with the reading.
"""

from collections.abc import Callable

import numpy as np
from numba import carray, njit

from infer.backends.cpu.layouts import LANES
from infer.backends.cpu.records import MAX_THREADS
from infer.backends.cpu.sample_math import keep_bits, load_f64, load_i32
from infer.backends.cpu.simd import (
    load_i64,
    load_scalar_f32,
    load_u8,
    max_f32,
    maximum,
    splat_f32,
    store_f32,
    store_scalar_f32,
)
from infer.backends.cpu.tails import load_upto

LARGEST = np.float32(np.finfo(np.float32).max)
NOTHING = np.float32(-np.inf)


@njit(forceinline=True)
def part(args, thread, num_threads):  # type: ignore[no-untyped-def]
    """The groups of a thread: first, end."""
    return args.num_groups * thread // num_threads, args.num_groups * (thread + 1) // num_threads


@njit(forceinline=True)
def logits_of(args, row):  # type: ignore[no-untyped-def]
    return args.logits + 4 * args.row_stride * (load_i64(args.starts + 8 * row) + args.entry)


@njit(forceinline=True)
def position_of(args, row):  # type: ignore[no-untyped-def]
    """How many tokens stand before the one to sample."""
    return load_i64(args.positions + 8 * row) + args.position_offset + args.entry


@njit(forceinline=True)
def scores_logits(args, row, is_processed):  # type: ignore[no-untyped-def]
    """Whether the row asks for log-probabilities, of such logits."""
    if args.logprobs == 0 or load_i64(args.top_logprobs + 8 * row) < 0:
        return False
    return (load_u8(args.logprobs_processed + row) != 0) == is_processed


@njit
def _keep_raw(args, row, logits, first, end, thread):  # type: ignore[no-untyped-def]
    scored, group_size = args.scored + 4 * args.padded * row, LANES * args.group_vectors
    most = splat_f32(NOTHING)
    for token in range(group_size * first, group_size * end, LANES):
        at, room = logits + 4 * token, args.vocab - token
        x = load_upto(at, room)
        store_f32(scored + 4 * token, x)
        most = maximum(most, x)
    store_scalar_f32(args.peaks + 4 * (MAX_THREADS * row + thread), max_f32(most))


@njit(forceinline=True)
def _is_finite(x):  # type: ignore[no-untyped-def]
    return x >= -LARGEST and x <= LARGEST


@njit(forceinline=True)
def _bounded(x):  # type: ignore[no-untyped-def]
    return min(max(x, -LARGEST), LARGEST)


@njit
def _add_biases(args, row, logits, begin, end):  # type: ignore[no-untyped-def]
    starts = args.bias_starts + 8 * row
    for entry in range(load_i64(starts), load_i64(starts + 8)):
        token = load_i64(args.bias_ids + 8 * entry)
        if begin <= token < end:
            value = load_scalar_f32(logits + 4 * token)
            if _is_finite(value):
                bias = load_f64(args.biases + 8 * entry)
                biased = NOTHING if bias == -np.inf else _bounded(np.float32(np.float64(value) + bias))
                store_scalar_f32(logits + 4 * token, biased)


@njit
def _penalise(args, row, logits, begin, end):  # type: ignore[no-untyped-def]
    """Each id at its last occurrence: first repetition over the window, then frequency and presence over the output."""
    slot = load_i64(args.history_slot + 8 * row)
    if slot < 0:
        return
    tokens, last = args.tokens + 4 * args.capacity * slot, args.last + 4 * args.vocab * slot
    length = load_i64(args.lengths + 8 * slot)
    penalty = load_scalar_f32(args.repetition_penalty + 4 * row)
    if penalty != 1:
        for position in range(max(0, length - load_i64(args.repetition_window + 8 * row)), length):
            token = np.int64(load_i32(tokens + 4 * position))
            if begin <= token < end and load_i32(last + 4 * token) == position + 1:
                value = load_scalar_f32(logits + 4 * token)
                if _is_finite(value):
                    penalised = value / penalty if value > 0 else value * penalty
                    store_scalar_f32(logits + 4 * token, _bounded(penalised))
    frequency = load_scalar_f32(args.frequency_penalty + 4 * row)
    presence = load_scalar_f32(args.presence_penalty + 4 * row)
    if frequency == 0 and presence == 0:
        return
    counts = args.counts + 4 * args.vocab * slot
    for position in range(load_i64(args.prompt_lengths + 8 * slot), length):
        token = np.int64(load_i32(tokens + 4 * position))
        if begin <= token < end and load_i32(last + 4 * token) == position + 1:
            value = load_scalar_f32(logits + 4 * token)
            if _is_finite(value):
                value = _bounded(value - frequency * np.float32(load_i32(counts + 4 * token)))
                store_scalar_f32(logits + 4 * token, _bounded(value - presence))


@njit(forceinline=True)
def is_below_minimum(args, row):  # type: ignore[no-untyped-def]
    return position_of(args, row) - load_i64(args.num_prompt_tokens + 8 * row) < load_i64(args.min_new_tokens + 8 * row)


@njit
def _ban_ends(args, row, logits, begin, end):  # type: ignore[no-untyped-def]
    """Their logits are kept aside: `choose` takes them back where nothing else is left."""
    starts = args.end_starts + 8 * row
    for entry in range(load_i64(starts), load_i64(starts + 8)):
        token = load_i64(args.end_ids + 8 * entry)
        if begin <= token < end:
            value = load_scalar_f32(logits + 4 * token)
            store_scalar_f32(args.ends + 4 * entry, value)
            if _is_finite(value):
                store_scalar_f32(logits + 4 * token, NOTHING)


@njit(forceinline=True)
def masks_of(args, row):  # type: ignore[no-untyped-def]
    """The addresses of the row's own mask and of the grammar's, 0 for none."""
    own, allowed, words = np.int64(0), np.int64(0), 4 * args.mask_words
    index = load_i64(args.mask_index + 8 * row)
    if index >= 0:
        own = args.masks + words * index
    if args.allowed != 0:
        allowed = args.allowed + words * (load_i64(args.starts + 8 * row) + args.entry)
    return own, allowed


@njit(forceinline=True)
def masked_bits(masks, token):  # type: ignore[no-untyped-def]
    """The bits of 16 tokens, of which `token`, a multiple of 16, is the first."""
    own, allowed = masks
    bits, at = np.int32(-1), 4 * (token // 32)
    if own != 0:
        bits &= load_i32(own + at)
    if allowed != 0:
        bits &= load_i32(allowed + at)
    return bits >> np.int32(token % 32)


def make_scan() -> Callable[..., None]:
    """A group with NaN or +inf has NaN for its largest."""

    def scan(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args = carray(args_at, 1)[0]
        first, end = part(args, thread, num_threads)
        group_size = LANES * args.group_vectors
        for row in range(args.num_rows):
            if load_i64(args.alive + 8 * row) == 0:
                continue
            logits = logits_of(args, row)
            begin, stop = group_size * first, min(group_size * end, args.vocab)
            if scores_logits(args, row, False):
                _keep_raw(args, row, logits, first, end, thread)
            _add_biases(args, row, logits, begin, stop)
            _penalise(args, row, logits, begin, stop)
            if is_below_minimum(args, row):
                _ban_ends(args, row, logits, begin, stop)
            masks = masks_of(args, row)
            for group in range(first, end):
                most = splat_f32(NOTHING)
                raw = splat_f32(NOTHING)
                for token in range(group_size * group, min(group_size * (group + 1), args.vocab), LANES):
                    at, room = logits + 4 * token, args.vocab - token
                    x = load_upto(at, room)
                    if masks[0] != 0 or masks[1] != 0:
                        raw = maximum(raw, x)
                        bits = masked_bits(masks, token) & np.int32(0xFFFF)
                        if bits != 0xFFFF:
                            x = keep_bits(x, bits)
                            if room >= LANES:
                                store_f32(at, x)
                    most = maximum(most, x)
                largest, peak = max_f32(most), max_f32(raw)
                if largest == np.inf or peak == np.inf or peak != peak:
                    largest = np.float32(np.nan)
                store_scalar_f32(args.maxima + 4 * (args.num_groups * row + group), largest)

    return scan
