"""Fused tensors, which contain several of our tensors stacked by rows: q, k and v; gate and up. They are split here.

`stacked_experts` splits the stacks of experts. The fused projections of gated delta nets are grouped by key heads:

    qkvz_proj   per key head: q, k, v of its value heads, z of its value heads
    ba_proj     per key head: b of its value heads, a of its value heads
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from infer.compute.quantization.ggml_types import BLOCK_TYPES
from infer.files.tensors.stacked_experts import PLAIN, StackOrder, each_expert, is_stack
from infer.files.tensors.tensor_info import TensorInfo

FUSED = {  # our names of matrices that contain several, and of their parts in a layer
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.shared_expert.gate_up_proj": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "mlp.experts.gate_up_proj": ("mlp.experts.gate_proj", "mlp.experts.up_proj"),
    "linear_attn.ba_proj": ("linear_attn.b_proj", "linear_attn.a_proj"),
}
_Q = ".self_attn.q_proj"
_QKVZ, _BA = ".linear_attn.qkvz_proj", ".linear_attn.ba_proj"


def taken_apart(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], order: StackOrder = PLAIN, *, has_gates_in_q: bool
) -> dict[str, TensorInfo]:
    """Return the tensors with fused ones split.

    `order` is the order of stacks of experts. If `has_gates_in_q`, the projection of q has gates of attention, too.
    Raises ModelFormatError if the rows cannot be divided.
    """
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        module, _, kind = name.rpartition(".")
        if name.endswith(".mlp.shared_gate.weight") and len(info.shape) == 1:  # llama.cpp drops axes of 1
            found[name] = replace(info, shape=(1, *info.shape))
            continue
        if name.endswith(".mlp.router.correction") and len(info.shape) == 2 and info.shape[0] == 1:  # ERNIE 4.5
            found[name] = replace(info, shape=info.shape[1:])
            continue
        if name.endswith("taps") and len(info.shape) == 3 and info.shape[1] == 1:  # one input channel each
            found[name] = replace(info, shape=(info.shape[0], info.shape[2]))
            continue
        if is_stack(module):
            found |= each_expert(info, module, kind, order)
            continue
        if _is_grouped(module):
            found |= _each_projection(info, module, config)
            continue
        if module.endswith(".self_attn.query_key_value"):  # each head has its rows of q, k and v
            found |= _each_of_heads(info, module, kind, config)
            continue
        fused = next((end for end in FUSED if module.endswith(f".{end}")), None)
        if fused is None:
            found[name] = info
            continue
        shares = _shares(config, 2 if has_gates_in_q else 1) if fused == "self_attn.qkv_proj" else (1, 1)
        for part, rows in zip(FUSED[fused], _rows(info, shares), strict=True):
            found[f"{module.removesuffix(fused)}{part}.{kind}"] = rows_between(info, *rows)
    return _without_gates_in_q(found, config) if has_gates_in_q else found


def _each_of_heads(info: TensorInfo, module: str, kind: str, config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Return the projections of q, k and v, whose rows alternate per head."""
    heads = config.get("num_attention_heads")
    if not isinstance(heads, int) or heads < 1 or not info.shape or info.shape[0] % (3 * heads):
        info.fail(f"expected rows of q, k and v for each of {heads!r:.60} heads, got the shape {info.shape}")
    at, ranges = module.removesuffix("query_key_value"), _row_ranges(heads, [info.shape[0] // (3 * heads)] * 3)
    return {f"{at}{which}_proj.{kind}": gathered_rows(info, rows) for which, rows in zip("qkv", ranges, strict=True)}


def _without_gates_in_q(tensors: dict[str, TensorInfo], config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Return the tensors, with the gates of attention separated from q."""
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        module, _, kind = name.rpartition(".")
        found |= _q_and_gate(info, module, kind, config) if module.endswith(_Q) else {name: info}
    return found


def _q_and_gate(info: TensorInfo, module: str, kind: str, config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Return the projections of q and of the gates, whose rows alternate per head."""
    heads = config.get("num_attention_heads")
    if not isinstance(heads, int) or heads < 1:
        return {f"{module}.{kind}": info}  # the family reports the fault of the config
    if not info.shape or not info.shape[0] or info.shape[0] % (2 * heads):
        info.fail(f"expected rows of q and a gate for each of {heads} heads, got the shape {info.shape}")
    q, gate = _row_ranges(heads, [info.shape[0] // (2 * heads)] * 2)
    return {
        f"{module}.{kind}": gathered_rows(info, q),
        f"{module.removesuffix(_Q)}.self_attn.gate_proj.{kind}": gathered_rows(info, gate),
    }


def _shares(config: Mapping[str, Any], rows_of_q: int) -> tuple[int, int, int]:
    """Return the numbers of heads of q, k and v, which divide the rows. Gates double the rows of q."""
    heads = config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or heads < 1 or kv_heads < 1:
        return (1, 1, 1)  # the family reports the fault of the config
    return (heads * rows_of_q, kv_heads, kv_heads)


def _rows(info: TensorInfo, shares: Sequence[int]) -> list[tuple[int, int]]:
    total = info.shape[0] if info.shape else 0
    if not total or total % sum(shares):
        info.fail(f"expected rows for {sum(shares)} equal parts, got the shape {info.shape}")
    ends = [total // sum(shares) * end for end in accumulate(shares, initial=0)]
    return list(pairwise(ends))


def rows_between(info: TensorInfo, first: int, end: int) -> TensorInfo:
    """Return a tensor with some rows of another tensor."""
    if info.packed is not None:
        return gathered_rows(info, [(first, end)])
    kind, columns = BLOCK_TYPES[info.type], info.shape[1:]
    row_bytes = kind.row_bytes(columns[-1]) * prod(columns[:-1]) if columns else kind.block_bytes
    shape, num_bytes = (end - first, *columns), (end - first) * row_bytes
    return replace(info, shape=shape, offset=info.offset + first * row_bytes, num_bytes=num_bytes)


def _is_grouped(module: str) -> bool:
    """Return True if a tensor of this name, without its ending, is a projection grouped by key heads."""
    return module.endswith((_QKVZ, _BA))


def _each_projection(info: TensorInfo, module: str, config: Mapping[str, Any]) -> dict[str, TensorInfo]:
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
    ranges = _row_ranges(num_groups, parts)
    at = module.removesuffix(_QKVZ).removesuffix(_BA) + ".linear_attn."
    if module.endswith(_BA):
        return {
            f"{at}b_proj.weight": gathered_rows(info, ranges[0]),
            f"{at}a_proj.weight": gathered_rows(info, ranges[1]),
        }
    q, k, v, z = ranges
    return {f"{at}qkv_proj.weight": gathered_rows(info, q + k + v), f"{at}z_proj.weight": gathered_rows(info, z)}


def _row_ranges(num_groups: int, parts: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return the ranges of rows of each part, in the order of the groups. `parts` are the parts' rows in a group."""
    starts = [group * sum(parts) for group in range(num_groups)]
    ends = list(pairwise(accumulate(parts, initial=0)))
    return [[(start + first, start + end) for start in starts] for first, end in ends]


def gathered_rows(info: TensorInfo, ranges: list[tuple[int, int]]) -> TensorInfo:
    """Return a tensor with these ranges of another tensor's rows."""
    num_rows = sum(end - first for first, end in ranges)
    num_bytes = num_rows * (info.num_bytes // info.shape[0])
    return replace(info, shape=(num_rows, *info.shape[1:]), num_bytes=num_bytes, row_ranges=tuple(ranges))
