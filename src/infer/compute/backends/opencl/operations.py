"""Every op as a few launches on an OpenCL device, as `backends.reference` defines it.

The launches go to the active recording, or run immediately. Both use the same code, so a recorded step gives the same
bits.
"""

from dataclasses import replace
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from infer.compute.backends import reference
from infer.compute.backends.cpu.isa import instruction_set
from infer.compute.backends.cpu.layouts import activation_bytes
from infer.compute.backends.cpu.sampling import launch
from infer.compute.backends.cpu.weights.packed_weight import PackedWeight
from infer.compute.backends.cpu.weights.prepare_weights import Precision
from infer.compute.backends.cpu.weights.prepare_weights import prepare as pack
from infer.compute.backends.opencl.devices import ITEMS
from infer.compute.backends.opencl.launches import Axis, Run, scope
from infer.compute.backends.opencl.runtime import Runtime, storage_of
from infer.compute.backends.opencl.stored_types import check_kv_type, stored_type
from infer.compute.backends.reference_parts import as_halves
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.feed_forwards import Activation
from infer.compute.operands.step import Step
from infer.compute.operands.weights import Heads, Norm, Projection, Weight
from infer.compute.quantization.kv_layout import LayerCache
from infer.errors import InvalidRequestError

STORE, ADD, CAP = range(3)
_TOKENS = (1, 4)  # that a work item takes: one for decoding, four of a prompt
_SIZES = ("is_float", "low_bits", "high_bits", "offset", "has_minimum", "parts", "records_per_super")
_PLACES = ("super_header", "high_at", "scale_at", "minimum_at", "record_bytes", "super_bytes")


def project(
    run: Run,
    x: Tensor,
    norm: Norm | None,
    projection: Projection,
    out: Tensor,
    epilogue: int = STORE,
    *,
    softcap: float = 0.0,
    logit_indices: Tensor | None = None,
) -> Tensor:
    """Write project(norm(x)) to out, add it to out, or write softcap × tanh(it / softcap), by `epilogue`. Return out.

    x is f32 [tokens, in_features] and out f32 [tokens, columns]. With `logit_indices`, only these tokens are projected.
    """
    axis: Axis = "tokens" if logit_indices is None else "logits"
    sources: dict[int, Tensor] = {}
    column = 0
    for part in projection.parts:
        weight = packed(part)
        form = 0 if weight.layout.is_float else weight.planes  # of activations: their int8 planes, or 0 for floats
        rows, records = weight.out_features, weight.layout.num_records(weight.in_features)
        if form not in sources:
            size = records * activation_bytes(form) // 4
            sources[form] = run.tensor(f"activations {axis}", run.most[axis], size, dtype=torch.int32)
            eps = 0.0 if norm is None else norm.eps
            arguments = [x, vector(run, norm), sources[form], logit_indices, weight.in_features, eps, form]
            run.launch("rows.cl", "normalize_rows", 1, arguments, axis=axis)
        bias = None if projection.bias is None else projection.bias[column : column + rows]
        inputs = [run.constant(weight.data), sources[form], out, run.constant(bias), run.counts[axis]]
        arguments = [*inputs, records, out.shape[1], column, rows, epilogue, softcap]
        run.launch("matmul.cl", "multiply", rows, arguments, macros_of(weight), axis=axis, tokens=_TOKENS)
        column += rows
    return out


def macros_of(weight: PackedWeight) -> dict[str, Any]:
    """Return the macros that describe a weight's layout to its kernels."""
    layout = weight.layout
    macros: dict[str, Any] = {name.upper(): int(getattr(layout, name)) for name in (*_SIZES, *_PLACES)}
    if layout.codes:
        macros["CODES"] = ",".join(str((code + layout.offset) % 256) for code in layout.codes)
    return macros | {"PLANES": weight.planes, "IS_BF16": int(layout.type == "BF16")}


def packed(weight: Weight) -> PackedWeight:
    if not isinstance(weight, PackedWeight):
        raise InvalidRequestError(f"OpenCL's kernels take packed weights (ops.prepare), got {type(weight).__name__}")
    return weight


def vector(run: Run, norm: Norm | None) -> Any:
    """Return a norm's weights, f32 [features], as an argument of a launch; None without a norm."""
    return None if norm is None else run.constant(norm.weight.float().contiguous())


BLOCKS = np.dtype([(name, np.int64) for name in ("first", "page", "head", "block")])
LAYER = np.dtype(
    [("keys", BLOCKS), ("values", BLOCKS), ("far_at", np.int64)]
    + [(name, np.int32) for name in ("heads", "kv_heads", "table_stride", "page_bits", "half_dim")]
    + [(name, np.int32) for name in ("rope_positions", "rope_sets", "last_position", "q_norm_stride", "k_norm_stride")]
    + [(name, np.float32) for name in ("scale", "softcap", "q_eps", "k_eps")],
    align=True,
)


def layer_record(heads: Heads, layer: LayerCache, far_at: int) -> npt.NDArray[Any]:
    check_kv_type(layer.kv_type)
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


