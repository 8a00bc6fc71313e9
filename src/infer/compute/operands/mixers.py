"""The mixers of layers, which move information between tokens, as values: attention, convolutions, gated delta nets."""

from dataclasses import dataclass, replace
from typing import Literal

Shapes = dict[str, tuple[int, ...]]  # of a network's tensors, by their names
GateCurve = Literal["sigmoid", "softplus"]
MAX_HEADS = 4096  # per layer: each may have weights of its own in the norms of q and k
# The norm is over each head, before or after its rotation, or over all heads together. "head_centred" subtracts the
# mean of each head, and each head has weights of its own.
QKNorm = Literal["head", "head_unweighted", "head_after", "head_centred", "all"]
# Matrices that are never quantised here, because their errors add up along a text.
KEPT_AS_FLOATS = ("linear_attn.a_proj.weight", "linear_attn.b_proj.weight")


@dataclass(frozen=True)
class LongRope:
    """Changes of a rope for sequences of more than `beyond` tokens: factors, or a theta that grows with the context."""

    beyond: int
    frequency_factors: tuple[float, ...] | None = None
    growth: float | None = None  # theta × (growth × positions / beyond − growth + 1) ^ (dim / (dim − 2))


@dataclass(frozen=True)
class Rope:
    """Rotary positions (arXiv:2104.09864): pair (i, i + half) rotates by position × theta^(−2i / dim) / factor_i."""

    theta: float
    dim: int  # number of a head's elements that rotate; if odd, one more rotates
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
    """Queries that grow with their position. The factor is 1 + growth × log(1 + ⌊(position + offset) / period⌋)."""

    growth: float
    period: int
    offset: int = 0


@dataclass(frozen=True)
class Attention:
    """A mixer: softmax(q kᵀ × scale) v over the earlier tokens. It keeps keys and values of every token.

    With `shared_from` it has no keys and values of its own, and attends to those of an earlier layer of the same kind.
    Attention that is not causal also sees the later tokens: a network with it reads whole texts.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    scale: float  # multiplies q · k
    window: int | None = None  # a token sees itself and window − 1 tokens before it; if not causal, as many after it
    chunk: int | None = None  # a token sees the tokens of its own chunk up to itself; chunks begin at multiples
    softcap: float | None = None  # a score s becomes softcap × tanh(s / softcap)
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    qk_norm: QKNorm | None = None
    has_sinks: bool = False  # the softmax includes one more logit per head, whose share is dropped
    has_gate: bool = False  # a head's result is multiplied by gate_curve(gate · x), element by element
    gate_curve: GateCurve = "sigmoid"
    are_gates_of_heads: bool = False  # one gate per head, for all of its elements
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
        """The largest number of tokens that a token sees, if it does not see all earlier tokens."""
        return self.window if self.chunk is None else self.chunk

    @property
    def projected(self) -> tuple[tuple[str, int], ...]:
        """The matrices whose products are side by side, in order, with their rows: q, k, v and the gates."""
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
        if self.qk_norm == "head_centred":
            each = [("q", head) for head in range(self.num_heads)] + [("k", head) for head in range(self.num_kv_heads)]
            shapes |= {f"self_attn.{which}_norm.norms.{head}.weight": (self.head_dim,) for which, head in each}
        elif self.qk_norm and self.qk_norm != "head_unweighted":
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
    has_bias: bool = False  # both projections and the convolution have a bias

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
    """A mixer with a state S [key_dim, value_dim] per value head (arXiv:2412.06464). All numbers are float32.

    q, k and v are channels of silu(conv(qkv_proj(x))), a causal convolution of each channel as in `ShortConv`. For each
    token: S ← α S; u = β (v − Sᵀk); S ← S + k uᵀ; o = Sᵀq, with q / (|q| √key_dim) and k / |k| as q and k,
    α = exp(decay × softplus(a_proj(x) + dt_bias)) and β = beta_scale × sigmoid(b_proj(x)). The result is
    out_proj(norm(o) × silu(z_proj(x))).
    """

    num_key_heads: int
    num_value_heads: int  # a multiple of num_key_heads
    key_dim: int
    value_dim: int
    num_taps: int
    is_decay_log: bool = True  # files store log(−decay); otherwise decay itself
    are_heads_tiled: bool = False  # value head h uses key head h mod num_key_heads; otherwise neighbours share one
    are_parts_apart: bool = False  # files have separate matrices for q, k and v, and separate taps
    beta_scale: float = 1.0  # with 2, a token may reverse S in the direction of k
    norm_eps: float | None = None  # eps of the norm of o; None: the eps of all norms

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: q, k and v of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.value_features

    @property
    def value_features(self) -> int:
        """Columns of the values of all heads."""
        return self.num_value_heads * self.value_dim

    @property
    def _channels(self) -> dict[str, int]:
        """The channels of each matrix that files have for q, k and v, in order."""
        if not self.are_parts_apart:
            return {"qkv": self.num_channels}
        key_features = self.num_key_heads * self.key_dim
        return {"q": key_features, "k": key_features, "v": self.value_features}

    @property
    def projected(self) -> dict[str, int]:
        """The matrices whose products are side by side, in order, with their rows."""
        heads = self.num_value_heads
        return self._channels | {"z": self.value_features, "b": heads, "a": heads}

    @property
    def taps(self) -> dict[str, int]:
        """The tensors of the convolution's taps, in the order of its channels, with their rows."""
        channels = self._channels
        return {f"{which}_taps" if self.are_parts_apart else "taps": rows for which, rows in channels.items()}

    @property
    def widths(self) -> tuple[int, ...]:
        """Values per token of each tensor that ranks of a group gather."""
        return self.num_channels + self.value_features + 2 * self.num_value_heads, self.value_features

    def page_shapes(self, page_tokens: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the float32 tensors in a page of the cache, which `DeltaNetCache` names."""
        return (
            (page_tokens, self.num_channels),
            (self.num_value_heads, self.key_dim, self.value_dim),
            (self.num_key_heads, self.key_dim, page_tokens),
            (self.num_value_heads, page_tokens, self.value_dim),
            (self.num_value_heads, page_tokens),
        )

    def shapes(self, hidden: int) -> Shapes:
        """Return the shape of each tensor, by its name within the layer."""
        heads, named = self.num_value_heads, self.projected.items()
        shapes: Shapes = {f"linear_attn.{which}_proj.weight": (rows, hidden) for which, rows in named}
        shapes |= {f"linear_attn.{name}": (rows, self.num_taps) for name, rows in self.taps.items()}
        shapes |= {"linear_attn.dt_bias": (heads,)}
        shapes |= {"linear_attn.decay": (heads,), "linear_attn.norm.weight": (self.value_dim,)}
        shapes["linear_attn.out_proj.weight"] = (hidden, self.value_features)
        return shapes


Recurrent = ShortConv | GatedDeltaNet  # mixers that keep a state of the earlier tokens, instead of every token
Mixer = Attention | Recurrent


def keeps(mixer: Mixer | None) -> bool:
    """Return True if a mixer has its own layer of the cache."""
    return mixer is not None and (not isinstance(mixer, Attention) or mixer.has_keys)
