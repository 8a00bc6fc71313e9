"""Fused tensors, which contain several of our tensors stacked by rows: q, k and v; gate and up. They are split here.

`stacked_experts` splits the stacks of experts. The fused projections of gated delta nets are grouped by key heads:

    qkvz_proj   per key head: q, k, v of its value heads, z of its value heads
    ba_proj     per key head: b of its value heads, a of its value heads
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from infer.files.tensors.stacked_experts import PLAIN, StackOrder, each_expert, is_stack
from infer.files.tensors.tensor_info import TensorInfo

FUSED = {  # our names of matrices that contain several, and of their parts in a layer
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.shared_expert.gate_up_proj": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "mlp.experts.gate_up_proj": ("mlp.experts.gate_proj", "mlp.experts.up_proj"),
    "linear_attn.ba_proj": ("linear_attn.b_proj", "linear_attn.a_proj"),
}
_Q, _OF_HEADS = ".self_attn.q_proj", "query_key_value"
_QKVZ, _BA = ".linear_attn.qkvz_proj", ".linear_attn.ba_proj"
_NUM_AXES = {  # of tensors that some files store with an axis of length one more or less, by the ends of their names
    ".mlp.shared_gate.weight": 2,
    ".mlp.router.correction": 1,
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
        if is_stack(module):
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
