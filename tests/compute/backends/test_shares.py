"""Ranks that share a model have the bits of one process. Threads simulate ranks, and each op is tested separately."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from threading import Barrier

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from extent import IS_WHOLE, slow_except
from infer.compute import ops
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.operands.group import Group
from infer.compute.operands.mixers import Attention
from infer.compute.operands.step import Step
from infer.engine.runner.runner import make_cache
from infer.models.sharding import head_starts, kv_heads_of, part_ranges, row_starts
from infer.models.transformer import Transformer
from steps import join, load_network
from tiny import GATED, LAGUNA, MINISTRAL3, ONE_EACH, TINY, Tiny, make_tiny

LENGTH = 40
CHUNKS = (25, 1, 1, 13)
# Models with each op that gathers: heads, norms after parts, experts, a state, per-layer inputs, gates.
GATHERING = [
    tiny for tiny in TINY if tiny.name in ("gemma3", "olmo2", "qwen2_moe", "qwen3_next", "gemma4_per_layer", "laguna")
]


class ThreadGroup(Group):
    """Ranks as threads of this process."""

    def __init__(self, rank: int, parts: list[Tensor | None], barrier: Barrier) -> None:
        super().__init__(rank, len(parts))
        self._parts, self._barrier = parts, barrier

    def gather(self, own: Tensor, widths: Sequence[int]) -> Tensor:
        assert own.shape[1] == widths[self.rank]
        self._parts[self.rank] = own
        self._barrier.wait(600)
        whole = torch.cat([part for part in self._parts if part is not None], dim=1)
        self._barrier.wait(600)
        return whole


def in_ranks(size: int, run: Callable[[Group], Tensor]) -> list[Tensor]:
    """Return the result of each rank."""
    parts, barrier = [None] * size, Barrier(size)

    def call(rank: int) -> Tensor:
        try:
            return run(ThreadGroup(rank, parts, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(call, range(size)))


def load(folder: Path, group: Group | None = None, weights: str = "auto") -> Transformer:
    return load_network(folder, keep_floats_as=weights, group=group)


def logits_of(model: Transformer, settings: CacheSettings | None = None) -> Tensor:
    """Return the logits of two rows, chunk after chunk."""
    ids = torch.randint(3, 96, (2, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
    cache, found, start = make_cache(model, LENGTH, 2, step_tokens=LENGTH, settings=settings), [], 0
    with torch.inference_mode():
        for count in CHUNKS:
            for row in range(2):
                cache.reserve(row, count)
            steps = [Step.of(ids[row][start : start + count], start, row=row) for row in range(2)]
            found.append(model.forward(join(steps), cache).clone())
            for row in range(2):
                cache.commit(row, count)
            start += count
    return torch.cat(found)


def check_ranks(folder: Path, sizes: Sequence[int], weights: str = "auto", kv_type: str = "auto") -> None:
    """Check that these numbers of ranks have the logits of one."""
    settings = CacheSettings(kv_type=kv_type)
    expected = logits_of(load(folder, weights=weights), settings)
    for size in sizes:
        for logits in in_ranks(size, lambda group: logits_of(load(folder, group, weights), settings)):
            assert torch.equal(logits, expected)


@pytest.mark.slow(cases=3, rest=8)
@pytest.mark.parametrize("tiny", TINY if IS_WHOLE else ONE_EACH, ids=lambda tiny: tiny.name)
def test_ranks_give_the_bits_of_one(tiny: Tiny, tmp_path: Path) -> None:
    """Two ranks of each family are tried as processes (`test_tensor_parallel`)."""
    make_tiny(tiny, tmp_path)
    check_ranks(tmp_path, [2, 3, 4] if IS_WHOLE else [3 + ONE_EACH.index(tiny) % 2])


def test_a_rank_with_more_heads_computes_no_more_rows(tmp_path: Path) -> None:
    """One of three ranks has two of four heads."""
    make_tiny(next(tiny for tiny in ONE_EACH if tiny.name == "llama"), tmp_path)

    def sizes(group: Group) -> Tensor:
        mixer = load(tmp_path, group).layers[0].mixer
        assert mixer is not None
        return torch.tensor([mixer.heads.num_heads, mixer.qkv.out_features])

    heads, rows = torch.stack(in_ranks(3, sizes)).T.tolist()
    assert sorted(heads) == [1, 1, 2]
    assert max(rows) - min(rows) <= 16


@pytest.mark.slow
@pytest.mark.parametrize("tiny", TINY if IS_WHOLE else GATHERING, ids=lambda tiny: tiny.name)
def test_the_definition_of_ops_gathers_alike(tiny: Tiny, tmp_path: Path) -> None:
    """Bits may differ, because the order of torch's sums depends on the number of rows."""
    make_tiny(tiny, tmp_path)

    def run(group: Group | None = None) -> Tensor:
        with ops.using("reference"):
            return logits_of(load(tmp_path, group))

    expected = run()
    for logits in in_ranks(3, run):
        torch.testing.assert_close(logits, expected, atol=2e-3, rtol=2e-3)


