"""Steps 1 to 6 for any tokens of a row: float32, masks, bias, minimum length, penalties, temperature.

`EDITS` is 0 if no row of the batch changes its logits before the temperature, 1 if one may, and 2 if grammars' masks
are added. A row's own fields contain the rest: an edit that is off costs a scalar comparison.
"""

import triton
import triton.language as tl

from infer.compute.backends.cuda.sampling.kernel_arguments import (
    BIAS_START,
    BIAS_STOP,
    END_START,
    END_STOP,
    FIRST_FREE_POSITION,
    FREQUENCY_PENALTY,
    HISTORY_SLOT,
    MASK_INDEX,
    NUM_DRAFTS,
    PRESENCE_PENALTY,
    REPETITION_PENALTY,
    REPETITION_WINDOW,
    TEMPERATURE,
    TEMPERATURE_LAST,
    integer,
    single,
)

INFINITY = tl.constexpr(float("inf"))
LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def raw_logits(batch, row, ids):
    is_valid = (ids >= 0) & (ids < batch.vocab_size)
    return tl.load(batch.logits + row * batch.row_stride + ids, mask=is_valid, other=-INFINITY).to(tl.float32)


@triton.jit
def edited(x, batch, row, ids, is_lifted, EDITS: tl.constexpr):
    """Return raw logits after steps 2 to 4.

    `is_lifted`: the minimum length would leave nothing, so it is not enforced.
    """
    if EDITS == 2:
        x = _masked(x, batch.allowed + row * batch.allowed_stride, batch, ids)
    if EDITS > 0:
        mask_index = integer(batch, row, MASK_INDEX)
        if mask_index >= 0:
            x = _masked(x, batch.masks + mask_index * batch.num_words, batch, ids)
        for i in range(integer(batch, row, BIAS_START), integer(batch, row, BIAS_STOP)):
            bias = tl.load(batch.biases + i)
            biased = tl.where(bias == -INFINITY, -INFINITY, finite(x, (x.to(tl.float64) + bias).to(tl.float32)))
            x = tl.where(ids == tl.load(batch.bias_ids + i), biased, x)
        if bans_ends(batch, row, EDITS) & (is_lifted == 0):
            for i in range(integer(batch, row, END_START), integer(batch, row, END_STOP)):
                x = tl.where(ids == tl.load(batch.end_ids + i), -INFINITY, x)
        slot = integer(batch, row, HISTORY_SLOT)
        if slot >= 0:
            x = _penalised(x, batch, row, slot, ids)
    return x


@triton.jit
def bans_ends(batch, row, EDITS: tl.constexpr):
    if EDITS > 0:
        is_short = tl.load(batch.positions + row) < integer(batch, row, FIRST_FREE_POSITION)
        return is_short & (integer(batch, row, END_START) < integer(batch, row, END_STOP))
    else:  # noqa: RET505 - a constant condition: only one of the two is compiled
        return tl.full((), 0, tl.int1)


@triton.jit
def _masked(x, words, batch, ids):
    is_valid = (ids >= 0) & (ids < batch.vocab_size)
    word = tl.load(words + ids // 32, mask=is_valid, other=0)
    return tl.where(((word >> (ids % 32)) & 1) != 0, x, -INFINITY)


@triton.jit
def _penalised(x, batch, row, slot, ids):
    is_valid = (ids >= 0) & (ids < batch.vocab_size)
    at = slot * batch.vocab_size + ids
    last = tl.load(batch.last + at, mask=is_valid, other=0)
    counts = tl.load(batch.counts + at, mask=is_valid, other=0)
    length, num_drafts = tl.load(batch.lengths + slot), integer(batch, row, NUM_DRAFTS)
    for i in range(num_drafts):  # right, or the line does not count
        is_drafted = ids == tl.load(batch.drafts + row - num_drafts + i)
        last = tl.where(is_drafted, (length + i + 1).to(tl.int32), last)
        counts += is_drafted.to(tl.int32)

    penalty = single(batch, row, REPETITION_PENALTY)
    if penalty != 1.0:
        start = length + num_drafts - integer(batch, row, REPETITION_WINDOW)
        penalised = finite(x, tl.where(x > 0, tl.div_rn(x, penalty), x * penalty))
        x = tl.where((last > 0) & (last > start), penalised, x)
    penalty = single(batch, row, FREQUENCY_PENALTY)
    if penalty != 0:
        x = tl.where(counts > 0, finite(x, x - penalty * counts.to(tl.float32)), x)
    penalty = single(batch, row, PRESENCE_PENALTY)
    if penalty != 0:
        x = tl.where(counts > 0, finite(x, x - penalty), x)
    return x


@triton.jit
def finite(before, after):
    """Return `after`, limited to the largest finite number if `before` is finite. Otherwise return `before`."""
    return tl.where(tl.abs(before) < INFINITY, tl.minimum(tl.maximum(after, -LARGEST), LARGEST), before)


@triton.jit
def tempered(x, divisor, shift):
    return finite(x, tl.div_rn(x - shift, divisor))


@triton.jit
def shift_of(largest, divisor):
    """Return the number to subtract first: the row's largest logit if dividing it would overflow, else 0."""
    overflows = (tl.abs(tl.div_rn(largest, divisor)) == INFINITY) & (tl.abs(largest) < INFINITY)
    return tl.where(overflows, largest, 0.0)


@triton.jit
def divisors_of(batch, row):
    """Return the divisors of the logits before the filters and after them."""
    temperature, is_last = single(batch, row, TEMPERATURE), integer(batch, row, TEMPERATURE_LAST) != 0
    return tl.where(is_last, 1.0, temperature), tl.where(is_last, temperature, 1.0)
