"""Description of a network, as frozen values without a tensor: `families` makes it from a config, `transformer` runs
it.

A layer describes what it computes, never which family it belongs to. A new value is a field here and a line in
`families`. A new kind of part is a class here, and what `docs/dev/design.md` lists.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Activation = Literal["silu", "gelu_tanh", "gelu", "gelu_sigmoid", "relu", "relu_squared", "clamped_swiglu"]
MAX_EXPERTS = 4096  # of a layer: each has tensors of its own
GateCurve = Literal["sigmoid", "softplus"]
QKNorm = Literal["head", "head_unweighted", "all"]  # over each head, or over all heads together
Shapes = dict[str, tuple[int, ...]]  # tensor name → shape
# Matrices that are never quantised here: what is lost of them adds up along a text.
KEPT_AS_FLOATS = ("linear_attn.a_proj.weight", "linear_attn.b_proj.weight")
# A table that stays in its file: a step reads the rows of its tokens.
PER_LAYER_TABLE = "model.embed_tokens_per_layer.weight"


@dataclass(frozen=True)
class LongRope:
    """Changes of a rope for sequences of more than `beyond` tokens: factors, or a theta that grows with the context."""

    beyond: int
    frequency_factors: tuple[float, ...] | None = None
    growth: float | None = None  # theta × (growth × positions / beyond − growth + 1) ^ (dim / (dim − 2))


@dataclass(frozen=True)
class Rope:
    """Rotary positions (arXiv:2104.09864): pair (i, i + half) turns by position × theta^(−2i / dim) / factor_i."""

    theta: float
    dim: int  # how many of a head's elements rotate; if odd, one more does
    frequency_factors: tuple[float, ...] | None = None  # `half` divisors of the frequencies; None is all ones
    attention_factor: float = 1.0  # multiplies cos and sin
    long: LongRope | None = None

    @property
    def half(self) -> int:
        return (self.dim + 1) // 2

    def sets(self, num_positions: int) -> tuple["Rope", ...]:
        """Return the ropes for a context of `num_positions`: for short sequences and, if they differ, for long ones."""
        if self.long is None or num_positions <= self.long.beyond:
            return (self,)
        theta, growth = self.theta, self.long.growth
        if growth is not None:
            theta *= (growth * num_positions / self.long.beyond - growth + 1) ** (self.dim / (self.dim - 2))
        return self, replace(self, theta=theta, frequency_factors=self.long.frequency_factors, long=None)


@dataclass(frozen=True)
class QueryScale:
    """Queries that grow with their position: × 1 + growth × log(1 + floor((position + offset) / period))."""

    growth: float
    period: int
    offset: int = 0


@dataclass(frozen=True)
class Attention:
    """A mixer: softmax(q kᵀ × scale) v over the tokens before. It keeps keys and values of every token.

    With `shared_from` it has neither, and attends to those of an earlier layer of the same kind. Attention that is not
    causal sees the tokens after, too: a network with it reads whole texts.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    scale: float  # multiplies q · k
    window: int | None = None  # a token sees itself and the window − 1 before it; if not causal, as many after it
    chunk: int | None = None  # a token sees the tokens of its own chunk up to itself: chunks begin at multiples
    softcap: float | None = None  # a score s becomes softcap × tanh(s / softcap)
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    qk_norm: QKNorm | None = None
    has_sinks: bool = False  # a logit of each head beside the scores in the softmax, whose share is nobody's
    has_gate: bool = False  # what a head attends to is multiplied by gate_curve(gate · x), element by element
    gate_curve: GateCurve = "sigmoid"
    are_gates_of_heads: bool = False  # a head has one gate, for all its elements
    has_v_norm: bool = False  # each head's v is divided by its root mean square
    are_values_keys: bool = False  # v is k as projected, before its norm and rotation
    shared_from: int | None = None  # the layer whose keys and values this one attends to
    query_scale: QueryScale | None = None
    is_causal: bool = True

    @property
    def has_keys(self) -> bool:
        """Return True if the layer makes keys and values, and keeps them in the cache."""
        return self.shared_from is None

    @property
    def most_seen(self) -> int | None:
        """The largest number of tokens that a token sees, if it does not see all tokens before it."""
        return self.window if self.chunk is None else self.chunk

    @property
    def projected(self) -> tuple[tuple[str, int], ...]:
        """The matrices whose products stand side by side, in order, with their rows: q, k, v and the gates."""
        kv = (("k", self.kv_features), ("k" if self.are_values_keys else "v", self.kv_features))
        gate = (("gate", self.num_heads if self.are_gates_of_heads else self.query_features),)
        return (("q", self.query_features), *(kv if self.has_keys else ()), *(gate if self.has_gate else ()))

    @property
    def query_features(self) -> int:
        """Columns of the queries of all heads, and of the attended values."""
        return self.num_heads * self.head_dim

    @property
    def kv_features(self) -> int:
        """Columns of the keys of all heads, and of the values."""
        return self.num_kv_heads * self.head_dim

    @property
    def widths(self) -> tuple[int, ...]:
        """Values per token of each tensor that ranks of a group gather."""
        return self.query_features, sum(rows for _, rows in self.projected)

    def shapes(self, hidden: int) -> Shapes:
        """Return the shape of each tensor, by its name within the layer."""
        wide, narrow = self.query_features, self.kv_features
        rows = dict(self.projected)
        shapes: Shapes = {f"self_attn.{which}_proj.weight": (count, hidden) for which, count in rows.items()}
        shapes["self_attn.o_proj.weight"] = (hidden, wide)
        if self.has_qkv_bias:
            shapes |= {f"self_attn.{which}_proj.bias": (count,) for which, count in rows.items()}
        if self.has_output_bias:
            shapes["self_attn.o_proj.bias"] = (hidden,)
        if self.qk_norm and self.qk_norm != "head_unweighted":
            sizes = (wide, narrow) if self.qk_norm == "all" else (self.head_dim, self.head_dim)
            normed = zip("qk" if self.has_keys else "q", sizes, strict=False)
            shapes |= {f"self_attn.{which}_norm.weight": (size,) for which, size in normed}
        if self.has_sinks:
            shapes["self_attn.sinks"] = (self.num_heads,)
        return shapes