_SIZES = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 1}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64}
TYPED = Tiny("typed", LlamaConfig(**_SIZES, **_HEADS))
TYPES = [("auto", "auto"), ("auto", "bf16"), ("bf16", "q8"), ("q8", "f16"), ("q4", "q4"), ("auto", "q8"), ("q8", "q4")]
QUICK = [(tiny, "auto", "auto") for tiny in (TYPED, GATED[0], LAGUNA[0], MINISTRAL3[0])]
OTHERS = [(tiny, *types) for tiny in (TYPED, GATED[0]) for types in TYPES[1:]]


@pytest.mark.parametrize(
    ("tiny", "weights", "kv_type"), slow_except(QUICK, QUICK + OTHERS), ids=lambda value: getattr(value, "name", value)
)
def test_ranks_have_the_bits_of_one_with_every_type(tiny: Tiny, weights: str, kv_type: str, tmp_path: Path) -> None:
    """Two ranks have whole heads of keys; three ranks compute equal numbers of rows, and gather them."""
    make_tiny(tiny, tmp_path)
    check_ranks(tmp_path, [2, 3], weights, kv_type)


def layer(num_heads: int, num_kv_heads: int) -> Attention:
    return Attention(num_heads, num_kv_heads, 64, rope=None, scale=1.0)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(32, 8), (14, 2), (9, 3), (4, 1), (5, 5), (64, 8)])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_each_head_is_one_ranks_and_ranks_have_whole_groups(num_heads: int, num_kv_heads: int, size: int) -> None:
    starts = head_starts(layer(num_heads, num_kv_heads), size)
    if starts is None:
        assert size > num_heads or size > num_kv_heads
        return
    assert (starts[0], starts[-1], len(starts)) == (0, num_heads, size + 1)
    for heads in pairwise(starts):
        first, end = kv_heads_of(layer(num_heads, num_kv_heads), heads)
        count = heads[1] - heads[0]
        assert count > 0
        assert end - first == 1 or count == (end - first) * num_heads // num_kv_heads


def test_rows_are_shared_out_in_whole_tiles_where_there_are_enough() -> None:
    assert (row_starts(576, 2), row_starts(96, 4)) == ((0, 288, 576), (0, 16, 48, 64, 96))
    assert (row_starts(224, 4, are_blocks=True), row_starts(50, 4)) == ((0, 32, 96, 160, 224), (0, 12, 25, 37, 50))


def test_a_range_of_rows_may_end_within_a_matrix() -> None:
    assert part_ranges((64, 32, 32), (0, 80)) == [(0, 64), (0, 16), (0, 0)]
    assert part_ranges((64, 32, 32), (80, 128)) == [(64, 64), (16, 32), (0, 32)]
