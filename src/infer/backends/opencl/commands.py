"""Each op as a few launches: kernels, their arguments, and the macros that a weight's layout is to them."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infer.backends.cpu.layouts import BLOCK, LANES
from infer.backends.cpu.packed_weight import PackedWeight
from infer.backends.opencl.launches import Axis, Run
from infer.backends.opencl.memory import storage_of
from infer.errors import InvalidRequestError
from infer.operands.architecture import Activation
from infer.operands.step import Step
from infer.operands.weights import Heads, Norm, Projection, Weight
from infer.quantization.kv_formats import check_kv_type, key_block_bytes, value_block_bytes
from infer.quantization.kv_layout import LayerCache

_TOKENS = (1, 8)  # that a work item takes: few for decoding, many for a prompt
_STORE, _ADD, _CAP = range(3)
LAYER = np.dtype(
    [(name, np.int64) for name in ("keys_at", "key_page", "key_head", "key_block")]
    + [(name, np.int64) for name in ("values_at", "value_page", "value_head", "value_block", "far_at")]
    + [(name, np.int32) for name in ("heads", "kv_heads", "table_stride", "page_bits", "half_dim")]
    + [(name, np.int32) for name in ("rope_positions", "rope_sets", "furthest", "q_norm_stride", "k_norm_stride")]
    + [(name, np.float32) for name in ("scale", "softcap", "q_eps", "k_eps")],
    align=True,
)


def embed(run: Run, table: Weight, tokens: Tensor, scale: float) -> Tensor:
    weight = _packed(table)
    rows, features = weight.shape
    out, records = run.tensor("x", run.capacity, features), weight.layout.num_records(features)
    arguments = [run.constant(weight.data), tokens, out, rows, features, records, float(scale)]
    macros = _macros(weight, lanes=1)
    run.launch("matmul.cl", "embed", -(-features // 4) * LANES, arguments, macros, tokens=(1,))
    return out


def norm_project(run: Run, x: Tensor, norm: Norm | None, projection: Projection) -> Tensor:
    out = run.tensor("projected", run.capacity, projection.out_features)
    _project(run, x, norm, projection, out)
    return out


def head(
    run: Run, x: Tensor, logit_indices: Tensor, norm: Norm, projection: Projection, softcap: float | None
) -> Tensor:
    logits = run.tensor("logits", run.max_logits, projection.out_features)
    epilogue = _STORE if softcap is None else _CAP
    _project(run, x, norm, projection, logits, epilogue, softcap=softcap or 0.0, logit_indices=logit_indices)
    return logits


def project_add(run: Run, residual: Tensor, x: Tensor, projection: Projection, post_norm: Norm | None) -> Tensor:
    if post_norm is None:
        _project(run, x, None, projection, residual, _ADD)
        return residual
    features = projection.out_features
    y = run.tensor("before post norm", run.capacity, features)
    _project(run, x, None, projection, y)
    width = -(-features // LANES)
    run.launch("rows.cl", "add_normalized", width, [residual, y, _vector(run, post_norm), features, post_norm.eps])
    return residual


def norm_gate(run: Run, x: Tensor, norm: Norm | None, gate_up: Projection, activation: Activation) -> Tensor:
    features = gate_up.out_features // 2
    out, macro = run.tensor("hidden", run.capacity, features), {"ACTIVATE": activation}
    parts = _gate_and_up(gate_up) if run.runtime.lanes == LANES else None
    if parts is None:
        both = run.tensor("gate and up", run.capacity, 2 * features)
        _project(run, x, norm, gate_up, both)
        run.launch("rows.cl", "gate_rows", -(-features // LANES), [both, out, features], macro)
        return out
    gate, up, first_up = parts
    records, activations = _activations(run, x, norm, gate, "tokens", None)
    inputs = [run.constant(gate.data), run.constant(up.data), first_up, activations, out, None, 0]
    arguments = [*inputs, run.constant(gate_up.bias), run.counts["tokens"], records, features]
    macros = _macros(gate, LANES) | macro
    launch = run.launch("matmul.cl", "multiply_gate", -(-features // BLOCK), arguments, macros, tokens=_TOKENS)
    if features % BLOCK == 0:
        run.produced(out, launch, index=5)
    return out


def _gate_and_up(gate_up: Projection) -> tuple[PackedWeight, PackedWeight, int] | None:
    """The weights that have gate and up, if the two have one type, and the group that up begins with."""
    weights = [_packed(part) for part in gate_up.parts]
    groups, rest = divmod(gate_up.out_features // 2, LANES)
    if len(weights) == 1 and rest == 0:
        return weights[0], weights[0], groups
    if len(weights) == 2 and weights[0].layout == weights[1].layout and weights[0].shape == weights[1].shape:
        return weights[0], weights[1], 0
    return None


def attend(run: Run, qkv: Tensor, heads: Heads, layer: LayerCache, step: Step) -> Tensor:
    dim, features, pages, rope = heads.head_dim, heads.num_heads * heads.head_dim, layer.pages, heads.rope
    has_far = pages.furthest is not None and rope is not None
    queries = run.tensor("queries", 2 if has_far else 1, run.capacity, features)
    out = run.tensor("attended", run.capacity, features)
    record = _layer(heads, layer, far_at=run.capacity * features if has_far else 0)
    keys, values = storage_of(layer.keys), storage_of(layer.values)
    norms = [_vector(run, norm) for norm in (heads.q_norm, heads.k_norm)]
    angles = (None, None) if rope is None else (run.constant(rope.cos), run.constant(rope.sin))
    macros = {"HEAD_DIM": dim, f"KV_{layer.kv_type}": 1}
    width = heads.num_heads + 2 * heads.num_kv_heads
    where = [pages.table, pages.shifts]
    inputs = [qkv, *norms, *angles, *where, pages.rope_sets, step.rows, step.positions]
    run.launch("attention.cl", "rotate_append", width, [*inputs, queries, keys, values, record], macros)
    inputs = [queries, keys, values, *where, pages.sinks, pages.windows, step.rows, step.positions]
    launch = run.launch("attention.cl", "attend", heads.num_heads, [*inputs, out, None, 0, record], macros)
    if dim % BLOCK == 0:
        run.produced(out, launch, index=10)
    return out


def _layer(heads: Heads, layer: LayerCache, far_at: int) -> npt.NDArray[Any]:
    check_kv_type(layer.kv_type, heads.head_dim)
    keys, values, pages, rope = layer.keys, layer.values, layer.pages, heads.rope
    sizes = key_block_bytes(layer.kv_type, heads.head_dim), value_block_bytes(layer.kv_type, heads.head_dim)
    record = np.zeros((), LAYER)
    for name, blocks, size in (("key", keys, sizes[0]), ("value", values, sizes[1])):
        assert (blocks.shape[3], *blocks.stride()[2:]) == (size, size, 1), "a head's blocks lie one after another"
        record[f"{name}s_at"], record[f"{name}_block"] = blocks.storage_offset(), size
        record[f"{name}_head"], record[f"{name}_page"] = blocks.stride()[:2]
    record["far_at"], record["furthest"] = far_at, pages.furthest or 0
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


def _project(
    run: Run,
    x: Tensor,
    norm: Norm | None,
    projection: Projection,
    out: Tensor,
    epilogue: int = _STORE,
    *,
    softcap: float = 0.0,
    logit_indices: Tensor | None = None,
) -> None:
    """out = project(norm(x)), or out += it, or out = softcap × tanh(it / softcap)."""
    axis: Axis = "tokens" if logit_indices is None else "logits"
    sources: dict[int, tuple[int, Tensor]] = {}
    column = 0
    for part in projection.parts:
        weight = _packed(part)
        form = _form(weight)
        if form not in sources:
            sources[form] = _activations(run, x, norm, weight, axis, logit_indices)
        records, activations = sources[form]
        rows = weight.out_features
        bias = None if projection.bias is None else projection.bias[column : column + rows]
        width = weight.num_groups * (1 if run.runtime.lanes == LANES else LANES)
        inputs = [run.constant(weight.data), activations, out, run.constant(bias), run.counts[axis]]
        arguments = [*inputs, records, out.shape[1], column, rows, epilogue, softcap]
        macros = _macros(weight, run.runtime.lanes)
        run.launch("matmul.cl", "multiply", width, arguments, macros, axis=axis, tokens=_TOKENS)
        column += rows


def _activations(
    run: Run, x: Tensor, norm: Norm | None, weight: PackedWeight, axis: Axis, logit_indices: Tensor | None
) -> tuple[int, Tensor]:
    """How many records a token's activations are, and norm(x) as such."""
    features, form = weight.in_features, _form(weight)
    records = weight.layout.num_records(features)
    size = records * weight.layout.activation_bytes(form) // 4
    if norm is None and form > 0:
        quantized = run.quantized(x, form, size)
        if quantized is not None:
            return records, quantized
    out = run.tensor(f"activations {axis}", run.most(axis), size, dtype=torch.int32)
    scale, eps = _vector(run, norm), 0.0 if norm is None else norm.eps
    arguments = [x, scale, out, logit_indices, features, eps, form]
    run.launch("rows.cl", "normalize_rows", min(records, 32), arguments, axis=axis)
    return records, out


