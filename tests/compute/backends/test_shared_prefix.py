"""Rows that begin with the same pages are found, and reading these pages once changes no bit."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

import layer_caches
from extent import slow_except
from infer.compute import ops
from infer.compute.backends.cpu.attention.shared_prefix import prefix_at
from infer.compute.backends.cpu.compile.addresses import compiled_address
from infer.compute.backends.cpu.records import ATTEND, CHUNK
from infer.compute.backends.cpu.simd import store_i64
from infer.compute.backends.cpu.state import STATE
from infer.compute.backends.cpu.threads.dispatch_table import NO_BARRIER, Command, DispatchTable
from infer.compute.backends.cpu.threads.pool import aligned, thread_pool
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.step import Step
from infer.compute.quantization.kv_layout import LayerCache
from layer_caches import attend_in_steps, threads
from steps import join

NUM_HEADS, KV_HEADS, DIM, PAGE = 6, 2, 32, 64
PAGES_PER_ROW = 17
HEADS = layer_caches.make_heads(NUM_HEADS, KV_HEADS, DIM)
# Per row: pages in common with the row before, tokens before the step, tokens in the step, window.
ROWS = [
    (0, 700, 1, 0),
    (9, 640, 2, 0),
    (8, 512, 1, 0),
    (8, 1060, 3, 0),
    (8, 1000, 1, 300),  # sees no whole chunk
    (8, 900, 1, 0),
    (5, 330, 1, 0),
    (4, 256, 1, 0),
    (4, 260, 60, 0),  # a prompt
    (4, 300, 1, 0),
    (0, 700, 1, 0),  # from here on, rows have different contents in different pages
    (0, 640, 1, 0),
    (5, 700, 2, 0),
]
GATES = (NUM_HEADS + 2 * KV_HEADS) * DIM  # the gates' first column
OWN_CONTENTS = {10: (8, 0), 11: (9, 5), 12: (9, 5)}  # seed, and pages in common with the other rows of this seed


def make_layer(kv_type: str) -> LayerCache:
    layer = layer_caches.make_layer(HEADS, len(ROWS), PAGES_PER_ROW * PAGE, kv_type)
    for row, (num_shared, *_, window) in enumerate(ROWS):
        layer.pages.table[row, :num_shared] = layer.pages.table[row - 1, :num_shared]
        layer.pages.windows[row] = window
    return layer


def make_qkv(row: int, start: int, count: int) -> torch.Tensor:
    """Return qkv with equal values in the pages that two rows have in common."""
    seed, num_common = OWN_CONTENTS.get(row, (7, 9))
    out = torch.randn(PAGES_PER_ROW * PAGE, GATES + NUM_HEADS * DIM, generator=torch.manual_seed(seed))
    own = torch.randn(PAGES_PER_ROW * PAGE, out.shape[1], generator=torch.manual_seed(100 + row))
    out[num_common * PAGE :] = own[num_common * PAGE :]
    return out[start : start + count].clone()


SOME_ROWS: list[Sequence[int]] = [range(len(ROWS)), range(3), (1, 2, 5, 6, 7), (0, 4, 9, 8, 3), (10, 11, 12)]
CASES = [(kv_type, rows) for kv_type in ("f32", "f16", "q8") for rows in SOME_ROWS]


@pytest.mark.parametrize(("kv_type", "rows"), slow_except([("f32", SOME_ROWS[0]), ("f16", SOME_ROWS[-1])], CASES))
def test_rows_that_share_pages_have_the_bits_of_single_rows(kv_type: str, rows: Sequence[int]) -> None:
    layer = make_layer(kv_type)
    heads = replace(HEADS, sinks=torch.linspace(-6, 6, NUM_HEADS)) if kv_type == "f16" else HEADS
    heads = heads if kv_type == "f32" else replace(heads, gate_start=GATES)
    for row in rows:
        start = ROWS[row][1]
        attend_in_steps(heads, layer, make_qkv(row, 0, start), [256] * (start // 256) + [start % 256], row=row)
    chunks = [(row, *ROWS[row][1:3]) for row in rows]
    qkvs = [make_qkv(*chunk) for chunk in chunks]
    alone = [
        attend_in_steps(heads, layer, qkv, [count], row=row, start=start)
        for (row, start, count), qkv in zip(chunks, qkvs, strict=True)
    ]
    step = join([Step.of([1] * count, start, row=row) for row, start, count in chunks])
    for num_threads in (1, 2, 5):
        with threads(num_threads):
            assert torch.equal(ops.attend(Activations(torch.cat(qkvs)), heads, layer, step).floats, torch.cat(alone))


def make_keep_prefixes() -> Callable[..., None]:
    """Return a command that writes each prefix of the step to `out`: the token after it, and its chunks."""

    def keep_prefixes(args, state, thread, num_threads):  # type: ignore[no-untyped-def]
        token, to = 0, args.out
        while token < state.num_tokens:
            token, num_chunks = prefix_at(args, state, token)
            store_i64(to, token)
            store_i64(to + 8, num_chunks)
            to += 16

    return keep_prefixes


def prefixes(rows: list[int]) -> list[tuple[int, int]]:
    args, state, pages = np.zeros(1, ATTEND), aligned(1, STATE), make_layer("f32").pages
    step = join([Step.of([1] * ROWS[row][2], ROWS[row][1], row=row) for row in rows])
    found = np.zeros((len(step.rows), 2), np.int64)
    args["num_heads"], args["num_kv_heads"], args["fewest_for_many"] = NUM_HEADS, KV_HEADS, 40
    args["table"], args["table_stride"], args["page_bits"] = pages.table.data_ptr(), PAGES_PER_ROW, 6
    args["shifts"], args["windows"] = pages.shifts.data_ptr(), pages.windows.data_ptr()
    args["out"] = found.ctypes.data
    state["rows"], state["positions"] = step.rows.data_ptr(), step.positions.data_ptr()
    state["num_tokens"] = len(step.rows)
    address = compiled_address("test_shared_prefix:make_keep_prefixes", ATTEND)
    thread_pool().run(DispatchTable([Command(address, args, NO_BARRIER, "prefixes")]), state, 1)
    return [(token, num_chunks) for token, num_chunks in found.tolist() if token > 0]


def test_neighbours_share_whole_chunks_that_all_of_them_see() -> None:
    assert CHUNK == 4 * PAGE
    assert prefixes([0]) == [(1, 0)]
    assert prefixes([0, 1, 2, 3]) == [(7, 2)]  # 9, 8 and 8 pages are two chunks
    assert prefixes([3, 4, 5]) == [(3, 0), (4, 0), (5, 0)]
    assert prefixes([5, 6, 7, 8, 9]) == [(3, 1), (63, 0), (64, 0)]
    assert prefixes([0, 9]) == [(2, 1)]
    assert prefixes([0, 1, 9]) == [(3, 2), (4, 0)]  # fewer chunks in common than the others have
    assert prefixes([10, 11, 12]) == [(1, 0), (4, 1)]  # no page, then 5 pages: one chunk of the two that each has
