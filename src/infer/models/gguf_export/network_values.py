"""A network → GGUF's keys under the architecture's name, by the list of keys from which `files.config` reads them.

The settings of the network are named as in that list, and its keys are written whose settings the network has.
llama.cpp has constants for everything else; `round_trip` refuses a network for which they are wrong.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from infer.compute.operands.architecture import Architecture
from infer.compute.operands.feed_forwards import Dense, Experts
from infer.compute.operands.mixers import Attention, GatedDeltaNet, ShortConv
from infer.files.gguf.forms import ENCODER_KEYS, KEYS, GGUFForm, Key
from infer.models.families.config_values import Config
from infer.models.gguf_export.values import Value

_SIGMOID = 2  # a value of `expert_gating_func`


def decoder_values(form: GGUFForm, config: Config, architecture: Architecture, ropes: Config) -> dict[str, Value]:
    """Return the keys of a decoder.

    Args:
        form: The form of the architecture's files.
        config: The config as its family reads it.
        architecture: The network of this config.
        ropes: The settings of its ropes.
    """
    attention = architecture.attention
    settings = {
        **config,
        "num_hidden_layers": len(architecture.layers),
        "max_position_embeddings": architecture.own_length,
        "is_causal": False if architecture.reads_whole_texts else None,
        "attn_logit_softcapping": attention[0].softcap if attention else None,
        "final_logit_softcapping": architecture.logit_softcap,
        **_heads(architecture),
        **_windows(form, config, architecture),
        **_sizes(form, config, architecture),
        **_delta_nets(config, architecture),
        **ropes,
    }
    if architecture.logit_scale != 1:
        settings.setdefault("logits_scaling", architecture.logit_scale)
    return values_of(KEYS, form, settings)


def values_of(keys: Iterable[Key], form: GGUFForm, settings: Config) -> dict[str, Value]:
    """Return the values of the keys whose settings are not None, in the order of the keys."""
    written = [each for each in keys if each.needs != "form" or each.key in form.keys]
    values = {each.key: (each.kind, settings.get(each.name)) for each in written}
    return {
        key: float(value) if kind == "real" else value for key, (kind, value) in values.items() if value is not None
    }


def encoder_values(form: GGUFForm, config: Config, architecture: Architecture) -> dict[str, Value]:
    """Return the keys of an encoder. Windows of ModernBERT are counted over both sides, as in its config."""
    attention, dense = architecture.attention, architecture.layers[0].feed_forward
    assert isinstance(dense, Dense)
    full = [index for index, mixer in enumerate(attention) if mixer.window is None]
    wide = next((mixer.rope for mixer in attention if mixer.window is None), None)
    narrow = next((mixer.rope for mixer in attention if mixer.window is not None), None)
    settings: dict[str, Any] = {
        "num_hidden_layers": len(architecture.layers),
        "max_position_embeddings": architecture.own_length,
        "hidden_size": architecture.hidden_size,
        "vocab_size": architecture.vocab_size,
        "intermediate_size": dense.intermediate_size,
        "num_attention_heads": attention[0].num_heads,
        "layer_norm_eps": architecture.norm_eps,
        "is_causal": False,
    }
    if wide is not None:
        settings |= {"global_rope_theta": wide.theta, "rotated_dim": wide.dim}
    if narrow is not None:
        settings |= {"local_rope_theta": narrow.theta, "local_attention": config.get("local_attention", 128)}
        settings["global_attn_every_n_layers"] = full[1] if len(full) > 1 else len(attention)
    return values_of(ENCODER_KEYS, form, settings)


def _heads(architecture: Architecture) -> dict[str, Any]:
    """Return the numbers and sizes of heads. Layers with a short convolution have no heads of keys."""
    attention = architecture.attention
    mixers = [layer.mixer for layer in architecture.layers]
    has_convolutions = any(isinstance(mixer, ShortConv) for mixer in mixers)
    kv_heads = [mixer.num_kv_heads if isinstance(mixer, Attention) else 0 for mixer in mixers]
    wide = next((mixer.head_dim for mixer in attention if mixer.window is None), attention[0].head_dim)
    return {
        "num_attention_heads": _one_or_all([mixer.num_heads for mixer in attention]),
        "num_key_value_heads": kv_heads if has_convolutions else _one_or_all([each for each in kv_heads if each]),
        "head_dim": wide,
        "windowed_head_dim": next((mixer.head_dim for mixer in attention if mixer.window is not None), wide),
        "num_kv_shared_layers": sum(mixer.shared_from is not None for mixer in attention),
        "hidden_size_per_layer_input": getattr(architecture.per_layer_input, "dim", 0),
    }


def _windows(form: GGUFForm, config: Config, architecture: Architecture) -> dict[str, Any]:
    """Return the size of windows, and the layers with a window if other layers have none."""
    attention = architecture.attention
    have_windows = [mixer.window is not None for mixer in attention]
    if any(have_windows):
        kinds = None if all(have_windows) else have_windows
        return {"sliding_window": config["sliding_window"], "sliding_window_pattern": kinds}
    has_chunks = any(mixer.chunk is not None for mixer in attention)
    return {"sliding_window": 0 if form.writes_zero_window and not has_chunks else None, "sliding_window_pattern": None}


def _sizes(form: GGUFForm, config: Config, architecture: Architecture) -> dict[str, Any]:
    """Return the sizes of feed-forwards, and the settings of experts."""
    parts = [layer.feed_forward for layer in architecture.layers]
    experts = next((part for part in parts if isinstance(part, Experts)), None)
    sizes = [size for part in parts if (size := _dense_size(part)) is not None]
    unused = config.get("intermediate_size_mlp", config.get("intermediate_size"))  # files have this key anyway
    settings = {"intermediate_size": _one_or_all(sizes) if sizes else unused}
    return settings | (dict.fromkeys(_OF_EXPERTS) if experts is None else _experts(form, experts, parts))


_OF_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")


def _dense_size(part: Dense | Experts | None) -> int | None:
    if isinstance(part, Dense):
        return part.intermediate_size
    return part.shared_size if isinstance(part, Experts) and part.has_norms else None


def _experts(form: GGUFForm, experts: Experts, parts: Sequence[Dense | Experts | None]) -> dict[str, Any]:
    router = experts.router
    is_counted = experts.has_norms or "expert_shared_count" in form.keys  # then files do not have the size
    return {
        "num_experts": router.num_experts,
        "num_experts_per_tok": router.num_chosen,
        "moe_intermediate_size": experts.intermediate_size,
        "shared_expert_intermediate_size": None if is_counted else experts.shared_size or None,
        "n_group": None,  # only one group is supported
        "n_shared_experts": experts.shared_size // experts.intermediate_size,
        "expert_gating_func": _SIGMOID,
        "norm_topk_prob": router.is_normalized,
        "routed_scaling_factor": router.scale,
        "first_k_dense_replace": next(i for i, part in enumerate(parts) if isinstance(part, Experts)),
    }


def _delta_nets(config: Config, architecture: Architecture) -> dict[str, Any]:
    """Return the settings of delta nets that configs do not have, or that have defaults."""
    flags = [isinstance(layer.mixer, GatedDeltaNet) for layer in architecture.layers]
    features = config.get("linear_num_value_heads", 0) * config.get("linear_value_head_dim", 0)
    every = config.get("full_attention_interval", 4)
    return {"linear_value_features": features, "recurrent_layers": flags, "full_attention_interval": every}


def _one_or_all(values: list[int]) -> int | list[int]:
    """Return the value of all layers if it is equal, or else a list with one value per layer."""
    return values[0] if len(set(values)) == 1 else values
