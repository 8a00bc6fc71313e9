"""The layers after a pooled state: dense layers, norms and activations, for vectors, scores and labels.

They compute in float64, one state at a time, and each sum has a fixed order. So the bits of a result do not depend on
the other states of a call.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from infer.errors import ModelFormatError
from infer.files.heads.pooling import ActivationName, HeadFiles, StepFiles
from infer.files.tensors.lazy_weights import as_float32, read_weight
from infer.files.tensors.tensor_info import TensorInfo

_ROWS = 64  # of a weight per product, so that it stays in the core's cache
_ACTIVATIONS: Mapping[ActivationName, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "tanh": torch.tanh,
}
HeadStep = Callable[[Tensor], Tensor]  # from one float64 state to the next


@final
@dataclass(frozen=True, eq=False)
class DenseLayer:
    """W · x + b. The weight is in float32."""

    weight: Float[Tensor, "outputs inputs"]
    bias: Float[Tensor, "outputs"] | None = None

    def __call__(self, state: Float[Tensor, "inputs"]) -> Float[Tensor, "outputs"]:
        found = torch.cat([(rows * state).sum(-1) for rows in torch.split(self.weight, _ROWS)])
        return found if self.bias is None else found + self.bias


@final
@dataclass(frozen=True, eq=False)
class Head:
    """Steps after a pooled state, in their order."""

    steps: tuple[HeadStep, ...] = ()

    def of(self, state: Float[Tensor, "inputs"]) -> Float[Tensor, "outputs"]:
        """Return the result of one float64 state."""
        for step in self.steps:
            state = step(state)
        return state


def load_head(files: HeadFiles) -> Head:
    """Return the head of a model's files. Raises ModelError if reading fails, or if a number is not finite."""
    return Head(tuple(map(_load_step, files)))


def _load_step(files: StepFiles) -> HeadStep:
    if isinstance(files, str):
        return _ACTIVATIONS[files]
    weight, bias = _values(files.weight), None if files.bias is None else _values(files.bias)
    if files.eps is None:
        return DenseLayer(weight, bias)
    bias = None if bias is None else bias.double()
    return partial(
        functional.layer_norm, normalized_shape=weight.shape, weight=weight.double(), bias=bias, eps=files.eps
    )


def _values(tensor: TensorInfo) -> Tensor:
    values = as_float32(read_weight(tensor)).data
    if not values.isfinite().all():
        raise ModelFormatError(tensor.path, f"tensor {tensor.name!r:.80}", "expected finite numbers: download it again")
    return values
