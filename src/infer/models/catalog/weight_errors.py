"""The differences between the matrices of a model and those of another file of the same model."""

from collections.abc import Mapping
from math import isfinite, prod, sqrt

import torch

from infer.compute.operands.weights import StoredWeight
from infer.compute.quantization.ggml_blocks import dequantize
from infer.compute.quantization.ggml_types import BLOCK_TYPES
from infer.files import Checkpoint
from infer.files.tensors.lazy_weights import LazyWeights
from infer.files.tensors.tensor_info import TensorInfo
from infer.models.catalog.tensor_checks import OnProgress, pieces


def weight_errors(reference: Checkpoint, other: Checkpoint, on_progress: OnProgress) -> dict[str, float]:
    """Return ‖other − reference‖ / ‖reference‖ of each matrix, by our names.

    It is empty if the checkpoints have different networks, whose matrices differ in names or shapes. A matrix whose
    error is not a finite number is left out. Raises ModelError if reading fails.
    """
    ours, theirs = (_matrices(each.tensors) for each in (reference, other))
    if {name: info.shape for name, info in ours.items()} != {name: info.shape for name, info in theirs.items()}:
        return {}
    found, done, total = dict[str, float](), 0, sum(prod(info.shape) for info in ours.values())
    weights, others = LazyWeights(ours), LazyWeights(theirs)
    for name, info in ours.items():
        difference = size = 0.0
        for right, near in zip(pieces(weights, name, info), pieces(others, name, theirs[name]), strict=True):
            expected = _floats(right)
            difference += float((_floats(near) - expected).square().sum())
            size += float(expected.square().sum())
            done += expected.numel()
            on_progress(done, total)
        if size > 0 and isfinite(error := sqrt(difference / size)):
            found[name] = error
    return found


def _matrices(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    return {name: info for name, info in tensors.items() if len(info.shape) == 2}


def _floats(stored: StoredWeight) -> torch.Tensor:
    if BLOCK_TYPES[stored.type].is_float:
        return stored.data.float()
    return dequantize(stored.data, stored.type)
