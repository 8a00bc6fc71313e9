"""Attention over pages: bits do not depend on the order of pages, and a token sees only its first and its last slots.

All other memory has values that are not finite. `unseen_values` has the claim about values beyond their type's range.
Pages with which several rows begin are read once, and no bit changes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import layer_caches
from extent import slow_except
from infer.compute import ops
from infer.compute.backends import reference
from infer.compute.backends.cpu import operations as cpu
from infer.compute.backends.cpu.attention.attention import prefix_at
from infer.compute.backends.cpu.compile.addresses import compiled_address
from infer.compute.backends.cpu.records import ATTEND, CHUNK
from infer.compute.backends.cpu.simd import store_i64
from infer.compute.backends.cpu.thread_records import STATE
from infer.compute.backends.cpu.threads.dispatch_table import NO_BARRIER, Command, DispatchTable
from infer.compute.backends.cpu.threads.pool import aligned, thread_pool
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.step import Step
from infer.compute.operands.weights import Heads
from infer.compute.quantization.kv_formats import KV_TYPES
from infer.compute.quantization.kv_layout import LayerCache, decode_keys, decode_values, encode_keys, encode_values
from layer_caches import attend_in_steps, threads
from steps import join
from unseen_values import Span, check_unseen

NUM_HEADS, KV_HEADS, DIM = 6, 2, 32
CAPACITY = 1000
SINKS = torch.linspace(-6, 6, NUM_HEADS)  # below and above the scores
GATES = (NUM_HEADS + 2 * KV_HEADS) * DIM  # the gates' first column
HEADS = replace(layer_caches.make_heads(NUM_HEADS, KV_HEADS, DIM), sinks=SINKS, gate_start=GATES)

# Numbers of a row's tokens in its steps: one, a few, and more than a chunk.
SIZES = [300, 1, 3, 1, 200, 4, 1, 90, 1, 5, 1]
LENGTH = sum(SIZES)
ONE_BY_ONE = [1] * 40 + [240] + [1] * 30 + [LENGTH - 310]
QKV = torch.randn(LENGTH, GATES + NUM_HEADS * DIM, generator=torch.manual_seed(7))


def make_layer(
    page_tokens: int = 64, *, seed: int | None = None, sinks: int = 0, window: int = 0, shift: int = 0
) -> LayerCache:
    """Return a row with ordered or unordered pages. All memory around them is another row's, and not finite.

    A window of −n stands for chunks of n.
    """
    layer = layer_caches.make_layer(HEADS, 2, CAPACITY, window=window, fill=0xFF, page_tokens=page_tokens)
    table = layer.pages.table
    if seed is not None:
        table = torch.randperm(table.numel(), generator=torch.manual_seed(seed)).view(table.shape)
    columns = {"sinks": torch.full((2,), sinks), "shifts": torch.full((2,), shift)}
    return replace(layer, pages=replace(layer.pages, table=table, **columns))


def attend_all(layer: LayerCache, sizes: Sequence[int] = SIZES, *, shift: int = 0, row: int = 0) -> Tensor:
    return attend_in_steps(HEADS, layer, QKV, sizes, start=shift, row=row)


def expected(sinks: int, window: int, shift: int = 0) -> Tensor:
    """Return the float64 softmax over the tokens that are kept, times the output gates."""
    assert HEADS.rope is not None
    counts = NUM_HEADS, KV_HEADS, KV_HEADS, NUM_HEADS
    q, k, v, gates = QKV.double().view(LENGTH, -1, DIM).split(counts, dim=1)
    cos, sin = (table[0, shift : shift + LENGTH, None] for table in (HEADS.rope.cos, HEADS.rope.sin))

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    k, v = (x.repeat_interleave(NUM_HEADS // KV_HEADS, dim=1) for x in (rotate(k), v))
    slot, own = torch.arange(LENGTH), torch.arange(LENGTH)[:, None]
    near = own // -window == slot // -window if window < 0 else slot > own - (window or LENGTH)
    seen = (slot <= own) & ((slot < sinks) | near)
    scores = torch.einsum("thd,shd->hts", rotate(q), k).mul(DIM**-0.5).masked_fill(~seen, -torch.inf)
    scores = torch.cat([scores, SINKS.double().view(-1, 1, 1).expand(-1, LENGTH, 1)], dim=-1)
    attended = torch.einsum("hts,shd->thd", scores.softmax(-1)[..., :-1], v)
    return (attended / (1 + (-gates).exp())).flatten(1)


@pytest.fixture(scope="module")
def dense() -> Tensor:
    return attend_all(make_layer(256))


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize(("page_tokens", "seed"), [(16, 1), (32, None), (64, 1), (128, None), (256, 1)])
def test_bits_depend_on_no_page(dense: Tensor, page_tokens: int, seed: int | None) -> None:
    assert torch.isfinite(dense).all()
    assert torch.equal(attend_all(make_layer(page_tokens, seed=seed)), dense)


def test_full_attention_equals_torch(dense: Tensor) -> None:
    assert (dense - expected(0, 0)).abs().max() < 5e-6


KEPT = [(0, 1), (0, 40), (4, 20), (4, 300), (16, 16), (20, 12), (100, 60), (260, 10), (600, 1)]
CHUNKS = [(0, -1), (0, -16), (0, -23), (0, -256), (0, -300), (0, -1000)]


@pytest.mark.slow(cases=4)
@pytest.mark.parametrize(("sinks", "window"), [*KEPT, *CHUNKS])
def test_only_kept_tokens_are_attended_to(sinks: int, window: int) -> None:
    wanted = expected(sinks, window)
    layer = make_layer(16, seed=2, sinks=sinks, window=window)
    found = attend_all(layer)
    assert (found - wanted).abs().max() < 5e-6
    assert torch.equal(attend_all(make_layer(64, seed=3, sinks=sinks, window=window), ONE_BY_ONE), found)
    with ops.using("reference"):
        reference = attend_all(make_layer(16, seed=2, sinks=sinks, window=window))
    assert (reference - wanted).abs().max() < 5e-6


def test_kept_tokens_as_many_as_there_are_change_no_bit(dense: Tensor) -> None:
    for sinks, window in ((0, LENGTH), (4, LENGTH - 4), (LENGTH, 1), (0, -LENGTH)):
        assert torch.equal(attend_all(make_layer(sinks=sinks, window=window)), dense)


@pytest.mark.parametrize(("sinks", "window"), [(20, 70), (0, -70)])
def test_the_pages_of_evicted_tokens_may_belong_to_another_row(sinks: int, window: int) -> None:
    page_tokens, start, found = 16, 0, []
    clean = attend_all(make_layer(page_tokens, seed=5, sinks=sinks, window=window))
    layer = make_layer(page_tokens, seed=5, sinks=sinks, window=window)
    for size in SIZES:
        found.append(attend_in_steps(HEADS, layer, QKV[start:], [size], start=start))
        start += size
        first_seen = start - start % -window if window < 0 else start + 1 - window
        lost = range(-(-sinks // page_tokens), first_seen // page_tokens)
        for page in layer.pages.table[0, list(lost)].tolist():
            layer.keys[:, page].view(torch.float32).fill_(torch.nan)
            layer.values[:, page].view(torch.float32).fill_(torch.nan)
    assert torch.equal(torch.cat(found), clean)


def test_a_shift_moves_slots_and_not_positions() -> None:
    shift = 90
    for name in ("cpu", "reference"):
        with ops.using(name):
            found = attend_all(make_layer(64, seed=4, shift=shift), shift=shift)
        assert (found - expected(0, 0, shift)).abs().max() < 5e-6


def check_step(layer: LayerCache, chunks: Sequence[tuple[int, int]], alone: Sequence[Tensor]) -> None:
    """Check that rows have the bits in one step that they have alone. Each chunk has a start and a number of tokens."""
    for row, (start, _) in enumerate(chunks):
        if start:
            attend_all(layer, [start], row=row)
    step = join([Step.of([1] * count, start, row=row) for row, (start, count) in enumerate(chunks)])
    qkv = torch.cat([QKV[start : start + count] for start, count in chunks])
    found = ops.attend(Activations(qkv), HEADS, layer, step).floats.split([count for _, count in chunks])
    for (start, count), own, each in zip(chunks, alone, found, strict=True):
        assert torch.equal(each, own[start : start + count])


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_few_tokens_of_several_rows_are_shared_out_and_change_no_bit(num_threads: int) -> None:
    """Rows have 1 to 16 tokens in a step, at a chunk's beginning, across its end and far behind it."""
    kept = ((0, 0), (20, 70), (4, 300), (0, -40))
    layer = layer_caches.make_layer(HEADS, len(kept), CAPACITY, fill=0xFF)
    sinks, windows = (torch.tensor(values) for values in zip(*kept, strict=True))
    layer = replace(layer, pages=replace(layer.pages, sinks=sinks, windows=windows))
    alone = [attend_all(make_layer(64, sinks=sink, window=window), [LENGTH]) for sink, window in kept]
    with threads(num_threads):
        check_step(layer, [(0, 7), (250, 3), (255, 5), (400, 1)], alone)
        check_step(layer, [(7, 1), (253, 13), (260, 1), (401, 1)], alone)
        check_step(layer, [(8, 16)], alone[:1])


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("num_threads", [1, 5])
def test_many_rows_and_a_prompt_among_them_change_no_bit(num_threads: int) -> None:
    """Blocks are widened only for the queries of the prompt, and threads take parts of a row."""
    chunks = [(400, 150), *((20 * index, 1 + index % 3) for index in range(19))]
    layer = layer_caches.make_layer(HEADS, len(chunks), CAPACITY, fill=0xFF)
    alone = attend_all(make_layer(64), [1] * 380 + [LENGTH - 380])
    with threads(num_threads):
        check_step(layer, chunks, [alone] * len(chunks))


