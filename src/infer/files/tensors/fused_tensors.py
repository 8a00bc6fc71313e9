"""Fused tensors and stacks, split into our tensors by rows: q, k and v; gate and up; the matrices of all experts.

The fused projections of gated delta nets are grouped by key heads:

    qkvz_proj   per key head: q, k, v of its value heads, z of its value heads
    ba_proj     per key head: b of its value heads, a of its value heads

Stacks of experts have these layouts in files. In gpt-oss's folders, rows of gate and up alternate.

    [experts, rows, columns]            in most files; if gate and up are in one tensor, gate's rows come first
    [experts, columns, rows]            gpt-oss and Llama 4 in floats
    codes [experts, rows, blocks, 16],  gpt-oss in MXFP4
    scales [experts, rows, blocks]
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

from infer.compute.operands.feed_forwards import MAX_EXPERTS
from infer.compute.operands.mixers import MAX_HEADS
from infer.compute.quantization.ggml_types import BLOCK_TYPES
from infer.files.tensors.tensor_info import TensorInfo

_STACK = re.compile(r"(model\.layers\.[0-9]+\.mlp\.experts)\.(gate|up|gate_up|down)_proj")
_MXFP4, _CODES_BYTES = BLOCK_TYPES["MXFP4"], 16  # bytes of a block's codes; the scale has one byte more


class StackOrder(NamedTuple):
    are_transposed: bool = False  # True if matrices of floats are transposed
    are_interleaved: bool = False  # True if rows of gate and up alternate


PLAIN = StackOrder()


FUSED = {  # our names of matrices that contain several, and of their parts in a layer
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.shared_expert.gate_up_proj": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "mlp.experts.gate_up_proj": ("mlp.experts.gate_proj", "mlp.experts.up_proj"),
    "linear_attn.ba_proj": ("linear_attn.b_proj", "linear_attn.a_proj"),
}
_Q, _OF_HEADS = ".self_attn.q_proj", "query_key_value"
_QKVZ, _BA = ".linear_attn.qkvz_proj", ".linear_attn.ba_proj"
_NORMS_OF_HEADS = (".self_attn.q_norm", ".self_attn.k_norm")
_NUM_AXES = {  # of tensors that some files store with an axis of length one more or less, by the ends of their names
    ".mlp.shared_gate.weight": 2,
    ".mlp.router.correction": 1,
    ".mlp.act_fn.beta": 1,
    ".mlp.act_fn.eps": 1,
    "taps": 2,
    "model.embed_types.weight": 2,
}


def taken_apart(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], order: StackOrder = PLAIN, *, has_gates_in_q: bool
) -> dict[str, TensorInfo]:
    """Return the tensors with fused ones split, and with the usual number of axes.

    `order` is the order of stacks of experts. If `has_gates_in_q`, the projection of q has gates of attention, too.
    Raises ModelFormatError if the rows cannot be divided.
    """
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        module, _, kind = name.rpartition(".")
        fused = next((end for end in (*FUSED, _OF_HEADS) if module.endswith(f".{end}")), "")
        at = module.removesuffix(fused)
        has_rows = len(info.shape) == 2 and info.shape[0] <= MAX_HEADS
        if kind == "weight" and module.endswith(_NORMS_OF_HEADS) and has_rows:  # a row for each head
            heads = [info.rows(range(head, head + 1)) for head in range(info.shape[0])]
            shape = info.shape[1:]
            found |= {f"{module}.norms.{head}.weight": replace(each, shape=shape) for head, each in enumerate(heads)}
        elif is_stack(module):
            found |= each_expert(info, module, kind, order)
        elif module.endswith((_QKVZ, _BA)):
            found |= _of_key_heads(info, module, config)
        elif fused == _OF_HEADS:  # each head has its rows of q, k and v
            rows = f"rows of q, k and v for each of {config.get('num_attention_heads')!r:.60} heads"
            found |= _parts(info, at, kind, _num_heads(config), [(f"{part}_proj", 1) for part in "qkv"], rows)
        elif fused:
            shares = _shares(config, 2 if has_gates_in_q else 1) if fused == "self_attn.qkv_proj" else (1, 1)
            parts = [*zip(FUSED[fused], shares, strict=True)]
            found |= _parts(info, at, kind, 1, parts, f"rows for {sum(shares)} equal parts")
        else:
            found[name] = _with_usual_axes(info, name)
    return _without_gates_in_q(found, config) if has_gates_in_q else found


def _with_usual_axes(info: TensorInfo, name: str) -> TensorInfo:
    shape = info.shape
    for num_axes in [num_axes for end, num_axes in _NUM_AXES.items() if name.endswith(end)]:
        if len(shape) == num_axes - 1:
            return replace(info, shape=(1, *shape))
        if len(shape) == num_axes + 1 and shape[-2] == 1:
            return replace(info, shape=(*shape[:-2], shape[-1]))
    return info


def _without_gates_in_q(tensors: dict[str, TensorInfo], config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Return the tensors, with the gates of attention separated from q. Their rows alternate per head."""
    found, heads = dict[str, TensorInfo](), _num_heads(config)
    parts, rows = [("q_proj", 1), ("gate_proj", 1)], f"rows of q and a gate for each of {heads} heads"
    for name, info in tensors.items():
        module, _, kind = name.rpartition(".")
        is_q = heads and module.endswith(_Q)
        found |= _parts(info, module.removesuffix("q_proj"), kind, heads, parts, rows) if is_q else {name: info}
    return found


