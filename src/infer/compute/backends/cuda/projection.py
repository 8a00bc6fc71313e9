"""The ops that multiply by weights: activations in the form that each matrix takes, then a kernel by type and size."""

from functools import cache
from typing import Any

import torch
import triton
from jaxtyping import Float, Int
from torch import Tensor

from infer.compute.backends.cuda.activations import (
    BF16_PLANES,
    F16_PLANES,
    NUM_PLANES,
    Quantized,
    Twin,
    activations_of_all,
    add_normalized,
    normalize,
    quantized,
    room_for,
    twin_of,
)
from infer.compute.backends.cuda.blocks import matrix_of
from infer.compute.backends.cuda.dense import DEPTHS, SHARED_BYTES, DenseTile, dense, dense_tile, num_stages
from infer.compute.backends.cuda.epilogue import Output
from infer.compute.backends.cuda.layouts import BLOCK, Layout, PackedWeight
from infer.compute.backends.cuda.matmul import matmul, matvec, multiply_few_rows, num_lanes
from infer.compute.backends.cuda.sampling.sampler import EXACT
from infer.compute.backends.reference_parts import gated, gathered
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.feed_forwards import Activation
from infer.compute.operands.weights import Norm, Projection, Weight

IS_INTERPRETED = triton.knobs.runtime.interpret
HAS_DP4A = not IS_INTERPRETED and torch.version.hip is None
FEW_TOKENS = 8  # up to which each has programs of its own: about as many as cost what a tile does (docs/benchmarks.md)
# Bits depend on no tile's size. The interpreter takes about as long for many rows as for one.
MATVEC_TILE = {"ROWS": 256 if IS_INTERPRETED else 2, "num_warps": 1}
BLOCK_TILE = {"ROWS": 256 if IS_INTERPRETED else 32, "num_warps": 16}  # of what leaves whole blocks in integers
MATMUL_TILE = {"TOKENS": 16, "ROWS": 64, "num_warps": 4, "num_stages": 3}  # seven sums of a tile fit the registers
FEW_ROWS_TILES = (  # of few tokens, and of many
    {"TOKENS": 1, "ROWS": 256 if IS_INTERPRETED else 1, "PARTS": 16, "num_warps": 1},
    {"TOKENS": 8, "ROWS": 256 if IS_INTERPRETED else 8, "PARTS": 4, "num_warps": 2},
)
FORMS: dict[str, int] = {
    "F32": 0,
    "F16": F16_PLANES.value,
    "BF16": BF16_PLANES.value,
}  # of the activations of a float type


def norm_project(x: Float[Tensor, "tokens hidden"], norm: Norm | None, projection: Projection) -> Activations:
    y = torch.empty(len(x), projection.out_features, device=x.device)
    return activations_of_all(y, multiply(Activations(x), norm, projection, y), projection.shares)


def project_add(
    residual: Float[Tensor, "tokens hidden"],
    x: Activations,
    projection: Projection,
    post_norm: Norm | None,
    scale: float = 1.0,
) -> Float[Tensor, "tokens hidden"]:
    """Replace `residual` by (residual + post_norm(projection)) × scale in place, and return it."""
    if post_norm is None and projection.shares is None:
        multiply(x, None, projection, residual, add=True)
        return residual if scale == 1.0 else residual.mul_(scale)
    y = torch.empty(len(residual), projection.out_features, device=residual.device)
    multiply(x, None, projection, y)
    return add_result(residual, gathered(y, projection.shares), post_norm, scale)


def add_result(
    residual: Float[Tensor, "tokens hidden"], y: Float[Tensor, "tokens hidden"], post_norm: Norm | None, scale: float
) -> Float[Tensor, "tokens hidden"]:
    """Replace `residual` by (residual + post_norm(y)) × scale in place, and return it."""
    if post_norm is not None:
        add_normalized(residual, y, post_norm, scale)
        return residual
    residual += y
    return residual if scale == 1.0 else residual.mul_(scale)


