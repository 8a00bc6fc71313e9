"""Record of a layer for attention's kernels: where its blocks are, its heads, and how they are normalised."""

from typing import Any

import numpy as np
import numpy.typing as npt

from infer.compute.operands.weights import Heads
from infer.compute.quantization.kv_formats import check_kv_type
from infer.compute.quantization.kv_layout import LayerCache

BLOCKS = np.dtype([(name, np.int64) for name in ("first", "page", "head", "block")])
LAYER = np.dtype(
    [("keys", BLOCKS), ("values", BLOCKS), ("far_at", np.int64)]
    + [(name, np.int32) for name in ("heads", "kv_heads", "table_stride", "page_bits", "half_dim")]
    + [(name, np.int32) for name in ("rope_positions", "rope_sets", "last_position", "q_norm_stride", "k_norm_stride")]
    + [(name, np.float32) for name in ("scale", "softcap", "q_eps", "k_eps")],
    align=True,
)


def layer_record(heads: Heads, layer: LayerCache, far_at: int) -> npt.NDArray[Any]:
    check_kv_type(layer.kv_type, heads.head_dim)
    pages, rope, record = layer.pages, heads.rope, np.zeros((), LAYER)
    for name, blocks in (("keys", layer.keys), ("values", layer.values)):
        head, page, size, _ = blocks.stride()
        assert size == blocks.shape[3], "a head's blocks lie one after another"
        record[name] = blocks.storage_offset(), page, head, size
    record["far_at"], record["last_position"] = far_at, pages.last_position or 0
    record["heads"], record["kv_heads"] = heads.num_heads, heads.num_kv_heads
    record["table_stride"], record["page_bits"] = pages.table.shape[1], pages.page_tokens.bit_length() - 1
    record["scale"], record["softcap"] = heads.scale, heads.softcap or 0
    if rope is not None:
        record["rope_sets"], record["rope_positions"], record["half_dim"] = rope.cos.shape
    for name, norm in (("q", heads.q_norm), ("k", heads.k_norm)):
        if norm is not None:
            record[f"{name}_eps"] = norm.eps
            record[f"{name}_norm_stride"] = heads.head_dim if len(norm.weight) > heads.head_dim else 0
    return record
