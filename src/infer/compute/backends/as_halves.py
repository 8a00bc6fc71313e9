"""Matrices of types that only the CPU's kernels read, converted to F16 for GPUs."""

from torch import Tensor

from infer.compute.backends.gpu_memory import stored_type
from infer.compute.operands.weights import ConvertedWeight, StoredWeight, UnreadWeight, Weight
from infer.compute.quantization.ggml_blocks import dequantize
from infer.errors import UnsupportedModelError


def as_halves(weight: Weight) -> Weight:
    """Return the weight, or its conversion to F16 if GPUs store its type so.

    Reading the rows raises UnsupportedModelError if F16 cannot hold a value.
    """
    if not isinstance(weight, StoredWeight | UnreadWeight) or stored_type(weight.type) == weight.type:
        return weight
    return ConvertedWeight(weight, "F16", _halves)


def _halves(rows: StoredWeight) -> Tensor:
    halves = dequantize(rows.data, rows.type).half()
    if not halves.isfinite().all():
        raise UnsupportedModelError(
            f"GPUs store {rows.type} as F16, which ends at 65,504, and a matrix has a larger value: use device cpu"
        )
    return halves
