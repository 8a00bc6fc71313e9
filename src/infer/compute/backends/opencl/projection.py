"""A projection as launches: activations as records, then each packed weight times them."""

from typing import Any

import torch
from torch import Tensor

from infer.compute.backends.cpu.layouts import LANES
from infer.compute.backends.cpu.weights.packed_weight import PackedWeight
from infer.compute.backends.opencl.launches import Axis, Offer, Run
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.weights import Norm, Projection, Weight
from infer.compute.quantization.ggml_grids import pattern_words
from infer.errors import InvalidRequestError

STORE, ADD, CAP = range(3)
_TOKENS = (1, 8)  # that a work item takes: few for decoding, many for a prompt
_SIZES = ("low_bits", "high_bits", "offset", "has_minimum", "parts", "scales_per_record", "records_per_super")
_PLACES = ("super_header", "nibbles_at", "high_at", "scale_at", "minimum_at", "record_bytes", "super_bytes")


def project(
    run: Run,
    x: Activations,
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
        form = _form(weight)
        if form not in sources:
            sources[form] = _activations(run, x, norm, weight, axis, logit_indices)
        rows, records = weight.out_features, weight.layout.num_records(weight.in_features)
        bias = None if projection.bias is None else projection.bias[column : column + rows]
        width = weight.num_groups * LANES // run.runtime.lanes
        inputs = [run.constant(weight.data), sources[form], out, run.constant(bias), run.counts[axis]]
        arguments = [*inputs, records, out.shape[1], column, rows, epilogue, softcap]
        macros = macros_of(weight, run.runtime.lanes)
        run.launch("matmul.cl", "multiply", width, arguments, macros, axis=axis, tokens=_TOKENS)
        column += rows
    return out


def _activations(
    run: Run, x: Activations, norm: Norm | None, weight: PackedWeight, axis: Axis, logit_indices: Tensor | None
) -> Tensor:
    """Return norm(x) as the records that match the weight's."""
    features, form = weight.in_features, _form(weight)
    records = weight.layout.num_records(features)
    size = records * weight.layout.activation_bytes(form) // 4
    if norm is None and form > 0 and isinstance(x.twin, Offer):
        return x.twin.redeem(form, size)
    out = run.tensor(f"activations {axis}", run.most[axis], size, dtype=torch.int32)
    arguments = [x.floats, vector(run, norm), out, logit_indices, features, 0.0 if norm is None else norm.eps, form]
    run.launch("rows.cl", "normalize_rows", min(records, 32), arguments, axis=axis)
    return out


def _form(weight: PackedWeight) -> int:
    """Return the form of the activations: their number of int8 planes, or 0 for floats."""
    return 0 if weight.layout.is_float else weight.planes


def macros_of(weight: PackedWeight, lanes: int) -> dict[str, Any]:
    """Return the macros that describe a weight's layout to its kernels. A work item computes `lanes` rows."""
    layout = weight.layout
    macros: dict[str, Any] = {name.upper(): int(getattr(layout, name)) for name in (*_SIZES, *_PLACES)}
    macros |= {"LANES": lanes, "PLANES": weight.planes, "FACTOR": f"{layout.factor}f"}
    if layout.codes:
        codes = [(code + layout.offset) % 256 for code in layout.codes]
        macros["CODES"] = "{" + ",".join(map(str, codes)) + "}"
    if layout.grid:
        words = pattern_words(layout.grid, layout.pattern_width)
        macros |= {"PATTERN_WIDTH": layout.pattern_width, "PATTERNS": "{" + ",".join(map(str, words)) + "}"}
    flags = {"IS_FLOAT": layout.is_float, "IS_BF16": layout.type == "BF16", "HAS_EXPONENT": layout.has_exponent}
    flags |= {"HAS_TRITS": layout.has_trits, "HAS_NIBBLES": layout.has_nibbles}
    flags |= {f"HAS_{contents.upper()}": layout.nibbles == contents for contents in ("scales", "deltas", "numbers")}
    return macros | {name: 1 for name, is_set in flags.items() if is_set}


def packed(weight: Weight) -> PackedWeight:
    if not isinstance(weight, PackedWeight):
        raise InvalidRequestError(f"OpenCL's kernels take packed weights (ops.prepare), got {type(weight).__name__}")
    return weight


def vector(run: Run, norm: Norm | None) -> Any:
    """Return the weights of a norm, as an argument."""
    return None if norm is None else run.constant(norm.weight.float().contiguous())
