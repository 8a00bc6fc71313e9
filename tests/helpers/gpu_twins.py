"""Planes that a kernel leaves beside its floats for the next product."""

import torch

from infer.compute.backends.cuda.activations import quantized, twin_of
from infer.compute.operands.activation_values import Activations


def assert_left_in_planes(found: Activations, form: int, last: int | None = None) -> None:
    """Check that the planes of tokens up to `last` are those that the next product would make of the floats."""
    twin = twin_of(found)
    assert twin.quantized is not None
    assert twin.planes == form
    for left, made in zip(twin.quantized, quantized(found.floats, None, form), strict=True):
        assert torch.equal(left[:last], made[:last])
