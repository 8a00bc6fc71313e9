"""Description of a network, as frozen values without tensors. `families` makes it from a config; `transformer` runs it.

A layer describes its computation, never its family. A new value is a field here and a line in `families`. A new kind of
part is a class here, and the changes that `docs/dev/adding.md` lists.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Literal, NamedTuple

from infer.compute.operands.feed_forwards import Dense, Experts, FeedForward, PerLayerInput
from infer.compute.operands.mixers import (
    Attention,
    GatedDeltaNet,
    LongRope,
    Mixer,
    QueryScale,
    Rope,
    Shapes,
    ShortConv,
    keeps,
)
from infer.errors import UnsupportedModelError


@dataclass(frozen=True)
class Norms:
    """The norms around each part of a layer.

    They are RMSNorm (arXiv:1910.07467) or, with `are_centred`, LayerNorm (arXiv:1607.06450), which subtracts the mean.
    """

    before: bool = True  # norm of the part's input
    after: bool = False  # norm of the part's result, before it is added to the residual stream
    of_sum: bool = False  # norm of the residual stream, after the part's result is added
    eps_after: float | None = None  # eps of the norms after; None: the eps of all norms
    are_centred: bool = False
    have_bias: bool = False
    skip_mixer: bool = False  # the mixer's input is the residual stream without a norm
    have_weight: bool = True
    # Both parts of a layer read the residual stream as it is before the layer, with the norms that they have before
    # them ("two"), or with the mixer's for both ("one"). None: the feed-forward reads it with the mixer's result.
    parallel: Literal["one", "two"] | None = None

    def shapes(self, name: str, hidden: int) -> Shapes:
        """Return the shape of each tensor of the norm with this name."""
        kinds = {"weight": self.have_weight, "bias": self.have_bias}
        return {f"{name}.{kind}": (hidden,) for kind, is_there in kinds.items() if is_there}

    @property
    def before_mixer(self) -> bool:
        """Return True if the mixer's input is normalised."""
        return self.before and not self.skip_mixer


@dataclass(frozen=True)
class TextInputs:
    """The rows that are added to a token's embedding. Encoders have a norm of the sum.

    One row is for the position, one for the type: the first text of a pair has type 0, the second type 1.
    """

    num_positions: int = 0  # rows of learned positions; 0: no learned positions
    num_types: int = 0
    has_norm: bool = True

    def shapes(self, hidden: int, norms: Norms) -> Shapes:
        """Return the shape of each tensor, by its name."""
        shapes: Shapes = {}
        if self.num_positions:
            shapes["model.embed_positions.weight"] = (self.num_positions, hidden)
        if self.num_types:
            shapes["model.embed_types.weight"] = (self.num_types, hidden)
        return shapes | norms.shapes("model.embed_norm", hidden) if self.has_norm else shapes


@dataclass(frozen=True)
class Layer:
    """A mixer, which moves information between tokens, then a feed-forward for each token; either may be missing."""

    mixer: Mixer | None
    feed_forward: FeedForward | None
    norms: Norms = Norms()
    per_layer_input: PerLayerInput | None = None
    has_scale: bool = False  # after the last part, the residual stream is multiplied by a number of the layer

    @property
    def parts(self) -> tuple[Mixer | FeedForward | PerLayerInput, ...]:
        """The existing parts, in the order in which they run."""
        return tuple(part for part in (self.mixer, self.feed_forward, self.per_layer_input) if part is not None)

    def shapes(self, hidden: int) -> Shapes:
        """Return the shape of each tensor, by its name within the layer."""
        shapes = {name: shape for part in self.parts for name, shape in part.shapes(hidden).items()}
        names = [name for name, part in (("attention", self.mixer), ("mlp", self.feed_forward)) if part is not None]
        for name in names:
            if self.norms.before_mixer if name == "attention" else self.norms.before and self.norms.parallel != "one":
                shapes |= self.norms.shapes(f"{name}_norm", hidden)
            if self.norms.after or self.norms.of_sum:
                shapes |= self.norms.shapes(f"post_{name}_norm", hidden)
        if self.has_scale:
            shapes["layer_scalar"] = (1,)
        return shapes


