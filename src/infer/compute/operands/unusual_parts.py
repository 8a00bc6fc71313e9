"""The parts of layers other than usual attention and dense feed-forwards, which not every device computes."""

from collections.abc import Callable, Iterable, Set

from infer.compute.operands.architecture import Layer
from infer.compute.operands.feed_forwards import Dense, Experts, PerLayerInput
from infer.compute.operands.mixers import Attention, GatedDeltaNet, ShortConv
from infer.errors import UnsupportedModelError

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
    "norms of q and k after their rotation": lambda attention: attention.qk_norm == "head_after",
    "shared keys": lambda attention: not attention.has_keys,
    "attention in chunks": lambda attention: attention.chunk is not None,
    "scaled queries": lambda attention: attention.query_scale is not None,
}


def unusual_parts(layers: Iterable[Layer]) -> set[str]:
    """Return the names of the layers' parts other than usual attention and dense feed-forwards."""
    layers = list(layers)
    parts = [part for layer in layers for part in layer.parts]
    others = {_NAMES[type(part)] for part in parts if type(part) in _NAMES}
    attention = [part for part in parts if isinstance(part, Attention)]
    others |= {name for name, is_part in _OF_ATTENTION.items() if any(map(is_part, attention))}
    others |= {"feed-forwards without a gate" for part in parts if isinstance(part, Dense) and not part.is_gated}
    others |= {"LayerNorm" for layer in layers if layer.norms.are_centred}
    others |= {"attention in parallel to the MLP" for layer in layers if layer.norms.parallel}
    return others | {"layers with a scale" for layer in layers if layer.has_scale}


def check_unusual_parts(layers: Iterable[Layer], device: str, computed: Set[str] = frozenset()) -> None:
    """Raise UnsupportedModelError if a layer has a part of `unusual_parts` that is not in `computed`."""
    if others := unusual_parts(layers) - computed:
        raise UnsupportedModelError(f"device {device} has no kernels for {', '.join(sorted(others))}: use device cpu")
