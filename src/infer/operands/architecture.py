"""Description of a network, as frozen values without a tensor: `families` makes it from a config, `transformer` runs
it.

A layer describes what it computes, never which family it belongs to. A new value is a field here and a line in
`families`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Activation = Literal["silu", "gelu_tanh", "gelu", "gelu_sigmoid", "relu", "relu_squared"]


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
class Layer:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope: Rope | None
    attention_scale: float  # multiplies q · k
    window: int | None = None  # a token sees itself and the window − 1 before it
    softcap: float | None = None  # a score s becomes softcap × tanh(s / softcap)
    activation: Activation = "silu"
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_pre_norms: bool = True
    has_post_norms: bool = False
    qk_norm: Literal["head", "all"] | None = None  # over each head, or over all of them together


@dataclass(frozen=True)
class Architecture:
    family: str  # for people to read; nothing may branch on it
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm_eps: float
    max_positions: int  # the context the model was made for
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # after the scale: softcap × tanh(logit / softcap)
    tied_embeddings: bool = False

    @property
    def long_ropes(self) -> tuple[LongRope, ...]:
        """The layers' long ropes, each once."""
        return tuple({layer.rope.long: None for layer in self.layers if layer.rope and layer.rope.long})

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