@dataclass(frozen=True)
class ShortConv:
    """A mixer: out_proj(C × conv(B × u)) for [B, C, u] = in_proj(x), with a causal convolution of each channel.

    Channel c of a token is Σ taps[c, i] × (B × u)[c] of the token num_taps − 1 − i before it. The cache keeps B × u.
    """

    num_channels: int
    num_taps: int
    has_bias: bool = False  # of both projections and of the convolution

    @property
    def widths(self) -> tuple[int, ...]:
        """Values per token of each tensor that ranks of a group gather."""
        return 3 * self.num_channels, self.num_channels

    def shapes(self, hidden: int) -> Shapes:
        """Return the shape of each tensor, by its name within the layer."""
        shapes: Shapes = {"conv.in_proj.weight": (3 * self.num_channels, hidden)}
        shapes |= {"conv.taps": (self.num_channels, self.num_taps), "conv.out_proj.weight": (hidden, self.num_channels)}
        if self.has_bias:
            shapes |= {"conv.in_proj.bias": (3 * self.num_channels,), "conv.bias": (self.num_channels,)}
            shapes["conv.out_proj.bias"] = (hidden,)
        return shapes


@dataclass(frozen=True)
class GatedDeltaNet:
    """A mixer with a state S [key_dim, value_dim] for each value head (arXiv:2412.06464). All numbers are float32.

    q, k and v are channels of silu(conv(qkv_proj(x))), a causal convolution of each channel as in `ShortConv`. Each
    token does S ← α S; u = β (v − Sᵀk); S ← S + k uᵀ; o = Sᵀq, with q / (|q| √key_dim) and k / |k| as q and k,
    α = exp(decay × softplus(a_proj(x) + dt_bias)) and β = sigmoid(b_proj(x)). The result is
    out_proj(norm(o) × silu(z_proj(x))).
    """

    num_key_heads: int
    num_value_heads: int  # a multiple of num_key_heads
    key_dim: int
    value_dim: int
    num_taps: int
    is_decay_log: bool = True  # files store log(−decay); otherwise decay itself
    are_heads_tiled: bool = False  # value head h uses key head h mod num_key_heads; otherwise neighbours share one

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: q, k and v of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.value_features

    @property
    def value_features(self) -> int:
        """Columns of the values of all heads."""
        return self.num_value_heads * self.value_dim

    @property
    def widths(self) -> tuple[int, ...]:
        """Values per token of each tensor that ranks of a group gather."""
        return self.num_channels + self.value_features + 2 * self.num_value_heads, self.value_features

    def page_shapes(self, page_tokens: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the float32 tensors in a page of the cache: `delta_net_cache` names them."""
        return (
            (page_tokens, self.num_channels),
            (self.num_value_heads, self.key_dim, self.value_dim),
            (self.num_key_heads, self.key_dim, page_tokens),
            (self.num_value_heads, page_tokens, self.value_dim),
            (self.num_value_heads, page_tokens),
        )

    def shapes(self, hidden: int) -> Shapes:
        """Return the shape of each tensor, by its name within the layer."""
        heads = self.num_value_heads
        rows = {"qkv": self.num_channels, "z": self.value_features, "b": heads, "a": heads}
        shapes: Shapes = {f"linear_attn.{which}_proj.weight": (count, hidden) for which, count in rows.items()}
        shapes |= {"linear_attn.taps": (self.num_channels, self.num_taps), "linear_attn.dt_bias": (heads,)}
        shapes |= {"linear_attn.decay": (heads,), "linear_attn.norm.weight": (self.value_dim,)}
        shapes["linear_attn.out_proj.weight"] = (hidden, self.value_features)
        return shapes


@dataclass(frozen=True)
class Dense:
    """A feed-forward: down(activation(gate(x)) × up(x)). `clamped_swiglu` is not a factor of up, but changes both.

    Without a gate it is down(activation(up(x))).
    """

    intermediate_size: int
    activation: Activation = "silu"
    has_bias: bool = False
    is_gated: bool = True

    @property
    def widths(self) -> tuple[int, ...]:
        """Values per token of each tensor that ranks of a group gather."""
        return (self.intermediate_size,)

    def shapes(self, hidden: int) -> Shapes:
        """Return the shape of each tensor, by its name within the layer."""
        shapes = _mlp_shapes("mlp", hidden, self.intermediate_size, has_bias=self.has_bias)
        return {name: shape for name, shape in shapes.items() if self.is_gated or "gate_proj" not in name}


@dataclass(frozen=True)
class Router:
    """How a token chooses its experts, and how it weighs them. All numbers are float32.

    A token has a score for each expert. It chooses the experts with the highest scores (plus a correction, if there is
    one); among equal ones the lower number. Their weights are the scores of the chosen.
    """

    num_experts: int
    num_chosen: int
    # The last two choose by logits, and are taken of the chosen experts' logits.
    scores: Literal["softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen"]
    is_normalized: bool = False  # the chosen scores are divided by (their sum + floor)
    floor: float = 0.0
    scale: float = 1.0  # multiplies the weights
    has_bias: bool = False  # of the logits
    has_correction: bool = False  # is added to the scores to choose, and not to weigh
    has_expert_scales: bool = False  # each expert's weight is multiplied by a number of the expert at last
    weighs_inputs: bool = False  # the weights multiply what the experts are given, and not their results

    def shapes(self, hidden: int) -> Shapes:
        shapes: Shapes = {"mlp.router.weight": (self.num_experts, hidden)}
        if self.has_expert_scales:
            shapes["mlp.router.expert_scales"] = (self.num_experts,)
        if self.has_bias:
            shapes["mlp.router.bias"] = (self.num_experts,)
        if self.has_correction:
            shapes["mlp.router.correction"] = (self.num_experts,)
        return shapes


@dataclass(frozen=True)
class Experts:
    """A feed-forward: the weighted sum of what the chosen experts give, and of what all tokens' shared expert gives.

    An expert is what `Dense` is. The matrices of all experts are stacked: expert e has the rows from e × rows on.
    """

    router: Router
    intermediate_size: int  # of each expert
    activation: Activation = "silu"
    has_bias: bool = False
    shared_size: int = 0  # intermediate size of the shared expert; 0: there is none
    has_shared_gate: bool = False  # the shared expert's result is multiplied by sigmoid(gate · x)
    # The router and the chosen experts have norms of their own before them. Their sum and the shared expert's result
    # have one each after them. The norms of the layer are the shared expert's before, and that of all together after.
    has_norms: bool = False

    @property
    def shared(self) -> Dense:
        """The shared expert."""
        return Dense(self.shared_size, self.activation, self.has_bias)

    @property
    def shared_module(self) -> str:
        """The beginning of the names of the shared expert's tensors: in some models it is the layer's usual MLP."""
        return "mlp" if self.has_norms else "mlp.shared_expert"

    @property
    def widths(self) -> tuple[int, ...]:
        """Values per token of each tensor that ranks of a group gather."""
        return self.router.num_chosen * self.intermediate_size, self.shared_size

    def shapes(self, hidden: int) -> Shapes:
        """Return the shape of each tensor, by its name within the layer."""
        shapes = self.router.shapes(hidden)
        for expert in range(self.router.num_experts):
            shapes |= _mlp_shapes(f"mlp.experts.{expert}", hidden, self.intermediate_size, has_bias=self.has_bias)
        if self.shared_size:
            shapes |= _mlp_shapes(self.shared_module, hidden, self.shared_size, has_bias=self.has_bias)
        if self.has_norms:
            shapes |= {f"mlp.{name}_norm.weight": (hidden,) for name in _EXPERT_NORMS}
        if self.has_shared_gate:
            shapes["mlp.shared_gate.weight"] = (1, hidden)
        return shapes


_EXPERT_NORMS = ("router", "experts", "post_experts", "post_shared")


def _mlp_shapes(at: str, hidden: int, intermediate: int, *, has_bias: bool) -> Shapes:
    shapes: Shapes = {f"{at}.{which}_proj.weight": (intermediate, hidden) for which in ("gate", "up")}
    shapes[f"{at}.down_proj.weight"] = (hidden, intermediate)
    if has_bias:
        shapes |= {f"{at}.{which}_proj.bias": (intermediate,) for which in ("gate", "up")}
        shapes[f"{at}.down_proj.bias"] = (hidden,)
    return shapes


@dataclass(frozen=True)
class PerLayerInput:
    """A part after the feed-forward: norm(projection(activation(gate(x)) × p)), for p of a token and a layer.

    All layers' p are made before the first layer of what is embedded there, x₀, and of a table with a row for each
    token: p = (norm(model_projection(x₀)) + √dim × row) / √2, in which each layer has `dim` columns.
    """

    dim: int
    activation: Activation

    @property
    def widths(self) -> tuple[int, ...]:
        """Values per token of each tensor that ranks of a group gather."""
        return (self.dim,)

    def shapes(self, hidden: int) -> Shapes:
        """Return the shape of each tensor, by its name within the layer."""
        shapes: Shapes = {"per_layer_input_gate.weight": (self.dim, hidden)}
        return shapes | {
            "per_layer_projection.weight": (hidden, self.dim),
            "post_per_layer_input_norm.weight": (hidden,),
        }

    def model_shapes(self, hidden: int, vocab: int, num_layers: int) -> Shapes:
        """Return the shape of each tensor that all layers share, by its name."""
        wide = num_layers * self.dim
        return {
            PER_LAYER_TABLE: (vocab, wide),
            "model.per_layer_model_projection.weight": (wide, hidden),
            "model.per_layer_projection_norm.weight": (self.dim,),
        }


Recurrent = ShortConv | GatedDeltaNet  # mixers that keep a state of what came before, instead of every token
Mixer = Attention | Recurrent
FeedForward = Dense | Experts


def keeps(mixer: Mixer | None) -> bool:
    """Return True if a mixer has a layer of the cache of its own."""
    return mixer is not None and (not isinstance(mixer, Attention) or mixer.has_keys)


@dataclass(frozen=True)
class Norms:
    """The norms around each part of a layer.

    They are RMSNorm (arXiv:1910.07467) or, with `are_centred`, LayerNorm (arXiv:1607.06450), which subtracts the mean.
    """

    before: bool = True  # of the part's input
    after: bool = False  # of the part's result, before it is added to the residual stream
    of_sum: bool = False  # of the residual stream, after the part's result is added to it
    eps_after: float | None = None  # of the norms after; None: that of all norms
    are_centred: bool = False
    have_bias: bool = False
    skip_mixer: bool = False  # the mixer's input is the residual stream as it is

    def shapes(self, name: str, hidden: int) -> Shapes:
        """Return the shape of each tensor of the norm of this name."""
        return {f"{name}.{kind}": (hidden,) for kind in (("weight", "bias") if self.have_bias else ("weight",))}

    @property
    def before_mixer(self) -> bool:
        """Return True if the mixer's input is normalised."""
        return self.before and not self.skip_mixer


@dataclass(frozen=True)
class TextInputs:
    """The rows that an encoder adds to a token's embedding, before a norm of the sum.

    One row is for the position, one for the type: the first text of a pair has type 0, the second type 1.
    """

    num_positions: int = 0  # rows of learned positions; 0: none
    num_types: int = 0

    def shapes(self, hidden: int, norms: Norms) -> Shapes:
        """Return the shape of each tensor, by its name."""
        shapes: Shapes = {}
        if self.num_positions:
            shapes["model.embed_positions.weight"] = (self.num_positions, hidden)
        if self.num_types:
            shapes["model.embed_types.weight"] = (self.num_types, hidden)
        return shapes | norms.shapes("model.embed_norm", hidden)


@dataclass(frozen=True)
class Layer:
    """A mixer, which moves information between tokens, then a feed-forward for each token; either may be missing."""

    mixer: Mixer | None
    feed_forward: FeedForward | None
    norms: Norms = Norms()
    per_layer_input: PerLayerInput | None = None
    has_scale: bool = False  # the residual stream is multiplied by a number of the layer after its last part

    @property
    def parts(self) -> tuple[Mixer | FeedForward | PerLayerInput, ...]:
        """The parts that there are, in the order in which they run."""
        return tuple(part for part in (self.mixer, self.feed_forward, self.per_layer_input) if part is not None)

    def shapes(self, hidden: int) -> Shapes:
        """Return the shape of each tensor, by its name within the layer."""
        shapes = {name: shape for part in self.parts for name, shape in part.shapes(hidden).items()}
        names = [name for name, part in (("attention", self.mixer), ("mlp", self.feed_forward)) if part is not None]
        for name in names:
            if self.norms.before_mixer if name == "attention" else self.norms.before:
                shapes |= self.norms.shapes(f"{name}_norm", hidden)
            if self.norms.after or self.norms.of_sum:
                shapes |= self.norms.shapes(f"post_{name}_norm", hidden)
        if self.has_scale:
            shapes["layer_scalar"] = (1,)
        return shapes


@dataclass(frozen=True)
class Architecture:
    family: str  # for people to read; nothing may branch on it
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm_eps: float
    max_positions: int  # the context the model was made for
    embedding_scale: float = 1.0
    has_embedding_norm: bool = False  # a token's embedding is divided by its root mean square
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # after the scale: softcap × tanh(logit / softcap)
    tied_embeddings: bool = False
    text_inputs: TextInputs | None = None
    has_last_norm: bool = True

    @property
    def reads_whole_texts(self) -> bool:
        """Return True for an encoder: a token sees the whole text, so nothing can be generated after it."""
        return any(not mixer.is_causal for mixer in self.attention)

    @property
    def norms(self) -> Norms:
        """The norms of the layers, of which some may skip their mixer's."""
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
        """The mixers that keep something of every token or a state. The cache has a layer for each, in this order."""
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
        """The part of this kind, which all layers or none have."""
        return self.layers[0].per_layer_input

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The layers' ropes, each once."""
        return tuple({mixer.rope: None for mixer in self.attention if mixer.rope is not None})

    @property
    def query_scales(self) -> tuple[QueryScale, ...]:
        """The scales of the layers' queries, each once."""
        return tuple({mixer.query_scale: None for mixer in self.attention if mixer.query_scale is not None})

    @property
    def long_ropes(self) -> tuple[LongRope, ...]:
        """The layers' long ropes, each once."""
        return tuple({rope.long: None for rope in self.ropes if rope.long is not None})

    @property
    def most_positions(self) -> int:
        """Longest context that may be requested: some ropes can be stretched."""
        return int(self.max_positions * max((long.growth or 1.0 for long in self.long_ropes), default=1.0))


class ModelOutline(NamedTuple):
    """A model before it is loaded, known from its headers. A backend compiles kernels from it."""

    architecture: Architecture
    types: Mapping[str, str]  # of the loaded matrices, by name
    kv_type: str
    precision: str  # of the activations: exact or fast
