"""Attention over pages: bits do not depend on the order of pages, and a token sees only its first and its last slots.

All other memory has values that are not finite.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from infer.compute import ops
from infer.compute.backends.cpu.threads.pool import set_num_threads
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.step import Step
from infer.compute.operands.weights import Heads, RopeTable
from infer.compute.quantization.kv_formats import key_block_bytes, num_blocks, value_block_bytes
from infer.compute.quantization.kv_layout import LayerCache, Pages
from steps import join

NUM_HEADS, KV_HEADS, DIM = 6, 2, 32
CAPACITY = 1000
ANGLES = torch.arange(1100)[:, None] / 50.0 ** torch.linspace(0, 1, DIM // 2)
SINKS = torch.linspace(-6, 6, NUM_HEADS)  # below and above the scores
ROPE = RopeTable(ANGLES.cos()[None], ANGLES.sin()[None])
GATES = (NUM_HEADS + 2 * KV_HEADS) * DIM  # the gates' first column
HEADS = Heads(NUM_HEADS, KV_HEADS, DIM, DIM**-0.5, ROPE, None, None, sinks=SINKS, gate_start=GATES)

# Numbers of a row's tokens in its steps: one, a few, and more than a chunk.
SIZES = [300, 1, 3, 1, 200, 4, 1, 90, 1, 5, 1]
LENGTH = sum(SIZES)
ONE_BY_ONE = [1] * 40 + [240] + [1] * 30 + [LENGTH - 310]


def make_layer(
    page_tokens: int = 64, *, seed: int | None = None, sinks: int = 0, window: int = 0, shift: int = 0
) -> LayerCache:
    """Return one row with ordered or unordered pages. All memory around them is another row's, and not finite.

    A window of −n stands for chunks of n.
    """
    num_pages = -(-CAPACITY // page_tokens)
    order = torch.arange(num_pages)
    if seed is not None:
        order = torch.randperm(2 * num_pages, generator=torch.manual_seed(seed))[:num_pages]
    columns = (torch.tensor([value]) for value in (shift, sinks, window, 0))
    pages = Pages(page_tokens, order[None].contiguous(), *columns)
    shape = (KV_HEADS, 2 * num_pages, num_blocks(page_tokens))
    keys, values = (
        torch.full((*shape, size("f32", DIM) // 4), torch.nan).view(torch.uint8)
        for size in (key_block_bytes, value_block_bytes)
    )
    return LayerCache("f32", keys, values, pages)


def make_qkv(count: int, start: int) -> Tensor:
    rows = torch.randn(LENGTH, GATES + NUM_HEADS * DIM, generator=torch.manual_seed(7))
    return rows[start : start + count].clone()


def attend_all(layer: LayerCache, sizes: Sequence[int] = SIZES, *, shift: int = 0) -> Tensor:
    out, start = [], 0
    for size in sizes:
        out.append(
            ops.attend(Activations(make_qkv(size, start)), HEADS, layer, Step.of([1] * size, start + shift)).floats
        )
        start += size
    return torch.cat(out)


def expected(sinks: int, window: int, shift: int = 0) -> Tensor:
    """Return the float64 softmax over the tokens that are kept, times the output gates."""
    counts = NUM_HEADS, KV_HEADS, KV_HEADS, NUM_HEADS
    q, k, v, gates = make_qkv(LENGTH, 0).double().view(LENGTH, -1, DIM).split(counts, dim=1)
    cos, sin = (angles[shift : shift + LENGTH, None] for angles in (ANGLES.cos(), ANGLES.sin()))

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


@pytest.mark.parametrize("page_tokens", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("seed", [None, 1])
def test_bits_depend_on_no_page(dense: Tensor, page_tokens: int, seed: int | None) -> None:
    assert torch.isfinite(dense).all()
    assert torch.equal(attend_all(make_layer(page_tokens, seed=seed)), dense)


def test_full_attention_equals_torch(dense: Tensor) -> None:
    assert (dense - expected(0, 0)).abs().max() < 5e-6


KEPT = [(0, 1), (0, 40), (4, 20), (4, 300), (16, 16), (20, 12), (30, 3), (100, 60), (260, 10), (300, 300), (600, 1)]
CHUNKS = [(0, -1), (0, -16), (0, -23), (0, -100), (0, -256), (0, -300), (0, -1000)]


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
    page_tokens = 16
    layer = make_layer(page_tokens, seed=5, sinks=sinks, window=window)
    clean, found = attend_all(layer), []
    start = 0
    layer = make_layer(page_tokens, seed=5, sinks=sinks, window=window)
    for size in SIZES:
        found.append(ops.attend(Activations(make_qkv(size, start)), HEADS, layer, Step.of([1] * size, start)).floats)
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


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_few_tokens_of_several_rows_are_shared_out_and_change_no_bit(num_threads: int) -> None:
    """Rows have 1 to 16 tokens in a step, at a chunk's beginning, across its end and far behind it."""
    kept = ((0, 0), (20, 70), (4, 300), (0, -40))
    layer = make_layer(64)
    table = torch.arange(len(kept) * layer.pages.table.shape[1]).view(len(kept), -1)
    sinks, windows = (torch.tensor(values) for values in zip(*kept, strict=True))
    none = torch.zeros(len(kept), dtype=torch.int64)
    pages = Pages(64, table, none, sinks, windows, none)
    layer = LayerCache("f32", *(blocks.repeat(1, 2, 1, 1) for blocks in (layer.keys, layer.values)), pages)
    alone = [attend_all(make_layer(64, sinks=sink, window=window), [LENGTH]) for sink, window in kept]
    before = ops.backend_of(torch.device("cpu")).num_threads()
    set_num_threads(num_threads)
    try:
        for starts, counts in (((0, 250, 255, 400), (7, 3, 5, 1)), ((7, 253, 260, 401), (1, 13, 1, 1)), ((8,), (16,))):
            for row, start in enumerate(starts):
                if start > 8:
                    ops.attend(Activations(make_qkv(start, 0)), HEADS, layer, Step.of([1] * start, row=row))
            parts = [
                Step.of([1] * count, start, row=row)
                for row, (start, count) in enumerate(zip(starts, counts, strict=True))
            ]
            qkv = torch.cat([make_qkv(count, start) for start, count in zip(starts, counts, strict=True)])
            found = ops.attend(Activations(qkv), HEADS, layer, join(parts)).floats.split(counts)
            for row, (start, each) in enumerate(zip(starts, found, strict=True)):
                assert torch.equal(each, alone[row][start : start + len(each)])
    finally:
        set_num_threads(before)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_many_rows_and_a_prompt_among_them_change_no_bit(num_threads: int) -> None:
    """Blocks are widened only for the queries of the prompt, and threads take parts of a row."""
    starts = [400, *range(0, 380, 20)]
    counts = [150, *[1 + index % 3 for index in range(19)]]
    single = make_layer(64)
    table = torch.arange(len(starts) * single.pages.table.shape[1]).view(len(starts), -1)
    none = torch.zeros(len(starts), dtype=torch.int64)
    pages = Pages(64, table, none, none, none, none)
    blocks = (blocks.repeat(1, len(starts) // 2, 1, 1) for blocks in (single.keys, single.values))
    layer = LayerCache("f32", *blocks, pages)
    alone = attend_all(make_layer(64), [1] * 380 + [LENGTH - 380])
    before = ops.backend_of(torch.device("cpu")).num_threads()
    set_num_threads(num_threads)
    try:
        for row, start in enumerate(starts):
            if start:
                ops.attend(Activations(make_qkv(start, 0)), HEADS, layer, Step.of([1] * start, row=row))
        chunks = list(zip(starts, counts, strict=True))
        step = join([Step.of([1] * count, start, row=row) for row, (start, count) in enumerate(chunks)])
        qkv = torch.cat([make_qkv(count, start) for start, count in chunks])
        found = ops.attend(Activations(qkv), HEADS, layer, step).floats.split(counts)
    finally:
        set_num_threads(before)
    for start, each in zip(starts, found, strict=True):
        assert torch.equal(each, alone[start : start + len(each)])
