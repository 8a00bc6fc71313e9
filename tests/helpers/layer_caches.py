"""The cache of one layer for tests of kernels: the pages of each row follow each other, and so do the rows."""

import torch

from infer.compute.operands.weights import Heads
from infer.compute.quantization.kv_formats import BLOCK_POSITIONS, key_block_bytes, value_block_bytes
from infer.compute.quantization.kv_layout import LayerCache, Pages

PAGE_TOKENS = 64


def make_layer(
    heads: Heads, rows: int, capacity: int, kv_type: str = "f32", *, window: int | None = None, fill: int = 0
) -> LayerCache:
    """Return the cache of a layer. Each of its bytes is `fill`."""
    per_row = -(-capacity // PAGE_TOKENS)
    none = torch.zeros(rows, dtype=torch.int64)
    table = torch.arange(rows * per_row).view(rows, per_row)
    pages = Pages(PAGE_TOKENS, table, none, none.clone(), torch.full_like(none, window or 0), none.clone())
    shape = heads.num_kv_heads, rows * per_row, PAGE_TOKENS // BLOCK_POSITIONS
    sizes = key_block_bytes(kv_type, heads.head_dim), value_block_bytes(kv_type, heads.head_dim)
    keys, values = (torch.full((*shape, size), fill, dtype=torch.uint8) for size in sizes)
    return LayerCache(kv_type, keys, values, pages)