def _num_heads(config: Mapping[str, Any]) -> int:
    """Return the number of heads, or 0 if the config has a fault, which the family reports."""
    heads = config.get("num_attention_heads")
    return max(heads, 0) if isinstance(heads, int) else 0


def _shares(config: Mapping[str, Any], rows_of_q: int) -> tuple[int, int, int]:
    """Return the numbers of heads of q, k and v, which divide the rows. Gates double the rows of q."""
    heads, kv_heads = _num_heads(config), config.get("num_key_value_heads") or config.get("num_attention_heads")
    if not heads or not isinstance(kv_heads, int) or kv_heads < 1:
        return (1, 1, 1)  # the family reports the fault of the config
    return (heads * rows_of_q, kv_heads, kv_heads)


def _of_key_heads(info: TensorInfo, module: str, config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Return the projections in a fused projection that is grouped by key heads."""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    counts = [config.get(f"linear_{name}") for name in names]
    sizes = [count for count in counts if isinstance(count, int) and count > 0]
    if len(sizes) < len(names):
        return {f"{module}.weight": info}  # the family reports the fault of the config
    num_groups, num_value_heads, key_dim, value_dim = sizes
    shared = num_value_heads // num_groups
    parts = [("b_proj", shared), ("a_proj", shared)]
    if module.endswith(_QKVZ):
        values = shared * value_dim
        parts = [("qkv_proj", key_dim), ("qkv_proj", key_dim), ("qkv_proj", values), ("z_proj", values)]
    total = num_groups * sum(size for _, size in parts)
    rows = f"{total} rows for {num_groups} key heads"
    if len(info.shape) != 2 or info.shape[0] != total:
        info.fail(f"expected {rows}, got the shape {info.shape}")
    return _parts(info, module.rpartition(".")[0] + ".", "weight", num_groups, parts, rows)


def _parts(
    info: TensorInfo, at: str, kind: str, num_groups: int, parts: Sequence[tuple[str, int]], rows: str
) -> dict[str, TensorInfo]:
    """Return the parts of a fused tensor by our names, which begin with `at` and end with `kind`.

    The rows are in equal groups. `parts` have the names of the parts of a group, and their shares of its rows. Parts of
    the same name become one tensor. Raises ModelFormatError, which names the expected `rows`, if they do not fit.
    """
    num_rows, num_shares = info.shape[0] if info.shape else 0, num_groups * sum(share for _, share in parts)
    if not num_rows or not num_shares or num_rows % num_shares:
        info.fail(f"expected {rows}, got the shape {info.shape}")
    ends = [num_rows // num_shares * end for end in accumulate((share for _, share in parts), initial=0)]
    ranges = dict[str, list[tuple[int, int]]]()
    for (name, _), (first, end) in zip(parts, pairwise(ends), strict=True):
        starts = range(0, num_rows, ends[-1])
        ranges.setdefault(name, []).extend((start + first, start + end) for start in starts)
    return {
        f"{at}{name}.{kind}": info.rows(range(*of_part[0])) if len(of_part) == 1 else info.gathered(of_part)
        for name, of_part in ranges.items()
    }


def is_stack(module: str) -> bool:
    """Return True if a tensor of this name, without its ending, is a stack."""
    return _STACK.fullmatch(module) is not None


def each_expert(info: TensorInfo, module: str, kind: str, order: StackOrder) -> dict[str, TensorInfo]:
    """Return each expert's part of a stack, by our names. `kind` is weight or bias."""
    match = _STACK.fullmatch(module)
    assert match is not None
    names = ("gate", "up") if match[2] == "gate_up" else (match[2],)
    if len(info.shape) != (2 if kind == "bias" else 3):
        info.fail(f"expected a tensor of experts, rows and columns, got the shape {info.shape}")
    if info.shape[0] > MAX_EXPERTS:
        info.fail(f"expected at most {MAX_EXPERTS} experts, got {info.shape[0]}")
    is_transposed = order.are_transposed and kind == "weight" and info.scales is None
    num_experts, all_rows = info.shape[0], info.shape[2 if is_transposed else 1]
    if all_rows % len(names):
        info.fail(f"expected the same number of rows of gate and up, got the shape {info.shape}")
    size, parts = all_rows // len(names), dict[str, TensorInfo]()
    num_rows, scales = num_experts * info.shape[1], info.scales
    scales = None if scales is None else replace(scales, shape=(num_rows, *scales.shape[2:]))
    stack = replace(info, shape=(num_rows, *info.shape[2:]), scales=scales)  # one matrix, or one vector of biases
    for index, name in enumerate(names):
        rows = range(index, all_rows, len(names)) if order.are_interleaved else range(index * size, (index + 1) * size)
        for expert in range(num_experts):
            first = expert * info.shape[1]
            if is_transposed:
                part = stack.rows(range(first, first + info.shape[1])).transposed.rows(rows)
            else:
                part = stack.rows(range(first + rows.start, first + rows.stop, rows.step))
            if info.factor is not None:
                part = replace(part, factor=info.factor.rows(range(expert, expert + 1)))
            parts[f"{match[1]}.{expert}.{name}_proj.{kind}"] = part
    return parts


def with_joined_scales(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors with MXFP4's codes and scales, which are separate in gpt-oss's folders, as one tensor.

    Raises ModelFormatError if one of the two is missing, or if their shapes disagree.
    """
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind not in ("blocks", "scales") or not is_stack(module):
            found[name] = info
            continue
        codes, scales = tensors.get(f"{module}.blocks"), tensors.get(f"{module}.scales")
        if codes is None or scales is None:
            info.fail(f"expected a tensor of its {'blocks' if codes is None else 'scales'} next to it")
        for each in (codes, scales):
            if each.type != "U8":
                each.fail(f"expected bytes (U8), got {each.type}")
        if f"{module}.weight" in tensors:
            codes.fail(f"is the same weight as {tensors[f'{module}.weight'].name!r:.80}")
        if len(scales.shape) != 3:
            scales.fail(f"expected a tensor of experts, rows and blocks, got the shape {scales.shape}")
        joined = *scales.shape[:2], scales.shape[2] * _CODES_BYTES  # the shape that `transformers` may write
        if codes.shape not in ((*scales.shape, _CODES_BYTES), joined):
            codes.fail(f"expected the shape of its scales {scales.shape} and {_CODES_BYTES}, got {codes.shape}")
        shape = *scales.shape[:2], scales.shape[2] * _MXFP4.block_size
        num_bytes = prod(scales.shape) * _MXFP4.block_bytes
        found[f"{module}.weight"] = replace(codes, type="MXFP4", shape=shape, num_bytes=num_bytes, scales=scales)
    return found
