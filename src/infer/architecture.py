"""What a network is, as frozen values without a tensor: `families` makes it from a config, `transformer` runs it.

A layer says what it is, never whose it is. A new value is a field here and a line in `families`.
"""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Rope:
    """Rotary positions (arXiv:2104.09864): pair (i, i + dim / 2) turns by position × theta^(−2i / dim) / factor_i."""

    theta: float
    dim: int  # how many of a head's elements rotate
    frequency_factors: tuple[float, ...] | None = None  # dim / 2 divisors of the frequencies; None is all ones
    attention_factor: float = 1.0  # multiplies cos and sin


@dataclass(frozen=True)
class Layer:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope: Rope | None
    attention_scale: float  # multiplies q · k
    window: int | None = None  # a token sees itself and the window − 1 before it
    activation: Activation = "silu"
    has_qk_norm: bool = False
    has_post_norms: bool = False


@dataclass(frozen=True)
class Architecture:
    family: str  # for people to read; nothing may branch on it
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm_eps: float
    max_positions: int  # the context the model was made for
    embedding_scale: float = 1.0
    tied_embeddings: bool = False
