"""One known product, computed when a device is opened: a driver with wrong arithmetic would give wrong tokens."""

import torch

from infer.backends import reference
from infer.backends.opencl.devices import full_name
from infer.backends.opencl.operations import Operations
from infer.backends.opencl.runtime import Runtime
from infer.errors import InvalidRequestError
from infer.operands.weights import Norm, Projection, StoredWeight

_FEATURES, _ROWS, _TOKENS = 64, 64, 2
_BLOCK, _SCALE = 32, 2.0**-7
_TOLERANCE = 1e-3  # of the largest value; activations in int16 take a thirtieth of this


def check_known_product(runtime: Runtime, operations: Operations) -> None:
    """Compute a norm, a product with Q8_0 weights and a SiLU gate, and compare with plain torch on the host.

    Raises InvalidRequestError if the device gives other values, or cannot build the kernels.
    """
    stored, norm, x = _inputs()
    prepared = operations.prepare(stored, torch.device("cpu"))
    found = operations.norm_gate(x, norm, prepared, "silu").floats
    expected = reference.norm_gate(x, norm, stored, "silu").floats
    difference = float(((found - expected).abs().amax() / expected.abs().amax()).nan_to_num(nan=torch.inf))
    if difference > _TOLERANCE:
        raise InvalidRequestError(
            f"device opencl: {full_name(runtime.device)} computes a known product wrongly (off by {difference:.1%}), "
            "so its tokens would be wrong: update its driver, use another device (infer models -v lists them), or use "
            "--device cpu"
        )


def _inputs() -> tuple[Projection, Norm, torch.Tensor]:
    """Return gate and up, a norm, and activations: the same values each time, without a random generator."""
    codes = (torch.arange(2 * _ROWS * _FEATURES) * 37 % 255 - 127).to(torch.int8).view(-1, _BLOCK)
    scales = torch.full((len(codes), 1), _SCALE, dtype=torch.float16).view(torch.uint8)
    blocks = torch.cat([scales, codes.view(torch.uint8)], dim=1).view(2 * _ROWS, -1)
    gate_up = Projection((StoredWeight("Q8_0", (2 * _ROWS, _FEATURES), blocks),))
    x = (torch.arange(_TOKENS * _FEATURES) * 29 % 61 - 30).float().view(_TOKENS, _FEATURES)
    return gate_up, Norm(torch.linspace(0.5, 1.5, _FEATURES), 1e-5), x