def _form(weight: PackedWeight) -> int:
    """Of the activations: their int8 planes; 0 for floats."""
    return 0 if weight.layout.is_float else weight.planes


def _macros(weight: PackedWeight, lanes: int) -> dict[str, Any]:
    """What a weight's layout is to its kernels, of which an item has so many rows."""
    layout = weight.layout
    macros: dict[str, Any] = {
        "LANES": lanes,
        "PLANES": weight.planes,
        "LOW_BITS": layout.low_bits,
        "HIGH_BITS": layout.high_bits,
        "OFFSET": layout.offset,
        "HAS_MINIMUM": int(layout.has_minimum),
        "PARTS": layout.parts,
        "PER_SUPER": layout.records_per_super,
        "HIGH_AT": layout.high_at,
        "SCALE_AT": layout.scale_at,
        "MINIMUM_AT": layout.minimum_at,
        "HEADER": layout.super_header,
        "RECORD_BYTES": layout.record_bytes,
        "SUPER_BYTES": layout.super_bytes,
    }
    if layout.codes:
        macros["CODES"] = "{" + ",".join(str((code + layout.offset) % 256) for code in layout.codes) + "}"
    flags = {"IS_FLOAT": layout.is_float, "IS_BF16": layout.type == "BF16", "HAS_EXPONENT": layout.has_exponent}
    return macros | {name: 1 for name, is_set in flags.items() if is_set}


def _packed(weight: Weight) -> PackedWeight:
    if not isinstance(weight, PackedWeight):
        raise InvalidRequestError(f"OpenCL's kernels take packed weights (ops.prepare), got {type(weight).__name__}")
    return weight


def _vector(run: Run, norm: Norm | None) -> Any:
    return None if norm is None else run.constant(norm.weight.float().contiguous())
