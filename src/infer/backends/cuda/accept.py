"""Kernel after the sampler in a step that verifies drafts: it counts how many of each row's lines are valid.

A program of one warp handles one row, so that no thread reads too early what another writes.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["capacity", "vocab_size"])
def accept_rows(
    sampled, drafts, starts, counts, token_ids,
    history_slots, seen, last, occurrences, lengths, capacity, vocab_size,
    LINES: tl.constexpr, HAS_HISTORY: tl.constexpr,
):  # fmt: skip
    """Count the valid lines of each row, and append their tokens to the history.

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
        slot = tl.load(history_slots + row)
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
