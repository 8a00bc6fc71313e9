"""Parts of the ops in plain torch: products, norms, gates, curves, and conversions of weights to F16."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from infer.compute.operands.feed_forwards import Activation
from infer.compute.operands.group import Shares
from infer.compute.operands.weights import (
    ConvertedWeight,
    Norm,
    ObservedWeight,
    Projection,
    StoredWeight,
    UnreadWeight,
    Weight,
)
from infer.compute.quantization.ggml_blocks import dequantize
from infer.errors import UnsupportedModelError

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "gelu_sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}


def activated(
    x: Float[Tensor, "*shape"], activation: Activation, curve: Float[Tensor, "4"] | None
) -> Float[Tensor, "*shape"]:
    """Return activation(x).

    xIELU (arXiv:2411.13010) is a x² + c x above 0, else b (e^min(x, d) − 1 − x) + c x, for the curve [a, b, c, d].
    """
    if curve is None:
        return ACTIVATIONS[activation](x)
    rising, falling, slope, most = curve.to(x.dtype).unbind()
    return torch.where(x > 0, rising * x * x, falling * (torch.expm1(torch.minimum(x, most)) - x)) + slope * x


def gated(
    gate: Float[Tensor, "*shape"], up: Float[Tensor, "*shape"], activation: Activation
) -> Float[Tensor, "*shape"]:
    if activation == "clamped_swiglu":
        return (up.clamp(-7, 7) + 1) * ACTIVATIONS["gelu_sigmoid"](gate.clamp(max=7))
    return ACTIVATIONS[activation](gate) * up


def project(x: Float[Tensor, "*rows in"], projection: Projection) -> Float[Tensor, "*rows out"]:
    y = torch.cat([multiplied(x, part) for part in projection.parts], dim=-1)
    return y if projection.bias is None else y + projection.bias.to(y.dtype)


def multiplied(x: Float[Tensor, "*rows in"], weight: Weight) -> Float[Tensor, "*rows out"]:
    if isinstance(weight, ObservedWeight):
        weight.on_input(x)
        weight = weight.source
    return F.linear(x, dense(weight).to(x.dtype))


def dense(weight: Weight) -> Float[Tensor, "out in"]:
    assert isinstance(weight, StoredWeight)
    return weight.data if weight.data.is_floating_point() else dequantize(weight.data, weight.type)


def gathered(own: Float[Tensor, "rows own"], shares: Shares | None) -> Float[Tensor, "rows width"]:
    return own if shares is None else shares.gather(own)


def normalize(x: Float[Tensor, "*rows hidden"], norm: Norm) -> Float[Tensor, "*rows hidden"]:
    wide = x.float()
    if norm.is_centred:
        wide = wide - wide.mean(-1, keepdim=True)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.float()
    return (scaled if norm.bias is None else scaled + norm.bias.float()).to(x.dtype)


def softcapped(x: Float[Tensor, "*shape"], cap: float | None) -> Float[Tensor, "*shape"]:
    return x if cap is None else cap * torch.tanh(x / cap)


def as_halves(weight: Weight, stored_type: Callable[[str], str]) -> Weight:
    """Return the weight, or its conversion to F16 if `stored_type` of its type is another type.

    Reading the rows raises UnsupportedModelError if F16 cannot hold a value.
    """
    if not isinstance(weight, StoredWeight | UnreadWeight) or stored_type(weight.type) == weight.type:
        return weight
    return ConvertedWeight(weight, "F16", _halves)


def _halves(rows: StoredWeight) -> Tensor:
    halves = dequantize(rows.data, rows.type).half()
    if not halves.isfinite().all():
        raise UnsupportedModelError(
            f"this device stores {rows.type} as F16, which ends at 65,504, and a matrix has a larger value: use "
            "device cpu"
        )
    return halves
