"""The steps of a head in a model's files: the layers after the last hidden state. Loads no torch."""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

from infer.compute.quantization.ggml_types import FLOAT_TYPES
from infer.files.tensors.tensor_info import TensorInfo

ActivationName = Literal["gelu", "gelu_tanh", "relu", "sigmoid", "silu", "tanh"]


@final
@dataclass(frozen=True)
class DenseFiles:
    """The weight `[outputs, inputs]` of a dense layer, and its bias."""

    weight: TensorInfo
    bias: TensorInfo | None = None


@final
@dataclass(frozen=True)
class LayerNormFiles:
    """The weight and the bias of a layer norm."""

    weight: TensorInfo
    bias: TensorInfo | None
    eps: float


StepFiles = DenseFiles | LayerNormFiles | ActivationName
HeadFiles = tuple[StepFiles, ...]


def take_dense(tensors: MutableMapping[str, TensorInfo], prefix: str) -> DenseFiles:
    """Remove the tensors `prefix.weight` and, if present, `prefix.bias`, and return their dense layer."""
    return DenseFiles(tensors.pop(f"{prefix}.weight"), tensors.pop(f"{prefix}.bias", None))


def take_layer_norm(tensors: MutableMapping[str, TensorInfo], prefix: str, eps: float) -> LayerNormFiles:
    """Remove the tensors `prefix.weight` and, if present, `prefix.bias`, and return their layer norm."""
    return LayerNormFiles(tensors.pop(f"{prefix}.weight"), tensors.pop(f"{prefix}.bias", None), eps)


def check_head(steps: Sequence[StepFiles], size: int) -> int:
    """Return the size of the vector that the steps compute from a state of `size`.

    Raises ModelFormatError for a wrong shape, and for a tensor type without values.
    """
    for step in steps:
        if isinstance(step, DenseFiles):
            outputs = step.weight.shape[0] if step.weight.shape else 0
            _check(step.weight, (max(outputs, 1), size))
            size = outputs
        if not isinstance(step, str):
            own = [step.bias] if isinstance(step, DenseFiles) else [step.weight, step.bias]
            for tensor in own:
                if tensor is not None:
                    _check(tensor, (size,))
    return size


def _check(tensor: TensorInfo, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        tensor.fail(f"expected {shape}, got {tensor.shape}")
    if tensor.type not in FLOAT_TYPES and tensor.path.suffix == ".safetensors":
        supported = ", ".join(FLOAT_TYPES)
        tensor.fail(f"expected {supported}, got {tensor.type}")
