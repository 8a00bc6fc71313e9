"""The check of devices whose kernels compute usual attention and dense feed-forwards, and no other part of a layer."""

from collections.abc import Iterable

from infer.errors import UnsupportedModelError
from infer.operands.architecture import Attention, Experts, GatedDeltaNet, Layer, ShortConv

_NAMES = {Experts: "experts", ShortConv: "short convolutions", GatedDeltaNet: "gated delta nets"}


def check_only_dense(layers: Iterable[Layer], device: str) -> None:
    """Raise UnsupportedModelError if a layer has another part."""
    layers = list(layers)
    parts = [part for layer in layers for part in layer.parts]
    others = {_NAMES[type(part)] for part in parts if type(part) in _NAMES}
    others |= {"attention sinks" for part in parts if isinstance(part, Attention) and part.has_sinks}
    others |= {"output gates" for part in parts if isinstance(part, Attention) and part.has_gate}
    others |= {"norms of values" for part in parts if isinstance(part, Attention) and part.has_v_norm}
    others |= {"shared keys" for part in parts if isinstance(part, Attention) and not part.has_keys}
    others |= {"layers with a scale" for layer in layers if layer.has_scale}
    if others:
        raise UnsupportedModelError(f"device {device} has no kernels for {', '.join(sorted(others))}: use device cpu")
