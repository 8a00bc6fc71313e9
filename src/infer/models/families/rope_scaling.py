"""Rope settings → `Rope`: every kind of scaling.

Frequencies are theta^(−2i / dim). A kind of scaling divides each frequency by its own factor, or changes theta. The
formulas are those of Hugging Face's modeling_rope_utils.py.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from infer.compute.operands.mixers import LongRope, Rope
from infer.errors import ModelError, UnsupportedModelError
from infer.models.families.config_values import (
    Config,
    choice,
    count,
    flag,
    optional_positive,
    positive,
    positives,
)


def make_rope(config: Config, head_dim: int, given: Config) -> Rope:
    """Return the rope of a layer.

    `given` has the rope settings as the readers in `ropes` return them. `config` has other values that some kinds of
    scaling need.
    """
    name = "rope_type" if "rope_type" in given else "type"
    partial = 1.0 if given.get(name) == "proportional" else positive(given, "partial_rotary_factor", 1.0)
    rope = Rope(theta=positive(given, "rope_theta"), dim=int(head_dim * partial))
    if not 0 < 2 * rope.half <= head_dim:
        raise ModelError(f"config: {rope.dim} elements of a head cannot rotate in pairs if head_dim is {head_dim}")
    if config.get("rope_frequency_factors") is not None:  # a GGUF file stores the factors themselves
        return replace(rope, frequency_factors=positives(config, "rope_frequency_factors", rope.half))
    scaled: Callable[[Rope, Config, Config], Rope] = choice({"type": "default", **given}, name, _KINDS)
    return scaled(rope, given, config)


def _proportional(rope: Rope, given: Config, config: Config) -> Rope:
    """Rotate only the first pairs of a head, with the frequencies that they would have if all pairs rotated."""
    partial = positive(given, "partial_rotary_factor", 1.0)
    num_turned = int(partial * rope.dim // 2)
    if not 0 < num_turned <= rope.half:
        raise ModelError(f"config: partial_rotary_factor must be above 0 and at most 1, got {partial:g}")
    factor = positive(given, "factor", 1.0)
    return replace(rope, frequency_factors=(factor,) * num_turned + (math.inf,) * (rope.half - num_turned))


def _dynamic(rope: Rope, given: Config, config: Config) -> Rope:
    """Scale by NTK: theta increases if the context is longer than the model was made for."""
    if rope.dim <= 2:
        raise UnsupportedModelError("rope_type 'dynamic' needs more than 2 elements that rotate")
    return replace(rope, long=LongRope(count(config, "max_position_embeddings"), growth=positive(given, "factor")))


def _llama3(rope: Rope, given: Config, config: Config) -> Rope:
    """Scale as in Llama 3.1: slow long waves by `factor`, keep short waves, and blend smoothly between them."""
    factor, low, high = (positive(given, name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise ModelError(f"config: high_freq_factor must be above low_freq_factor={low:g}, got {high:g}")
    context = _original_positions(given, config)
    factors = []
    for pair in range(rope.half):
        waves = context / (2 * math.pi * rope.theta ** (2 * pair / rope.dim))  # turns within the original context
        kept = min(max((waves - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - kept) / factor + kept))
    return replace(rope, frequency_factors=tuple(factors))


def _yarn(rope: Rope, given: Config, config: Config) -> Rope:
    """Scale as in arXiv:2309.00071: keep pairs that turn often in the original context, slow pairs that turn rarely."""
    if rope.dim % 2 or rope.theta <= 1:
        raise UnsupportedModelError(f"rope_type 'yarn' needs an even number of elements and rope_theta above 1: {rope}")
    context = _original_positions(given, config)
    factor = positive(given, "factor", count(config, "max_position_embeddings") / context)

    def pair_that_turns(times: float) -> float:
        return rope.dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = (pair_that_turns(positive(given, *bound)) for bound in (("beta_fast", 32.0), ("beta_slow", 1.0)))
    if "truncate" not in given or flag(given, "truncate"):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    span = high - low or 0.001
    kept = [1 - min(max((pair - low) / span, 0.0), 1.0) for pair in range(rope.half)]
    return replace(
        rope,
        frequency_factors=tuple(1 / ((1 - share) / factor + share) for share in kept),
        attention_factor=_yarn_attention_factor(given, factor),
    )


def _yarn_attention_factor(given: Config, factor: float) -> float:
    def growth(scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if (attention_factor := optional_positive(given, "attention_factor")) is not None:
        return attention_factor
    if given.get("mscale") and given.get("mscale_all_dim"):
        return growth(positive(given, "mscale")) / growth(positive(given, "mscale_all_dim"))
    return growth()


def _longrope(rope: Rope, given: Config, config: Config) -> Rope:
    """Scale as in arXiv:2402.13753: one set of factors up to the original length, another for longer contexts."""
    context = _original_positions(given, config)
    factor = positive(given, "factor", count(config, "max_position_embeddings") / context)
    grown = math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 and context > 1 else 1.0
    return replace(
        rope,
        frequency_factors=positives(given, "short_factor", rope.half),
        attention_factor=positive(given, "attention_factor", grown),
        long=LongRope(context, frequency_factors=positives(given, "long_factor", rope.half)),
    )


def _original_positions(given: Config, config: Config) -> int:
    """Return the context length before scaling.

    As in Hugging Face's code, a value next to the rope settings overrides the value in these settings.
    """
    name = "original_max_position_embeddings"
    return count(
        config if config.get(name) is not None else {**config, **given},
        name,
        default=count(config, "max_position_embeddings"),
    )


_KINDS: dict[str, Callable[[Rope, Config, Config], Rope]] = {
    "default": lambda rope, given, config: rope,
    "backwards": lambda rope, given, config: replace(rope, frequency_factors=(-1.0,) * rope.half),
    "proportional": _proportional,
    "linear": lambda rope, given, config: replace(rope, frequency_factors=(positive(given, "factor"),) * rope.half),
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
