"""Products with the keys and values of a chunk of 256 slots: scores of queries, and sums of softmax weights × values.

A chunk may span pages, so it is computed run by run: a run is contiguous in memory. Blocks are read as they are cached,
or widened once for many queries.
"""

from typing import Any

from numba import njit

from infer.compute.backends.cpu.attention.cache_slots import end_of_run, make_block_at
from infer.compute.backends.cpu.attention.cached_forms import KEYS, VALUES, Form, make_widen
from infer.compute.backends.cpu.attention.tiles import make_add_value_run, make_float_value, make_score_run
from infer.compute.backends.cpu.layouts import LANES
from infer.compute.backends.cpu.records import CHUNK, WIDE_BYTES
from infer.compute.backends.cpu.simd import load_scalar_f32, store_scalar_f32


def make_widen_chunk(kv_type: str) -> Any:
    """Return widen(args, row, kv, chunk, parts, to), which widens the blocks of a chunk's `parts`.

    It reads the blocks of kv head `kv` in the cache. It writes keys from `to` on, and values `WIDE_BYTES` × dim bytes
    later. Each block goes to its place in the chunk, so blocks outside the parts are left out.
    """
    wide, block_at = f"wide {kv_type}", make_block_at(kv_type)
    widen_keys, widen_values = make_widen(KEYS[kv_type], of_keys=True), make_widen(VALUES[kv_type], of_keys=False)
    key_bytes, value_bytes = KEYS[wide].dim_bytes, VALUES[wide].dim_bytes

    @njit
    def widen_chunk(args, row, kv, chunk, parts, to):
        start, (gap, first, end), dim = chunk * CHUNK, parts, args.dim
        at = 0 if gap > 0 else first
        while at < end:
            run = end_of_run(args, start + at, start + (gap if at < gap else end)) - start
            keys, values = block_at(args, row, kv, start + at)
            block, count = at // LANES, (run - at) // LANES
            widen_keys(keys, dim, count, to + block * dim * key_bytes)
            widen_values(values, dim, count, to + WIDE_BYTES * dim + block * dim * value_bytes)
            at = first if run == gap else run

    return widen_chunk


def make_chunk_scores(kv_type: str, is_wide: bool) -> Any:
    """Return scores(columns, args, kv, chunk, parts, wide, out, after), which stores the scores of a chunk's `parts`.

    It reads the queries, f32 [column, dim], and keys in the cache, or widened ones at `wide`. It writes f32 [column,
    256] at `out`. Slots that a query does not see get a score, too: `_mask_and_maximum` masks them. If sinks have
    queries of their own, those are used for the part [0, gap). Wide: the keys at `after`, a (row, kv head, slot), are
    prefetched meanwhile. Otherwise the next keys are prefetched, then the chunk's values.
    """
    form, block_at = KEYS[f"wide {kv_type}" if is_wide else kv_type], make_block_at(kv_type)
    score_run, key_bytes = make_score_run(form, KEYS[kv_type] if is_wide else None), form.dim_bytes

    @njit
    def chunk_scores(columns, args, kv, chunk, parts, wide, out, after):
        start, (gap, first, end), dim = chunk * CHUNK, parts, args.dim
        at = 0 if gap > 0 else first
        while at < end:
            run = gap if at < gap else end
            if is_wide:
                keys = wide + at // LANES * dim * key_bytes
                asked, _ = block_at(args, after[0], after[1], after[2])
            else:
                run = end_of_run(args, start + at, start + run) - start
                keys, _ = block_at(args, columns.row, kv, start + at)
                following = first if run == gap else run
                asked, _ = block_at(args, columns.row, kv, start + min(following, end - 1))
                if following >= end:
                    _, asked = block_at(args, columns.row, kv, start + (0 if gap > 0 else first))
            q = columns.queries + args.sink_queries_at if at < gap else columns.queries
            score_run(columns.num, q, dim, keys, (run - at) // LANES, out + 4 * at, asked)
            at = first if run == gap else run

    return chunk_scores


def make_add_chunk_values(kv_type: str, is_wide: bool) -> Any:
    """Return add(columns, args, kv, chunk, parts, seen, p, wide, out, stride, after): Σ p × value of a chunk.

    It reads the weights `p`, f32 or bf16 with 256 × 4 bytes per column, and values in the cache, or widened ones at
    `wide`. It adds to `out`, f32 [column, dim], with `stride` bytes from column to column. Only slots in [0, sinks) and
    below high count, `seen` being (sinks, high). The additions over positions are one chain. Meanwhile it prefetches
    the keys at `after`, a (row, kv head, slot), or its values if blocks are wide.
    """
    form, block_at = VALUES[f"wide {kv_type}" if is_wide else kv_type], make_block_at(kv_type)
    add_value_run = make_add_value_run(form, VALUES[kv_type] if is_wide else None)
    value_bytes, weight_bytes, add_rest = form.dim_bytes, 4 // form.depth, _make_add_rest(form)

    @njit
    def add_chunk_values(columns, args, kv, chunk, parts, seen, p, wide, out, stride, after):
        start, (gap, first, _), (sinks, high), dim = chunk * CHUNK, parts, seen, args.dim
        near = sinks if gap < first else min(gap, high)  # a window may begin among the sinks' blocks
        at = 0 if gap > 0 else first
        while at < high or at < gap:
            run = near if at < gap else high
            if is_wide:
                values = wide + WIDE_BYTES * dim + at // LANES * dim * value_bytes
                _, following = block_at(args, after[0], after[1], after[2])
            else:
                run = end_of_run(args, start + at, start + run) - start
                _, values = block_at(args, columns.row, kv, start + at)
                if run < high:
                    _, following = block_at(args, columns.row, kv, start + max(run, first))
                else:
                    following, _ = block_at(args, after[0], after[1], after[2])
            add_value_run(columns.num, p + weight_bytes * at, dim, values, run - at, out, stride, following)
            if dim % LANES != 0:
                add_rest(columns.num, p + 4 * at, dim, values, run - at, out, stride)
            at = first if gap > 0 and run == near else run

    return add_chunk_values


def _make_add_rest(form: Form) -> Any:
    """Return add(num_columns, p, dim, values, num_positions, out, stride), for the dims after the last whole vector.

    Forms of codes have no such dims.
    """
    float_value = make_float_value(form)

    @njit
    def add_rest(num_columns, p, dim, values, num_positions, out, stride):
        for column in range(num_columns):
            for i in range(dim // LANES * LANES, dim):
                to = out + column * stride + 4 * i
                total = load_scalar_f32(to)
                for position in range(num_positions):
                    weight = load_scalar_f32(p + 4 * CHUNK * column + 4 * position)
                    total += weight * float_value(values, position * dim + i)
                store_scalar_f32(to, total)

    return add_rest