@dataclass(frozen=True)
class Architecture:
    family: str  # only for people; code must not branch on it
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm_eps: float
    max_positions: int  # the context for which the model was made
    embedding_scale: float = 1.0
    has_embedding_norm: bool = False  # a token's embedding is divided by its root mean square
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # after the scale: softcap × tanh(logit / softcap)
    tied_embeddings: bool = False
    text_inputs: TextInputs | None = None
    has_last_norm: bool = True
    has_head_bias: bool = False
    text_limit: int | None = None  # most tokens of a text for which an embedding model was made
    has_state_input: bool = False  # a head that drafts: each token's embedding is joined with a state of its model

    @property
    def reads_whole_texts(self) -> bool:
        """Return True for an encoder: a token attends to the whole text, so no text can be generated after it."""
        return any(not mixer.is_causal for mixer in self.attention)

    @property
    def norms(self) -> Norms:
        """The norms of the layers. Some layers may have no norm before their mixer."""
        return self.layers[-1].norms

    @property
    def attention(self) -> tuple[Attention, ...]:
        """The mixers that attend, in the order of their layers."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention))

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixers, in the order of their layers."""
        return tuple(layer.mixer for layer in self.layers if layer.mixer is not None)

    @property
    def cached_mixers(self) -> tuple[Mixer, ...]:
        """The mixers that keep values of every token, or a state. The cache has a layer for each, in this order."""
        return tuple(mixer for mixer in self.mixers if keeps(mixer))

    @property
    def cache_indices(self) -> tuple[int | None, ...]:
        """For each layer, the cache's layer that its mixer reads; None if it has no mixer."""
        indices, num_kept = list[int | None](), 0
        for layer in self.layers:
            shared = layer.mixer.shared_from if isinstance(layer.mixer, Attention) else None
            indices.append(None if layer.mixer is None else num_kept if shared is None else indices[shared])
            num_kept += keeps(layer.mixer)
        return tuple(indices)

    @property
    def per_layer_input(self) -> PerLayerInput | None:
        """The part of this kind. Either all layers have it, or none."""
        return self.layers[0].per_layer_input

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The different ropes of the layers."""
        return tuple({mixer.rope: None for mixer in self.attention if mixer.rope is not None})

    @property
    def query_scales(self) -> tuple[QueryScale, ...]:
        """The different scales of the layers' queries."""
        return tuple({mixer.query_scale: None for mixer in self.attention if mixer.query_scale is not None})

    @property
    def long_ropes(self) -> tuple[LongRope, ...]:
        """The different long ropes of the layers."""
        return tuple({rope.long: None for rope in self.ropes if rope.long is not None})

    @property
    def own_length(self) -> int:
        """The model's own context: all its positions, or less if its texts are limited."""
        return min(self.text_limit or self.max_positions, self.max_positions)

    @property
    def most_positions(self) -> int:
        """Longest context that may be requested. Some ropes can be stretched."""
        return int(self.max_positions * max((long.growth or 1.0 for long in self.long_ropes), default=1.0))


class ModelOutline(NamedTuple):
    """A model before it is loaded, known from its headers. A backend uses it to compile kernels."""

    architecture: Architecture
    types: Mapping[str, str]  # types of the loaded matrices, by name
    kv_type: str
    precision: str  # precision of the activations: exact or fast
    reads_experts: bool = False  # from a file, while the model runs


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
    "norms of q and k that subtract the mean": lambda attention: attention.qk_norm == "head_centred",
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
    others |= {"xIELU" for part in parts if isinstance(part, Dense) and part.activation == "xielu"}
    others |= {"LayerNorm" for layer in layers if layer.norms.are_centred}
    others |= {"attention in parallel to the MLP" for layer in layers if layer.norms.parallel}
    return others | {"layers with a scale" for layer in layers if layer.has_scale}


def check_unusual_parts(layers: Iterable[Layer], device: str, computed: Set[str] = frozenset()) -> None:
    """Raise UnsupportedModelError if a layer has a part of `unusual_parts` that is not in `computed`."""
    if others := unusual_parts(layers) - computed:
        raise UnsupportedModelError(f"device {device} has no kernels for {', '.join(sorted(others))}: use device cpu")