SPANS = {
    "all": (Span(274, 259), [[274], [250, *[1] * 24], [250, 4, 20], [256, 3, 15], [259, 15]]),
    "window": (Span(60, 37, window=9, sinks=2), [[60], [1] * 60, [30, 8, 4, 18]]),
}


@pytest.mark.parametrize(
    ("kv_type", "dim"), slow_except([("f32", 32), ("f16", 20)], [*((kv_type, 32) for kv_type in KV_TYPES), ("f16", 20)])
)
@pytest.mark.parametrize("name", SPANS)
def test_a_wrong_position_changes_no_token_that_does_not_see_it(name: str, kv_type: str, dim: int) -> None:
    check_unseen(cpu.attend, kv_type, dim, *SPANS[name])


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_the_definition_shows_no_token_a_value_that_it_does_not_see(kv_type: str) -> None:
    for span in (Span(20, 9), Span(20, 9, window=4)):
        check_unseen(reference.attend, kv_type, 32, span, [[20]])


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_numbers_are_stored_as_the_largest_of_their_type(kv_type: str) -> None:
    for number in (65_504.0, 65_519.0, 65_520.0, 1e5, 1e30):
        x = torch.full((1, 32), number)
        x[0, ::2] = -number
        for encode, decode in ((encode_keys, decode_keys), (encode_values, decode_values)):
            found = decode(encode(x, kv_type), kv_type)
            assert found.isfinite().all()
            if number <= 65_504:
                assert torch.allclose(found, x, rtol=4e-3)
        if kv_type == "f16":
            assert torch.equal(decode_values(encode_values(x, "f16"), "f16"), x.clamp(-65_504, 65_504))


