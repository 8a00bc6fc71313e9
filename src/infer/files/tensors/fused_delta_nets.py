"""Fused projections of Qwen3-Next's gated delta nets, whose rows are grouped by key heads. They are split here.

qkvz_proj   per key head: q, k, v of its value heads, z of its value heads
ba_proj     per key head: b of its value heads, a of its value heads
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from infer.files.tensors.tensor_info import TensorInfo

_QKVZ, _BA = ".linear_attn.qkvz_proj", ".linear_attn.ba_proj"


def is_fused(module: str) -> bool:
    """Return True if a tensor of this name, without its ending, is a fused projection."""
    return module.endswith((_QKVZ, _BA))


def each_projection(info: TensorInfo, module: str, config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Return the projections in a fused projection, by our names, as ranges of its rows.

    Raises ModelFormatError if the fused projection does not have their rows.
    """
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    counts = [config.get(f"linear_{name}") for name in names]
    sizes = [count for count in counts if isinstance(count, int) and count > 0]
    if len(sizes) < len(names):
        return {f"{module}.weight": info}  # the family reports the fault of the config
    num_groups, num_value_heads, key_dim, value_dim = sizes
    shared = num_value_heads // num_groups
    parts = (shared, shared) if module.endswith(_BA) else (key_dim, key_dim, shared * value_dim, shared * value_dim)
    total = num_groups * sum(parts)
    if len(info.shape) != 2 or not total or info.shape[0] != total:
        info.fail(f"expected {total} rows for {num_groups} key heads, got the shape {info.shape}")
    ranges = row_ranges(num_groups, parts)
    at = module.removesuffix(_QKVZ).removesuffix(_BA) + ".linear_attn."
    if module.endswith(_BA):
        return {
            f"{at}b_proj.weight": gathered_rows(info, ranges[0]),
            f"{at}a_proj.weight": gathered_rows(info, ranges[1]),
        }
    q, k, v, z = ranges
    return {f"{at}qkv_proj.weight": gathered_rows(info, q + k + v), f"{at}z_proj.weight": gathered_rows(info, z)}


def row_ranges(num_groups: int, parts: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return the ranges of rows of each part, in the order of the groups. `parts` are the parts' rows in a group."""
    starts = [group * sum(parts) for group in range(num_groups)]
    ends = list(pairwise(accumulate(parts, initial=0)))
    return [[(start + first, start + end) for start in starts] for first, end in ends]


def gathered_rows(info: TensorInfo, ranges: list[tuple[int, int]]) -> TensorInfo:
    """Return a tensor with these ranges of another tensor's rows."""
    num_rows = sum(end - first for first, end in ranges)
    num_bytes = num_rows * (info.num_bytes // info.shape[0])
    return replace(info, shape=(num_rows, *info.shape[1:]), num_bytes=num_bytes, row_ranges=tuple(ranges))