def norm_gate(
    x: Float[Tensor, "tokens hidden"], norm: Norm | None, gate_up: Projection, activation: Activation
) -> Activations:
    if len(gate_up.parts) > 1:  # gate and up are of two types
        both = torch.empty(len(x), gate_up.out_features, device=x.device)
        multiply(Activations(x), norm, gate_up, both)
        gate, up = both.chunk(2, dim=-1)
        return activations_of_all(gated(gate, up, activation), None, gate_up.shares)
    y = torch.empty(len(x), gate_up.out_features // 2, device=x.device)
    twin = multiply(Activations(x), norm, gate_up, y, activation=activation)
    return activations_of_all(y, twin, gate_up.shares)


def norm_activate(
    x: Float[Tensor, "tokens hidden"], norm: Norm | None, projection: Projection, activation: Activation
) -> Activations:
    y = torch.empty(len(x), projection.out_features, device=x.device)
    twin = multiply(Activations(x), norm, projection, y, activation=activation, has_gate=False)
    return activations_of_all(y, twin, projection.shares)


def head(
    x: Float[Tensor, "tokens hidden"],
    logit_indices: Int[Tensor, "logits"],
    norm: Norm,
    projection: Projection,
    softcap: float | None = None,
) -> Float[Tensor, "logits vocab"]:
    y = torch.empty(len(logit_indices), projection.out_features, device=x.device)
    multiply(Activations(x), norm, projection, y, indices=logit_indices, softcap=softcap)
    return gathered(y, projection.shares)


def multiply(
    x: Activations,
    norm: Norm | None,
    projection: Projection,
    y: Float[Tensor, "selected out"],
    *,
    indices: Int[Tensor, "logits"] | None = None,
    activation: Activation | None = None,
    has_gate: bool = True,
    add: bool = False,
    softcap: float | None = None,
    has_few_rows: bool = False,
) -> Twin | None:
    """Write projection(norm(x)), or projection(norm(x[indices])), to `y`. With `add`, add it instead.

    An activation is for the first half of the rows, which multiplies the others; without a gate, for all rows.
    `has_few_rows` says that the rows are few, and never divided among ranks. If they are F32, their sums then have an
    order of their own. Return the twin of what was written.
    """
    if not len(y):
        return None
    floats, twin, column, bias = x.floats.float().contiguous(), twin_of(x), 0, projection.bias
    forms: dict[int, Quantized] = {}
    if twin.quantized is not None and norm is None and indices is None:
        forms[twin.planes] = twin.quantized
    made, gate = None, (activation or "") if has_gate else ""
    for weight in projection.parts:
        assert isinstance(weight, PackedWeight)
        form = form_of(weight)
        if form not in forms:
            forms[form] = in_form(floats, norm, form, indices)
        output = Output.of(
            y[:, column:], weight.out_features // (2 if gate else 1), None if bias is None else bias[column:],
            add=add, softcap=softcap, activation="" if gate else activation or "", curve=projection.curve,
        )  # fmt: skip
        left = room_for(y, form) if activation else None
        if has_few_rows and not form:
            _launch_few_rows(forms[form], weight, output, len(y))
        else:
            launch(forms[form], weight, output, left, len(y), gate)
        made = Twin(form, left)
        column += output.num_rows
    return made


def form_of(weight: Weight) -> int:
    """Return the form of the activations that a packed weight is multiplied with."""
    assert isinstance(weight, PackedWeight)
    return FORMS.get(weight.layout.type, weight.planes)


def in_form(
    floats: Float[Tensor, "tokens in"], norm: Norm | None, form: int, indices: Int[Tensor, "logits"] | None
) -> Quantized:
    """Return norm(floats), or norm(floats[indices]), in planes or as they are."""
    if form:
        return quantized(floats, norm, form, indices)
    x = normalize(floats, norm, indices)
    return Quantized(x, x, x)


def launch(x: Quantized, weight: PackedWeight, y: Output, left: Quantized | None, num_tokens: int, gate: str) -> None:
    """Launch the kernel for the weight's type and the number of tokens.

    `gate` is the activation of the first half of the rows, which multiplies the second half; or "". If `left` is given,
    the product is also stored there in planes.
    """
    to = (x if left is None else left).in_bytes()
    if weight.layout.is_float:
        _launch_dense(x, weight, y, to, num_tokens, gate, leaves=left is not None)
        return
    constants = {
        "PLANES": weight.planes, "LANES": num_lanes(weight.codes.shape[1]), "GATE": gate, "LEAVES": left is not None,
    }  # fmt: skip
    if num_tokens <= FEW_TOKENS:
        tile = MATVEC_TILE if left is None else BLOCK_TILE
        matvec[(num_tokens * triton.cdiv(y.num_rows, tile["ROWS"]),)](
            x, matrix_of(weight, torch.int32), y, to, num_tokens, DP4A=HAS_DP4A, **constants, **tile, **EXACT,
        )  # fmt: skip
    else:
        tile = matmul_tile(weight.layout, num_tokens, gate)
        tiles = triton.cdiv(num_tokens, tile["TOKENS"]), triton.cdiv(y.num_rows, tile["ROWS"])
        matmul[tiles](
            x.in_bytes(), matrix_of(weight, torch.uint8), y, to, num_tokens, DP4A=HAS_DP4A, **constants, **tile, **EXACT
        )


def matmul_tile(layout: Layout, num_tokens: int, gate: str) -> dict[str, int]:
    """Return the tile of a product of many tokens. Twice as many share the weights if the registers have room."""
    has_room = not gate and layout.scales_per_block < 2 and layout.low_bits >= 4 and not layout.high_bits
    return MATMUL_TILE | {"TOKENS": 32} if has_room and num_tokens > MATMUL_TILE["TOKENS"] else MATMUL_TILE


def _launch_dense(
    x: Quantized, weight: PackedWeight, y: Output, to: Quantized, num_tokens: int, gate: str, *, leaves: bool
) -> None:
    tile, num_inputs = dense_tile(num_tokens, y.num_rows, form_of(weight)), weight.in_features
    dense[(triton.cdiv(num_tokens, tile.TOKENS) * triton.cdiv(y.num_rows, tile.ROWS),)](
        x, weight.codes, y, to, num_tokens, num_inputs, triton.cdiv(num_inputs, BLOCK),
        **dense_constants(weight, tile, gate, leaves=leaves),
    )  # fmt: skip


def dense_constants(weight: PackedWeight, tile: DenseTile, gate: str, *, leaves: bool) -> dict[str, Any]:
    """Return the constants and options of a float matrix's kernel."""
    form = form_of(weight)
    return {
        "PLANES": form, "NUM_PLANES": NUM_PLANES[form], "TOKENS": tile.TOKENS, "ROWS": tile.ROWS, "DEPTH": DEPTHS[form],
        "IS_WHOLE": weight.in_features % DEPTHS[form] == 0, "GATE": gate, "LEAVES": leaves, "num_warps": tile.num_warps,
        "num_stages": num_stages(tile, form, shared_bytes(weight.codes.device)), **EXACT,
    }  # fmt: skip


def _launch_few_rows(x: Quantized, weight: PackedWeight, y: Output, num_tokens: int) -> None:
    tile = FEW_ROWS_TILES[num_tokens > FEW_TOKENS]
    multiply_few_rows[triton.cdiv(num_tokens, tile["TOKENS"]), triton.cdiv(y.num_rows, tile["ROWS"])](
        x.codes, weight.codes, y, num_tokens, weight.in_features, **tile, **EXACT
    )


@cache
def shared_bytes(device: torch.device) -> int:
    """Return the shared memory that a program may have."""
    if device.type != "cuda":
        return SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))
