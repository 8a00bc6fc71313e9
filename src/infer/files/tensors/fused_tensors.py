"""Fused tensors, which contain several of our tensors stacked by rows: q, k and v; gate and up. They are split here.

`stacked_experts` splits the stacks of experts, and `fused_delta_nets` the projections of Qwen3-Next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from infer.compute.quantization.ggml_types import BLOCK_TYPES
from infer.files.tensors.fused_delta_nets import each_projection, gathered_rows, is_fused, row_ranges
from infer.files.tensors.stacked_experts import PLAIN, StackOrder, each_expert, is_stack
from infer.files.tensors.tensor_info import TensorInfo

FUSED = {  # our names of matrices that contain several, and of their parts in a layer
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.experts.gate_up_proj": ("mlp.experts.gate_proj", "mlp.experts.up_proj"),
    "linear_attn.ba_proj": ("linear_attn.b_proj", "linear_attn.a_proj"),
}

_Q = ".self_attn.q_proj"


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
        if name.endswith("taps") and len(info.shape) == 3 and info.shape[1] == 1:  # one input channel each
            found[name] = replace(info, shape=(info.shape[0], info.shape[2]))
            continue
        if is_stack(module):
            found |= each_expert(info, module, kind, order)
            continue
        if is_fused(module):
            found |= each_projection(info, module, config)
            continue
        fused = next((end for end in FUSED if module.endswith(f".{end}")), None)
        if fused is None:
            found[name] = info
            continue
        shares = _shares(config, 2 if has_gates_in_q else 1) if fused == "self_attn.qkv_proj" else (1, 1)
        for part, rows in zip(FUSED[fused], _rows(info, shares), strict=True):
            found[f"{module.removesuffix(fused)}{part}.{kind}"] = rows_between(info, *rows)
    return _without_gates_in_q(found, config) if has_gates_in_q else found


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
    q, gate = row_ranges(heads, [info.shape[0] // (2 * heads)] * 2)
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
