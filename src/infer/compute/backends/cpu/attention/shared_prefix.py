"""Rows of a step that begin with the same pages, as after a common system prompt, and the number of shared chunks.

Their queries process these chunks together, so that keys and values are read once for all (cascade attention). A
query's partial of a chunk has the same bits whatever its neighbours are, so no result depends on it.
"""

from numba import njit

from infer.compute.backends.cpu.attention.partition import is_for_many, run_at
from infer.compute.backends.cpu.records import CHUNK, MOST_COLUMNS


@njit
def _whole_chunks(args, row, slot):
    """Return the number of chunks before that of the slot, if a token sees all of them; else 0."""
    return 0 if args.windows[row] != 0 else slot // CHUNK


@njit
def _common_chunks(args, row, other, most):
    """Return how many of their first `most` chunks two rows have in the same pages."""
    left, right, page = args.table + args.table_stride * row, args.table + args.table_stride * other, 0
    while page << args.page_bits < most * CHUNK and left[page] == right[page]:
        page += 1
    return min(most, (page << args.page_bits) // CHUNK)


@njit
def prefix_at(args, state, token):
    """Return (the token after the shared rows, the number of shared chunks).

    The rows are the run that begins here and the runs after it that share as many first chunks, as long as their
    queries fit. A single run, and one of many queries, shares 0 chunks.
    """
    row, run, slot = run_at(args, state, token, state.num_tokens)
    end, num_chunks, most = token + run, 0, 0 if is_for_many(args, run) else _whole_chunks(args, row, slot)
    last = token + MOST_COLUMNS * args.num_kv_heads // args.num_heads
    while most > 0 and end < state.num_tokens:
        other, run, slot = run_at(args, state, end, state.num_tokens)
        common = _common_chunks(args, row, other, min(most, _whole_chunks(args, other, slot)))
        if common == 0 or common < num_chunks or is_for_many(args, run) or end + run > last:
            break
        end, num_chunks, most = end + run, common, common
    return end, num_chunks
