"""The tensors of a cache: the pages of each layer, and the tables by which kernels find them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int64
from torch import Tensor

from infer import ops
from infer.architecture import Layer
from infer.kvcache.page_rows import GroupRows
from infer.quantization.kv_formats import BLOCK_POSITIONS, key_block_bytes, value_block_bytes
from infer.quantization.kv_layout import LayerCache, Pages

_NAN = 0xFF  # in each byte: NaN of every float type, and codes whose scales are


def copy_array(array: npt.NDArray[np.int64], tensor: Int64[Tensor, "*shape"]) -> None:
    """On the host without torch, which takes long for so little."""
    if tensor.device.type == "cpu":
        tensor.numpy()[...] = array
    else:
        tensor.copy_(torch.from_numpy(array))


def pages_of(rows: GroupRows, device: torch.device) -> Pages:
    arrays = (rows.table.table, rows.shifts, rows.sinks, rows.windows)
    table, shifts, sinks, windows = (torch.tensor(array, device=device) for array in arrays)
    return Pages(rows.table.page_tokens, table, shifts, sinks, windows, rows.group.furthest)


def make_layers(
    layers: Sequence[Layer], groups: Sequence[GroupRows], pages: Sequence[Pages], kv_type: str, device: torch.device
) -> list[LayerCache]:
    made, backend = dict[int, LayerCache](), ops.backend_of(device)
    for rows, own in zip(groups, pages, strict=True):
        num_blocks = rows.table.pool.num_pages * rows.table.page_tokens // BLOCK_POSITIONS
        for index in rows.group.layers:
            shape, dim = (layers[index].num_kv_heads, num_blocks), layers[index].head_dim
            keys = backend.zeros((*shape, key_block_bytes(kv_type, dim)), torch.uint8)
            values = backend.zeros((*shape, value_block_bytes(kv_type, dim)), torch.uint8)
            made[index] = LayerCache(kv_type, keys, values, own)
    return [made[index] for index in range(len(layers))]


def poison_page(layers: Sequence[LayerCache], page_tokens: int, page: int) -> None:
    """Fill a page of these layers with NaN: whoever reads what was not written since gets it."""
    per_page = page_tokens // BLOCK_POSITIONS
    blocks = slice(page * per_page, (page + 1) * per_page)
    for layer in layers:
        layer.keys[:, blocks] = _NAN
        layer.values[:, blocks] = _NAN