@final
class Operations:
    normalize = staticmethod(reference.normalize)
    choose_tokens = staticmethod(launch.choose_tokens)  # of logits that the host has

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def prepare(self, projection: Projection, device: torch.device, precision: Precision = "exact") -> Projection:
        """Return the projection packed in the CPU's groups of 16 rows, which neighbouring work items read.

        Types that these kernels do not read become F16. Raises InvalidRequestError if weights are packed for i8mm.
        """
        if instruction_set().inputs != 4:
            raise InvalidRequestError(
                "device opencl: weights are packed for i8mm here, which its kernels do not read: set INFER_ISA=neon, "
                "or use --device cpu"
            )
        stored = replace(projection, parts=tuple(as_halves(part, stored_type) for part in projection.parts))
        prepared, place = pack(stored, device, precision), self._runtime.memory.place
        parts = [replace(part, data=place(part.data)) for part in map(packed, prepared.parts)]
        return replace(prepared, parts=tuple(parts))

    def embed(
        self,
        table: Weight,
        token_ids: Int[Tensor, "tokens"],
        scale: float,
        norm_eps: None = None,  # `check_unusual_parts` refuses models with such a norm
    ) -> Float[Tensor, "tokens hidden"]:
        weight, tokens = packed(table), token_ids.to(torch.int64).contiguous()
        (rows, features), records = weight.shape, weight.layout.num_records(weight.in_features)
        with scope(self._runtime, len(tokens)) as run:
            out = run.tensor("x", run.capacity, features)
            arguments = [run.constant(weight.data), tokens, out, rows, features, records, float(scale)]
            run.launch("matmul.cl", "embed", -(-features // 4), arguments, macros_of(weight))
        return out

    def norm_project(self, x: Float[Tensor, "tokens hidden"], norm: Norm | None, projection: Projection) -> Activations:
        with scope(self._runtime, len(x)) as run:
            out = run.tensor("projected", run.capacity, projection.out_features)
            return Activations(project(run, x, norm, projection, out))

    def attend(self, qkv: Activations, heads: Heads, layer: LayerCache, step: Step) -> Activations:
        """Return the attended values, f32 [tokens, heads × dim], after the step's keys and values are appended.

        A work group computes one head of one token, in both kernels: `rotate_append` and `attend`.
        """
        features, pages, rope = heads.num_heads * heads.head_dim, layer.pages, heads.rope
        has_far = pages.last_position is not None and rope is not None
        macros = {"HEAD_DIM": heads.head_dim, f"KV_{layer.kv_type}": 1}
        with scope(self._runtime, len(qkv.floats)) as run:
            queries = run.tensor("queries", 2 if has_far else 1, run.capacity, features)
            out = run.tensor("attended", run.capacity, features)
            record = layer_record(heads, layer, far_at=run.capacity * features if has_far else 0)
            keys, values = storage_of(layer.keys), storage_of(layer.values)
            rotation = [vector(run, norm) for norm in (heads.q_norm, heads.k_norm)]
            rotation += (None, None) if rope is None else (run.constant(rope.cos), run.constant(rope.sin))
            places, own = [pages.table, pages.shifts], [step.rows, step.positions]
            arguments = [qkv.floats, *rotation, *places, pages.rope_sets, *own, queries, keys, values, record]
            num_groups = heads.num_heads * (1 + has_far) + 2 * heads.num_kv_heads
            run.launch("attention.cl", "rotate_append", num_groups * ITEMS, arguments, macros)
            arguments = [queries, keys, values, *places, pages.sinks, pages.windows, *own, out, record]
            run.launch("attention.cl", "attend", heads.num_heads * ITEMS, arguments, macros)
        return Activations(out)

    def attention_weights(
        self, qkv: Float[Tensor, "tokens out"], heads: Heads, layer: LayerCache, step: Step
    ) -> Float[Tensor, "kv_heads group tokens slots"]:
        stored, page_bytes = storage_of(layer.keys), layer.keys.stride(1)
        for page in set(layer.pages.table[step.rows[0]].tolist()):
            self._runtime.memory.to_host(stored, page * page_bytes, page_bytes)
        self._runtime.memory.finish()
        return reference.attention_weights(qkv, heads, layer, step)

    def project_add(
        self,
        residual: Float[Tensor, "tokens hidden"],
        x: Activations,
        projection: Projection,
        post_norm: Norm | None,
        scale: float = 1.0,  # `check_unusual_parts` refuses others
    ) -> Float[Tensor, "tokens hidden"]:
        with scope(self._runtime, len(x.floats)) as run:
            if post_norm is None:
                return project(run, x.floats, None, projection, residual, ADD)
            features = projection.out_features
            y = project(run, x.floats, None, projection, run.tensor("before post norm", run.capacity, features))
            run.launch("rows.cl", "add_normalized", 1, [residual, y, vector(run, post_norm), features, post_norm.eps])
        return residual

    def norm_gate(
        self, x: Float[Tensor, "tokens hidden"], norm: Norm | None, gate_up: Projection, activation: Activation
    ) -> Activations:
        features = gate_up.out_features // 2
        with scope(self._runtime, len(x)) as run:
            both = project(run, x, norm, gate_up, run.tensor("gate and up", run.capacity, 2 * features))
            out = run.tensor("hidden", run.capacity, features)
            run.launch("rows.cl", "gate_rows", features, [both, out, features], {"GATED": f"gated_{activation}"})
        return Activations(out)

    def head(
        self,
        x: Float[Tensor, "tokens hidden"],
        logit_indices: Int[Tensor, "logits"],
        norm: Norm,
        projection: Projection,
        softcap: float | None = None,
    ) -> Float[Tensor, "logits vocab"]:
        epilogue = STORE if softcap is None else CAP
        with scope(self._runtime, len(x), len(logit_indices)) as run:
            out = run.tensor("logits", run.max_logits, projection.out_features)
            return project(run, x, norm, projection, out, epilogue, softcap=softcap or 0.0, logit_indices=logit_indices)
