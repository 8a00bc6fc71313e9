"""Kernel after the sampler in a multi-step: it turns the tokens into the next step's input, and detects the last step.

`control` is a header, a flag for each row that met a stop id, and the stop ids. One warp does everything, so that no
thread reads too early what another writes.
"""

import triton
import triton.language as tl

NUM_GENERATED = tl.constexpr(0)  # steps that count
IS_STOPPED = tl.constexpr(1)
NUM_STOP_IDS = tl.constexpr(2)
HEADER = tl.constexpr(3)


@triton.jit(do_not_specialize=["num_rows", "max_rows", "capacity", "vocab_size"])
def advance_rows(
    sampled, tokens, positions, control, generated, num_rows, max_rows,
    history_slots, seen, last, counts, lengths, capacity, vocab_size,
    ROWS: tl.constexpr, HAS_HISTORY: tl.constexpr,
):  # fmt: skip
    """Append a step's tokens to `generated` [steps, rows] and prepare the next step.

    No more steps count when every row has met a stop id or any row failed.
    """
    if tl.load(control + IS_STOPPED) == 0:
        rows = tl.arange(0, ROWS)
        is_row = rows < num_rows
        token = tl.load(sampled + rows, mask=is_row, other=0)
        step = tl.load(control + NUM_GENERATED)
        tl.store(generated + step * num_rows + rows, token, mask=is_row)
        has_failed = tl.min(token) < 0

        has_ended = tl.load(control + HEADER + rows, mask=is_row, other=1)
        for i in range(tl.load(control + NUM_STOP_IDS)):
            has_ended = tl.where(token == tl.load(control + HEADER + max_rows + i), 1, has_ended)
        tl.store(control + HEADER + rows, has_ended, mask=is_row)

        if HAS_HISTORY:
            slot = tl.load(history_slots + rows, mask=is_row, other=-1)
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
        tl.store(control + IS_STOPPED, (has_failed | (tl.min(has_ended) == 1)).to(tl.int64))
