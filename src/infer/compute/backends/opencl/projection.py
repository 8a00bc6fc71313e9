"""A projection as launches: activations as records, then each packed weight times them."""

from typing import Any

import torch
from torch import Tensor

from infer.compute.backends.cpu.weights.packed_weight import PackedWeight
from infer.compute.backends.opencl.launches import Axis, Run
from infer.compute.operands.weights import Norm, Projection, Weight
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
    """Write project(norm(x)) to out, add it to out, or write softcap × tanh(it / softcap). Return out."""
    axis: Axis = "tokens" if logit_indices is None else "logits"
    sources: dict[int, Tensor] = {}
    column = 0
    for part in projection.parts:
        weight = packed(part)
        form = 0 if weight.layout.is_float else weight.planes  # of activations: their int8 planes, or 0 for floats
        rows, records = weight.out_features, weight.layout.num_records(weight.in_features)
        if form not in sources:
            size = records * weight.layout.activation_bytes(form) // 4
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
    """Return the weights of a norm, as an argument."""
    return None if norm is None else run.constant(norm.weight.float().contiguous())
