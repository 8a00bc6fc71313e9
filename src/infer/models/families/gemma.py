"""Gemma's settings of layers: each kind has its own rotation, and in Gemma 4 its own heads."""

from infer.compute.operands.feed_forwards import Activation, PerLayerInput
from infer.errors import ModelError, UnsupportedModelError
from infer.models.families.config_values import Config, count, flag, positive, settings
from infer.models.families.layer_kinds import FULL, gemma4_kinds


def gemma3_rope(config: Config, kind: str) -> Config:
    """Return Gemma 3's rope settings.

    Layers with full attention use the settings of the flat dialect. Windowed layers have only their own theta.
    """
    nested = settings(settings(config, "rope_parameters"), kind)
    if kind == FULL:
        return {"rope_theta": positive(config, "rope_theta", 1_000_000.0), **nested, **settings(config, "rope_scaling")}
    return {"rope_theta": positive(config, "rope_local_base_freq", 10_000.0), **nested}


def gemma4_rope(config: Config, kind: str) -> Config:
    """Return Gemma 4's rope settings. A GGUF file has a theta for each kind, and the factors of full layers."""
    given = settings(settings(config, "rope_parameters"), kind)
    if kind == FULL:
        turned = given or {"rope_type": "proportional", "partial_rotary_factor": 0.25}
        return {"rope_theta": positive(config, "rope_theta", 1_000_000.0), **turned}
    return {"rope_theta": positive(config, "rope_local_base_freq", 10_000.0), **given}


def gemma4_of_kind(config: Config, kind: str, is_rotated: bool) -> Config:
    """Return Gemma 4's settings for layers of a kind: full attention has another number and size of heads."""
    if kind != FULL:
        return {**config, "attention_k_eq_v": False, "rope_frequency_factors": None, **_of_layers(config, kind)}
    own = {"head_dim": config["global_head_dim"]}
    if flag(config, "attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
        own["num_key_value_heads"] = config["num_global_key_value_heads"]
    return {**config, **own, **_of_layers(config, kind)}


def gemma4_per_layer_input(config: Config, activation: Activation) -> PerLayerInput | None:
    """Return the use of a token's own input in each layer, in E2B and E4B; None in larger models."""
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
