"""The steps of a head in a model's files: the layers after the last hidden state. Loads no torch."""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

from infer.compute.quantization.ggml_types import FLOAT_TYPES
from infer.files.tensors.tensor_info import TensorInfo

ActivationName = Literal["gelu", "gelu_tanh", "relu", "sigmoid", "silu", "tanh"]


@final
@dataclass(frozen=True)
class LayerFiles:
    """The weight and the bias of a dense layer, `[outputs, inputs]`, or with an eps of a layer norm."""

    weight: TensorInfo
    bias: TensorInfo | None = None
    eps: float | None = None

    @property
    def is_dense(self) -> bool:
        return self.eps is None


StepFiles = LayerFiles | ActivationName
HeadFiles = tuple[StepFiles, ...]


def take_layer(tensors: MutableMapping[str, TensorInfo], prefix: str, eps: float | None = None) -> LayerFiles:
    """Remove the tensors `prefix.weight` and, if present, `prefix.bias`, and return their layer."""
    return LayerFiles(tensors.pop(f"{prefix}.weight"), tensors.pop(f"{prefix}.bias", None), eps)


def check_head(steps: Sequence[StepFiles], size: int) -> int:
    """Return the size of the vector that the steps compute from a state of `size`.

    Raises ModelFormatError for a wrong shape, and for a tensor type without values.
    """
    for step in steps:
        if isinstance(step, str):
            continue
        outputs = step.weight.shape[0] if step.weight.shape else 0
        _check(step.weight, (max(outputs, 1), size) if step.is_dense else (size,))
        size = outputs
        if step.bias is not None:
            _check(step.bias, (size,))
    return size


def _check(tensor: TensorInfo, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        tensor.fail(f"expected {shape}, got {tensor.shape}")
    if tensor.type not in FLOAT_TYPES and tensor.path.suffix == ".safetensors":
        supported = ", ".join(FLOAT_TYPES)
        tensor.fail(f"expected {supported}, got {tensor.type}")
