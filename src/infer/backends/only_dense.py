"""The check of devices whose kernels compute usual attention and dense feed-forwards, and no other part of a layer."""

from collections.abc import Callable, Iterable

from infer.errors import UnsupportedModelError
from infer.operands.architecture import Layer
from infer.operands.feed_forwards import Experts, PerLayerInput
from infer.operands.mixers import Attention, GatedDeltaNet, ShortConv

_NAMES = {
    PerLayerInput: "per-layer inputs",
    Experts: "experts",
    ShortConv: "short convolutions",
    GatedDeltaNet: "gated delta nets",
}
_OF_ATTENTION: dict[str, Callable[[Attention], bool]] = {
    "attention sinks": lambda attention: attention.has_sinks,
    "output gates": lambda attention: attention.has_gate,
    "norms of values": lambda attention: attention.has_v_norm,
    "attention without a mask": lambda attention: not attention.is_causal,
    "shared keys": lambda attention: not attention.has_keys,
    "attention in chunks": lambda attention: attention.chunk is not None,
    "scaled queries": lambda attention: attention.query_scale is not None,
}


def check_only_dense(layers: Iterable[Layer], device: str) -> None:
    """Raise UnsupportedModelError if a layer has another part."""
    layers = list(layers)
    parts = [part for layer in layers for part in layer.parts]
    others = {_NAMES[type(part)] for part in parts if type(part) in _NAMES}
    attention = [part for part in parts if isinstance(part, Attention)]
    others |= {name for name, is_part in _OF_ATTENTION.items() if any(map(is_part, attention))}
    others |= {"layers with a scale" for layer in layers if layer.has_scale}
    if others:
        raise UnsupportedModelError(f"device {device} has no kernels for {', '.join(sorted(others))}: use device cpu")
