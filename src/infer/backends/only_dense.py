"""The check of devices whose kernels compute usual attention and dense feed-forwards, and no other part of a layer."""

from collections.abc import Iterable

from infer.errors import UnsupportedModelError
from infer.operands.architecture import Layer
from infer.operands.unusual_parts import unusual_parts


def check_only_dense(layers: Iterable[Layer], device: str) -> None:
    """Raise UnsupportedModelError if a layer has another part."""
    if others := unusual_parts(layers):
        raise UnsupportedModelError(f"device {device} has no kernels for {', '.join(sorted(others))}: use device cpu")
