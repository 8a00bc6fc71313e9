"""The sampler's first command: steps 2 to 4 in place, and the largest logit of each group.

Raw logits whose log-probabilities are requested are copied first. Each thread edits and reads its own part of the
vocabulary. Edits change only finite logits, so that NaN and +inf are found. They touch only the ids with an edit, in
the reference's order and with its rounding. Masks are applied when logits are read.
"""

import numpy as np
from numba import njit

from infer.compute.backends.cpu.layouts import LANES
from infer.compute.backends.cpu.sampling.exact_math import keep_bits
from infer.compute.backends.cpu.simd import address_of, load_i32, load_upto, max_f32, maximum, splat_f32, store_f32
from infer.compute.backends.cpu.thread_records import MAX_THREADS

LARGEST = np.float32(np.finfo(np.float32).max)
NOTHING = np.float32(-np.inf)


@njit(forceinline=True)
def part(args, thread, num_threads):
    """Return the groups [first, end) of the vocabulary that belong to a thread."""
    return args.num_groups * thread // num_threads, args.num_groups * (thread + 1) // num_threads


@njit(forceinline=True)
def logits_of(args, row):
    return args.logits + args.row_stride * (args.starts[row] + args.entry)


@njit(forceinline=True)
def position_of(args, row):
    """Return the number of tokens before the one to sample, which is its position."""
    return args.positions[row] + args.position_offset + args.entry


@njit(forceinline=True)
def scores_logits(args, row, is_processed):
    """Return True if the row requests log-probabilities of processed logits (`is_processed`), or of raw ones."""
    if address_of(args.logprobs) == 0 or args.top_logprobs[row] < 0:
        return False
    return (args.logprobs_processed[row] != 0) == is_processed


@njit
def _keep_raw(args, row, logits, first, end, thread):
    """Copy the logits of groups [first, end) to `scored`, padded with −inf, and the largest to the thread's `peaks`."""
    scored, group_size = args.scored + args.padded * row, LANES * args.group_vectors
    most = splat_f32(NOTHING)
    for token in range(group_size * first, group_size * end, LANES):
        at, room = logits + token, args.vocab - token
        x = load_upto(at, room)
        store_f32(scored + token, x)
        most = maximum(most, x)
    args.peaks[MAX_THREADS * row + thread] = max_f32(most)


@njit(forceinline=True)
def _is_finite(x):
    return x >= -LARGEST and x <= LARGEST


@njit(forceinline=True)
def _bounded(x):
    return min(max(x, -LARGEST), LARGEST)


@njit
def _add_biases(args, row, logits, begin, end):
    """Add the row's biases to its finite logits with ids in [begin, end), in place.

    A sum is bounded to the largest float. A bias of −inf bans the id.
    """
    starts = args.bias_starts + row
    for entry in range(starts[0], starts[1]):
        token = args.bias_ids[entry]
        if begin <= token < end:
            value = logits[token]
            if _is_finite(value):
                bias = args.biases[entry]
                biased = NOTHING if bias == -np.inf else _bounded(np.float32(np.float64(value) + bias))
                logits[token] = biased


@njit
def _penalise(args, row, logits, begin, end):
    """Apply the repetition, frequency and presence penalties to the logits of ids in [begin, end), in place.

    Each id is penalised once, at its last occurrence. The repetition penalty over the window comes first, then
    frequency and presence over the output. Reads `tokens`, `last` and `counts` of the row's history.
    """
    slot = args.history_slot[row]
    if slot < 0:
        return
    tokens, last = args.tokens + args.capacity * slot, args.last + args.vocab * slot
    length = args.lengths[slot]
    penalty = args.repetition_penalty[row]
    if penalty != 1:
        for position in range(max(0, length - args.repetition_window[row]), length):
            token = np.int64(tokens[position])
            if begin <= token < end and last[token] == position + 1:
                value = logits[token]
                if _is_finite(value):
                    penalised = value / penalty if value > 0 else value * penalty
                    logits[token] = _bounded(penalised)
    frequency = args.frequency_penalty[row]
    presence = args.presence_penalty[row]
    if frequency == 0 and presence == 0:
        return
    counts = args.counts + args.vocab * slot
    for position in range(args.prompt_lengths[slot], length):
        token = np.int64(tokens[position])
        if begin <= token < end and last[token] == position + 1:
            value = logits[token]
            if _is_finite(value):
                value = _bounded(value - frequency * np.float32(counts[token]))
                logits[token] = _bounded(value - presence)


@njit(forceinline=True)
def is_below_minimum(args, row):
    return position_of(args, row) - args.num_prompt_tokens[row] < args.min_new_tokens[row]


@njit
def _ban_ends(args, row, logits, begin, end):
    """Set the row's end tokens with ids in [begin, end) to −inf, and store their logits in `ends`.

    `choose` uses the stored logits if nothing else is left.
    """
    starts = args.end_starts + row
    for entry in range(starts[0], starts[1]):
        token = args.end_ids[entry]
        if begin <= token < end:
            value = logits[token]
            args.ends[entry] = value
            if _is_finite(value):
                logits[token] = NOTHING


@njit(forceinline=True)
def masks_of(args, row):
    """Return the addresses of the row's own mask and of the grammar's, i32 [mask_words] each. 0: there is none."""
    own, allowed, words = np.int64(0), np.int64(0), 4 * args.mask_words
    index = args.mask_index[row]
    if index >= 0:
        own = args.masks + words * index
    if args.allowed != 0:
        allowed = args.allowed + words * (args.starts[row] + args.entry)
    return own, allowed


@njit(forceinline=True)
def masked_bits(masks, token):
    """Return the mask bits of 16 tokens from id `token` on, which is a multiple of 16, in the low bits of an i32."""
    own, allowed = masks
    bits, at = np.int32(-1), 4 * (token // 32)
    if own != 0:
        bits &= load_i32(own + at)
    if allowed != 0:
        bits &= load_i32(allowed + at)
    return bits >> np.int32(token % 32)


def scan(args, state, thread, num_threads):
    """Edit the logits in place, and store the largest of each group: NaN if the group holds NaN or +inf.

    Reads the columns, the history and the masks. Writes `logits`, f32 [rows, row_stride], `maxima`, f32 [rows, groups],
    `ends` of banned ends, and `scored` and `peaks` of rows that ask for raw log-probabilities. A group has 16 ×
    `group_vectors` tokens. The last one may be shorter: nothing beyond `vocab` is written to the logits.
    """
    first, end = part(args, thread, num_threads)
    group_size = LANES * args.group_vectors
    for row in range(args.num_rows):
        if args.alive[row] == 0:
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
                at, room = logits + token, args.vocab - token
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
            args.maxima[args.num_groups * row + group] = largest
