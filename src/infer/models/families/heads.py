"""Config → heads of layers, gates of attention's results, and settings of layers of a kind or with an own input."""

from collections.abc import Sequence

from infer.compute.operands.feed_forwards import Activation, PerLayerInput
from infer.compute.operands.mixers import GateCurve, QueryScale
from infer.errors import ModelError, UnsupportedModelError
from infer.models.families.config_values import Config, count, flag, of_layers, positive, settings
from infer.models.families.layer_kinds import FULL, gemma4_kinds


def heads_of_layers(config: Config, num_layers: int) -> Sequence[int]:
    """Return the number of heads of each layer, which `num_attention_heads_per_layer` may list."""
    name = "num_attention_heads_per_layer"
    given = of_layers(config, name, num_layers, f"{num_layers} numbers")
    return (
        [count(config, "num_attention_heads")] * num_layers
        if given is None
        else [count({name: each}, name) for each in given]
    )


def sigmoid_of_elements(config: Config) -> tuple[GateCurve, bool]:
    return "sigmoid", False


def sigmoid_without_bias(config: Config) -> tuple[GateCurve, bool]:
    """Return sigmoid, one gate per element. Raises UnsupportedModelError for biases, which these gates do not have."""
    if config.get("attention_bias"):
        name = config["model_type"]
        raise UnsupportedModelError(f"attention_bias=true is not supported for {name}, whose gates have no bias")
    return sigmoid_of_elements(config)


def sigmoid_of_heads(config: Config) -> tuple[GateCurve, bool]:
    """Return sigmoid, one gate per head without a bias."""
    return sigmoid_without_bias(config)[0], True


def laguna_gates(config: Config) -> tuple[GateCurve, bool]:
    """Return Laguna's gates: softplus, by default one per head; `gating` can set one per element."""
    sigmoid_without_bias(config)
    gating = config.get("gating", True)
    if gating not in (True, "per-head", "per-element"):
        raise UnsupportedModelError(f"gating={gating!r:.60} is not supported for laguna: true, per-head or per-element")
    return "softplus", gating != "per-element"


def muse_of_kind(config: Config, kind: str, is_rotated: bool) -> Config:
    """Return Muse-Glimmer's settings, with the factor of its normalised queries multiplied into the scores' factor."""
    factor = positive(config, "qk_scale_factor")
    return {**config, "attention_multiplier": factor * count(config, "head_dim") ** -0.5}


def llama4_of_kind(config: Config, kind: str, is_rotated: bool) -> Config:
    """Return Llama 4's settings of layers: those that rotate have norms, and the others scale their queries.

    Its norms have no weights and are applied after the rotation. A rotation keeps the length of a head, so norms before
    the rotation, as computed here, give the same result. The family refuses ropes that change the length.
    """
    has_norms, has_scale = flag(config, "use_qk_norm"), flag(config, "attn_temperature_tuning")
    return {**config, "use_qk_norm": has_norms and is_rotated, "attn_temperature_tuning": has_scale and not is_rotated}


def llama4_scale(config: Config) -> QueryScale | None:
    if not flag(config, "attn_temperature_tuning"):
        return None
    return QueryScale(positive(config, "attn_scale"), count(config, "floor_scale"), offset=1)


def gemma4_of_kind(config: Config, kind: str, is_rotated: bool) -> Config:
    """Return Gemma 4's settings for layers of a kind: full attention has another number and size of heads."""
    if kind != FULL:
        return {**config, "attention_k_eq_v": False, "rope_frequency_factors": None, **_of_layers(config, kind)}
    own = {"head_dim": config["global_head_dim"]}
    if flag(config, "attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
        own["num_key_value_heads"] = config["num_global_key_value_heads"]
    return {**config, **own, **_of_layers(config, kind)}


def per_layer_input(config: Config, activation: Activation) -> PerLayerInput | None:
    """Return the use of a token's own input in each layer, if a config has one, as in Gemma 4's E2B and E4B."""
    if config.get("hidden_size_per_layer_input") in (None, 0):
        return None
    vocab_size, num_rows = count(config, "vocab_size"), config.get("vocab_size_per_layer_input")
    if num_rows not in (None, vocab_size):
        raise UnsupportedModelError(
            f"vocab_size_per_layer_input={num_rows!r:.60} is not supported: it must be vocab_size={vocab_size}"
        )
    return PerLayerInput(count(config, "hidden_size_per_layer_input"), activation)


def _of_layers(config: Config, kind: str) -> Config:
    """Return the changes for layers of a kind in `per_layer_config`, which transformers 5.24 writes."""
    layers = settings(config, "per_layer_config")
    kinds = gemma4_kinds(config, count(config, "num_hidden_layers"))
    each = [settings(layers, str(index)) for index, own in enumerate(kinds) if own == kind]
    if any(changed != each[0] for changed in each[1:]):
        raise ModelError(f"per_layer_config must have equal values for all layers of kind {kind}")
    return each[0] if each else {}
