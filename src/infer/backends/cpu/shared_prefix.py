"""Rows of a step that begin with the same pages, as after a common system prompt: which, and for how many chunks.

Their queries go through these chunks together, so that keys and values are read once for all (cascade attention). A
query's partial of a chunk has the same bits whatever queries are its neighbours, so nothing depends on it.
"""

from numba import njit

from infer.backends.cpu.records import CHUNK, MOST_COLUMNS
from infer.backends.cpu.shares import is_for_many, run_at


@njit
def _whole_chunks(args, row, slot):
    """How many chunks there are before the one of the slot, if a token sees all of them."""
    return 0 if args.windows[row] != 0 else slot // CHUNK


@njit
def _common_chunks(args, row, other, most):
    """How many of their first chunks, of `most`, two rows have in the same pages."""
    left, right, page = args.table + args.table_stride * row, args.table + args.table_stride * other, 0
    while page << args.page_bits < most * CHUNK and left[page] == right[page]:
        page += 1
    return min(most, (page << args.page_bits) // CHUNK)


@njit
def prefix_at(args, state, token):
    """(the token after, how many chunks): of the run that begins here and those after it that have as many of their
    first chunks in common, as long as their queries fit; of a run alone, and of many queries, 0 chunks."""
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
