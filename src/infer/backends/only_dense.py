"""The check of devices whose kernels compute usual attention and dense feed-forwards, and no other part of a layer."""

from collections.abc import Iterable

from infer.errors import UnsupportedModelError
from infer.operands.architecture import Attention, Dense, Layer


def check_only_dense(layers: Iterable[Layer], device: str) -> None:
    """Raise UnsupportedModelError if a layer has another part."""
    parts = [part for layer in layers for part in layer.parts]
    others = {type(part).__name__.lower() for part in parts if not isinstance(part, Attention | Dense)}
    others |= {"attention sinks" for part in parts if isinstance(part, Attention) and part.has_sinks}
    if others:
        raise UnsupportedModelError(f"device {device} has no kernels for {', '.join(sorted(others))}: use device cpu")
