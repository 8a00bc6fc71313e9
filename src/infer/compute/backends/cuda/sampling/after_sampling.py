"""Kernels after the sampler: `advance_rows` in a multi-step, and `accept_rows` in a step that verifies drafts.

`take_tokens` prepares a step that was launched before the tokens of the step before were known.

`control`, which `advance_rows` reads and writes, is a header, a flag for each row that met a stop id, and the stop ids.
The header has the number of rows, so that one recording serves any number of rows up to its size. `advance_rows` takes
ROWS of them at a time.
One warp handles a row, or all rows, so that no thread reads too early what another writes.
"""

import triton
import triton.language as tl

from infer.compute.backends import device_steps
from infer.compute.backends.cuda.sampling.kernel_arguments import HISTORY_SLOT, NUM_FIELDS

NUM_GENERATED = tl.constexpr(device_steps.NUM_GENERATED)
IS_STOPPED = tl.constexpr(device_steps.IS_STOPPED)
NUM_STOP_IDS = tl.constexpr(device_steps.NUM_STOP_IDS)
NUM_ROWS = tl.constexpr(3)
HEADER = tl.constexpr(4)


@triton.jit(do_not_specialize=["max_rows", "capacity", "vocab_size"])
def advance_rows(
    sampled, tokens, positions, control, generated, max_rows,
    fields, seen, last, counts, lengths, capacity, vocab_size,
    ROWS: tl.constexpr, HAS_HISTORY: tl.constexpr,
):  # fmt: skip
    """Append a step's tokens to `generated` [steps, rows] and prepare the next step.

    No more steps count when every row has met a stop id or any row failed.
    """
    if tl.load(control + IS_STOPPED) == 0:
        num_rows, step = tl.load(control + NUM_ROWS), tl.load(control + NUM_GENERATED)
        num_failed, num_active = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
        for start in range(0, num_rows, ROWS):
            rows = start + tl.arange(0, ROWS)
            is_row = rows < num_rows
            token = tl.load(sampled + rows, mask=is_row, other=0)
            tl.store(generated + step * num_rows + rows, token, mask=is_row)
            num_failed += tl.sum((token < 0).to(tl.int32))

            has_ended = tl.load(control + HEADER + rows, mask=is_row, other=1)
            for i in range(tl.load(control + NUM_STOP_IDS)):
                has_ended = tl.where(token == tl.load(control + HEADER + max_rows + i), 1, has_ended)
            tl.store(control + HEADER + rows, has_ended, mask=is_row)
            num_active += tl.sum((has_ended == 0).to(tl.int32))

            if HAS_HISTORY:
                slot = tl.load(fields + rows * NUM_FIELDS + HISTORY_SLOT, mask=is_row, other=-1)
                length = tl.load(lengths + slot, mask=slot >= 0, other=0)
                is_kept = (slot >= 0) & (token >= 0) & (length < capacity)
                at, entry = slot * capacity + length, slot * vocab_size + token
                tl.store(seen + at, token.to(tl.int32), mask=is_kept)
                tl.store(last + entry, (length + 1).to(tl.int32), mask=is_kept)
                tl.store(counts + entry, tl.load(counts + entry, mask=is_kept, other=0) + 1, mask=is_kept)
                tl.store(lengths + slot, length + 1, mask=is_kept)

            tl.store(tokens + rows, tl.maximum(token, 0), mask=is_row)
            tl.store(positions + rows, tl.load(positions + rows, mask=is_row, other=0) + 1, mask=is_row)
        tl.store(control + NUM_GENERATED, step + 1)
        tl.store(control + IS_STOPPED, ((num_failed > 0) | (num_active == 0)).to(tl.int64))


@triton.jit(do_not_specialize=["capacity", "vocab_size"])
def accept_rows(
    sampled, drafts, starts, counts, token_ids,
    fields, seen, last, occurrences, lengths, capacity, vocab_size,
    LINES: tl.constexpr, HAS_HISTORY: tl.constexpr,
):  # fmt: skip
    """Count the valid lines of each row, at most LINES, and append their tokens to the history.

    Row i has the lines starts[i] to starts[i + 1]. Lines count up to and including the first whose token differs from
    its draft, or that failed.
    """
    row = tl.program_id(0).to(tl.int64)
    start, stop = tl.load(starts + row), tl.load(starts + row + 1)
    lines = tl.arange(0, LINES)
    is_line = start + lines < stop
    token = tl.load(sampled + start + lines, mask=is_line, other=-1)
    draft = tl.load(drafts + start + lines, mask=is_line, other=-1)
    is_end = is_line & ((token != draft) | (token < 0))
    count = tl.minimum(tl.min(tl.where(is_end, lines + 1, LINES)), stop - start)
    tl.store(token_ids + start + lines, token, mask=is_line)
    tl.store(counts + row, count)

    if HAS_HISTORY:
        slot = tl.load(fields + row * NUM_FIELDS + HISTORY_SLOT)
        if slot >= 0:
            length = tl.load(lengths + slot)
            is_kept = (lines < count) & (token >= 0) & (length + lines < capacity)
            num_equal, last_equal = tl.zeros((LINES,), tl.int32), lines
            for i in range(count.to(tl.int32)):  # a token may come again
                is_equal = is_kept & (token == tl.load(sampled + start + i))
                num_equal += is_equal.to(tl.int32)
                last_equal = tl.where(is_equal, tl.maximum(last_equal, i), last_equal)
            entry = slot * vocab_size + token
            before = tl.load(occurrences + entry, mask=is_kept, other=0)
            tl.store(seen + slot * capacity + length + lines, token.to(tl.int32), mask=is_kept)
            tl.store(last + entry, (length + last_equal + 1).to(tl.int32), mask=is_kept)
            tl.store(occurrences + entry, before + num_equal, mask=is_kept)
            tl.store(lengths + slot, length + tl.sum(is_kept.to(tl.int64)))


@triton.jit(do_not_specialize=["size"])
def take_tokens(tokens, starts, token_ids, size, BLOCK: tl.constexpr):
    """Replace each id −2 − i by the token that was sampled in the first line of row i, or by 0 if the row failed."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + at, mask=at < size, other=0)
    is_awaited = token < -1
    start = tl.load(starts - 2 - token, mask=is_awaited, other=0)
    sampled = tl.load(token_ids + start, mask=is_awaited, other=0)
    tl.store(tokens + at, tl.maximum(sampled, 0), mask=is_awaited)
