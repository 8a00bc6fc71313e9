"""Matrices of types that a device's kernels do not read, converted to F16."""

from collections.abc import Callable

from torch import Tensor

from infer.compute.operands.weights import ConvertedWeight, StoredWeight, UnreadWeight, Weight
from infer.compute.quantization.ggml_blocks import dequantize
from infer.errors import UnsupportedModelError


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
