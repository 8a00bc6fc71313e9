"""Claims about the items of attention: in every step, each chunk that a tile sees is in one item."""

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from infer.compute.operands.weights import Heads
from infer.compute.quantization.kv_layout import Pages
from layer_caches import make_layer

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from infer.compute.backends.cuda.attention_items import (
    FIELDS,
    first_turn_of,
    num_seen_chunks,
    plan_items,
    seen_turns,
    turn_of,
)
from infer.compute.backends.cuda.kv_blocks import make_blocks

pytestmark = pytest.mark.usefixtures("quick_interpreter")
HEADS = Heads(4, 1, 32, 1.0, None, None, None)
TILE = tl.constexpr(4)


@triton.jit
def plan(fields, rows, positions, num_tokens, capacity, num_slots, cache, splits: tl.constexpr):
    plan_items(fields, rows, positions, num_tokens, capacity, num_slots, cache, splits, TILE)


@triton.jit
def list_turns(ends, turns, first_slot, last_slot, sinks, window):
    """Store the list of visible turns, and the end of each chunk's turns in it."""
    seen = seen_turns(first_slot, last_slot, sinks, window)
    count = num_seen_chunks(seen)
    for chunk in range(count):
        tl.store(ends + chunk, first_turn_of(seen, chunk + 1))
    for visible in range(first_turn_of(seen, count)):
        tl.store(turns + visible, turn_of(seen, visible))


@pytest.mark.parametrize("seed", range(12))
def test_chunks_have_the_turns_that_somebody_sees(seed: int) -> None:
    choice = random.Random(seed)
    first = choice.randrange(0, 1500)
    last = first + choice.randrange(0, 16)
    window, sinks = choice.choice([0, 1, 40, 64, 300, 700]), choice.choice([0, 4, 70, 256, 300, 2000])
    ends, turns = torch.full((32,), -1), torch.full((64,), -1)
    list_turns[(1,)](ends, turns, first, last, sinks, window)
    found, starts = [x for x in turns.tolist() if x >= 0], [0, *(x for x in ends.tolist() if x >= 0)]
    seen = {(own, slot) for own in (first, last) for slot in range(own + 1)}
    visible = {slot // 64 for own, slot in seen if window == 0 or slot < sinks or slot > own - window}
    assert found == sorted(set(found))
    assert visible <= set(found) <= set(range(last // 64 + 1))
    assert starts[-1] == len(found)
    chunks = [{turn // 4 for turn in found[start:end]} for start, end in pairwise(starts)]
    assert all(len(each) == 1 for each in chunks)
    assert len(chunks) == len(set.union(*chunks))


def planned(rows: Tensor, positions: Tensor, pages: Pages, splits: int, slots: int, capacity: int) -> list[list[int]]:
    layer = make_layer(HEADS, len(pages.windows), 16)
    blocks = make_blocks(layer)._replace(shifts=pages.shifts, sinks=pages.sinks, windows=pages.windows)
    fields = torch.full((capacity, FIELDS.value), -7, dtype=torch.int32)
    plan[(1,)](fields, rows, positions, len(rows), capacity, slots, blocks, splits=splits)
    return fields.tolist()


@pytest.mark.parametrize(("slots", "splits"), [(512, 64), (200, 64), (0, 8), (512, 1)])
def test_items_of_a_tile_are_its_chunks_and_fit_their_buffers(slots: int, splits: int) -> None:
    """Rows decode after contexts of all lengths, prompts begin, and there is padding."""
    generator = random.Random(slots + splits)
    rows, positions = list[int](), list[int]()
    for row in range(24):
        count = generator.choice([1, 1, 1, 3, 200])
        start = generator.randrange(0, 20_000 if count == 1 else 500)
        rows += [row] * count
        positions += range(start, start + count)
    rows += [-1] * 30
    positions += [0] * 30
    windows = torch.tensor([generator.choice([0, 0, 500]) for _ in range(24)])
    pages = Pages(64, torch.zeros(24, 1, dtype=torch.int64), windows * 0, windows * 0 + 4, windows, windows * 0)
    capacity = len(rows) + splits
    items = planned(torch.tensor(rows), torch.tensor(positions), pages, splits, slots, capacity)
    used = [item for item in items if item[0] >= 0]
    assert all(item[0] == -1 for item in items[len(used) :])
    tiles = dict[int, list[list[int]]]()
    for item in used:
        tiles.setdefault(item[0], []).append(item)
    places = zip(rows, [-1, *rows[:-1]], positions, strict=True)
    begins = [row < 0 or row != last or at % TILE.value == 0 for row, last, at in places]
    assert list(tiles) == [token for token, is_first in enumerate(begins) if is_first]
    taken = set[int]()
    for token, parts in tiles.items():
        assert {part[4] for part in parts} == {len(parts)}
        assert [part[1] for part in parts] == [0, *(part[2] for part in parts[:-1])]
        if rows[token] >= 0 and windows[rows[token]] == 0:
            assert parts[-1][2] == positions[token] // 256 + 1
        assert (len(parts) > 1) == (parts[0][3] >= 0)
        if len(parts) > 1:
            own = set(range(parts[0][3], parts[0][3] + parts[-1][2]))
            assert not own & taken
            assert max(own) < slots
            taken |= own
    assert bool(taken) == (slots > 0 and splits > 1)