def test_a_chunk_whose_keys_are_all_wrong_is_not_left_out() -> None:
    heads = Heads(2, 1, 32, 32**-0.5, None, None, None)
    qkv = torch.randn(300, 4, 32)
    qkv[:256, 2, 3] = math.nan
    for sizes in ([300], [256, 44]):
        assert attend_in_steps(heads, layer_caches.make_layer(heads, 1, 300), qkv, sizes).isnan().all()


# Rows that begin with the same pages


PAGE, PAGES_PER_ROW = 64, 17
SHARING_HEADS = layer_caches.make_heads(NUM_HEADS, KV_HEADS, DIM)
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
OWN_CONTENTS = {10: (8, 0), 11: (9, 5), 12: (9, 5)}  # seed, and pages in common with the other rows of this seed


def make_sharing_layer(kv_type: str) -> LayerCache:
    layer = layer_caches.make_layer(SHARING_HEADS, len(ROWS), PAGES_PER_ROW * PAGE, kv_type)
    for row, (num_shared, *_, window) in enumerate(ROWS):
        layer.pages.table[row, :num_shared] = layer.pages.table[row - 1, :num_shared]
        layer.pages.windows[row] = window
    return layer


def make_shared_qkv(row: int, start: int, count: int) -> Tensor:
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
    layer = make_sharing_layer(kv_type)
    heads = replace(SHARING_HEADS, sinks=torch.linspace(-6, 6, NUM_HEADS)) if kv_type == "f16" else SHARING_HEADS
    heads = heads if kv_type == "f32" else replace(heads, gate_start=GATES)
    for row in rows:
        start = ROWS[row][1]
        attend_in_steps(heads, layer, make_shared_qkv(row, 0, start), [256] * (start // 256) + [start % 256], row=row)
    chunks = [(row, *ROWS[row][1:3]) for row in rows]
    qkvs = [make_shared_qkv(*chunk) for chunk in chunks]
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
    args, state, pages = np.zeros(1, ATTEND), aligned(1, STATE), make_sharing_layer("f32").pages
    step = join([Step.of([1] * ROWS[row][2], ROWS[row][1], row=row) for row in rows])
    found = np.zeros((len(step.rows), 2), np.int64)
    args["num_heads"], args["num_kv_heads"], args["fewest_for_many"] = NUM_HEADS, KV_HEADS, 40
    args["table"], args["table_stride"], args["page_bits"] = pages.table.data_ptr(), PAGES_PER_ROW, 6
    args["shifts"], args["windows"] = pages.shifts.data_ptr(), pages.windows.data_ptr()
    args["out"] = found.ctypes.data
    state["rows"], state["positions"] = step.rows.data_ptr(), step.positions.data_ptr()
    state["num_tokens"] = len(step.rows)
    address = compiled_address("test_paged_attention:make_keep_prefixes", ATTEND)
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
