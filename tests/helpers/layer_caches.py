"""The cache of one layer for tests of kernels: the pages of each row follow each other, and so do the rows."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from infer.compute import ops
from infer.compute.backends.cpu.threads.pool import set_num_threads
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.step import Step
from infer.compute.operands.weights import Heads, Norm, RopeTable
from infer.compute.quantization.kv_formats import BLOCK_POSITIONS, key_block_bytes, value_block_bytes
from infer.compute.quantization.kv_layout import LayerCache, Pages

PAGE_TOKENS = 64
Attend = Callable[[Activations, Heads, LayerCache, Step], Any]


def make_layer(
    heads: Heads,
    rows: int,
    capacity: int,
    kv_type: str = "f32",
    *,
    window: int | None = None,
    fill: int = 0,
    page_tokens: int = PAGE_TOKENS,
) -> LayerCache:
    """Return the cache of a layer. Each of its bytes is `fill`."""
    per_row = -(-capacity // page_tokens)
    none = torch.zeros(rows, dtype=torch.int64)
    table = torch.arange(rows * per_row).view(rows, per_row)
    pages = Pages(page_tokens, table, none, none.clone(), torch.full_like(none, window or 0), none.clone())
    shape = heads.num_kv_heads, rows * per_row, page_tokens // BLOCK_POSITIONS
    sizes = key_block_bytes(kv_type, heads.head_dim), value_block_bytes(kv_type, heads.head_dim)
    keys, values = (torch.full((*shape, size), fill, dtype=torch.uint8) for size in sizes)
    return LayerCache(kv_type, keys, values, pages)


def make_heads(num_heads: int, num_kv_heads: int, dim: int, rotated: int = 32, *, is_normed: bool = False) -> Heads:
    """Return heads for 1,100 positions, of which `rotated` elements rotate."""
    angles = torch.arange(1100)[:, None] / 50.0 ** torch.linspace(0, 1, max(rotated // 2, 1))
    rope = RopeTable(angles.cos()[None], angles.sin()[None]) if rotated else None
    norm = Norm(torch.rand(dim) + 0.5, 1e-5) if is_normed else None
    return Heads(num_heads, num_kv_heads, dim, dim**-0.5, rope, norm, norm)


def attend_in_steps(
    heads: Heads,
    layer: LayerCache,
    qkv: Tensor,
    sizes: Sequence[int],
    *,
    row: int = 0,
    start: int = 0,
    attend: Attend = ops.attend,
) -> Tensor:
    """Return the results of a row's tokens from a position on, computed in steps of these sizes."""
    found, first = [], 0
    for size in sizes:
        x = Activations(qkv[first : first + size].flatten(1).clone())
        found.append(attend(x, heads, layer, Step.of([1] * size, start + first, row=row)).floats.clone())
        first += size
    return torch.cat(found)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with this number of threads within the context."""
    before = ops.backend_of(torch.device("cpu")).num_threads()
    set_num_threads(count)
    try:
        yield
    finally:
        set_num_threads(before)
