"""A network → GGUF's keys under the architecture's name, by the list of keys from which `files.config` reads them.

The settings of the network are named as in that list, and its keys are written whose settings the network has.
llama.cpp has constants for everything else; `plan` refuses a network for which they are wrong.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from infer.compute.operands.architecture import Architecture
from infer.compute.operands.feed_forwards import Dense, Experts
from infer.compute.operands.mixers import Attention, GatedDeltaNet, Rope, ShortConv
from infer.files.gguf.forms import SIGMOID, GGUFForm
from infer.files.gguf.gguf_writer import Value
from infer.files.gguf.keys import ENCODER_KEYS, SCALING_KEYS, Key
from infer.models.families import as_read, family_of
from infer.models.families.config_values import Config
from infer.models.families.layer_kinds import FULL, SLIDING

_OF_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
_ORIGINAL = "original_max_position_embeddings"
_NO_ROTATION = 1e30  # llama.cpp's factor for a pair that does not rotate
_MROPE_SECTIONS = [11, 11, 10, 0]  # usual sections, which llama.cpp requires of some architectures


Factors = dict[str, tuple[float, ...]]  # of ropes, by the names of their tensors


def network_values(
    form: GGUFForm, config: Config, architecture: Architecture, num_drafting: int = 0
) -> tuple[dict[str, Value], Factors]:
    """Return the keys of a network, and its tensors of ropes' factors.

    Args:
        form: The form of the architecture's files.
        config: The config.
        architecture: The network of this config.
        num_drafting: Number of layers after the network's own that only draft tokens.
    """
    config = as_read(config, family_of(config))
    settings = {
        **config,
        "num_hidden_layers": len(architecture.layers) + num_drafting,
        "num_nextn_predict_layers": num_drafting or None,
        "max_position_embeddings": architecture.own_length,
        "layer_norm_eps": architecture.norm_eps,
        "is_causal": False if architecture.reads_whole_texts else None,
        **_heads(architecture),
        **_windows(form, config, architecture),
        **_sizes(form, config, architecture),
        "linear_value_features": config.get("linear_num_value_heads", 0) * config.get("linear_value_head_dim", 0),
        "recurrent_layers": [isinstance(each.mixer, GatedDeltaNet) for each in architecture.layers]
        + [False] * num_drafting,
        "full_attention_interval": config.get("full_attention_interval", 4),
        **_ropes(architecture),
    }
    if architecture.logit_scale != 1:
        settings.setdefault("logits_scaling", architecture.logit_scale)
    if form.is_encoder:
        return _values_of(ENCODER_KEYS, form, settings), {}
    scaling, factors = _scaling(form, config, architecture)
    return _values_of(form.all_keys, form, settings) | scaling, factors


def _values_of(keys: Iterable[Key], form: GGUFForm, settings: Config) -> dict[str, Value]:
    """Return the values of the keys whose settings are not None, in the order of the keys."""
    written = [each for each in keys if each.needs != "form" or each.key in form.keys]
    given = [(each, settings[each.name]) for each in written if settings.get(each.name) is not None]
    return {each.key: float(value) if each.kind == "real" else value for each, value in given}


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
    """Return the size of windows, and the layers with a window if other layers have none.

    Encoders' windows are counted over both sides, as in their configs, and the layers without windows have a period.
    """
    attention = architecture.attention
    have_windows = [mixer.window is not None for mixer in attention]
    if not any(have_windows):
        has_chunks = any(mixer.chunk is not None for mixer in attention)
        size = 0 if form.writes_zero_window and not has_chunks else None
        return {"sliding_window": size, "sliding_window_pattern": None}
    if form.is_encoder:
        full = [index for index, has_window in enumerate(have_windows) if not has_window]
        period = full[1] if len(full) > 1 else len(attention)
        return {"sliding_window": config.get("local_attention", 128), "sliding_window_pattern": period}
    kinds = None if all(have_windows) else have_windows
    return {"sliding_window": config["sliding_window"], "sliding_window_pattern": kinds}


def _sizes(form: GGUFForm, config: Config, architecture: Architecture) -> dict[str, Any]:
    """Return the sizes of feed-forwards, and the settings of experts."""
    parts = [layer.feed_forward for layer in architecture.layers]
    experts = next((part for part in parts if isinstance(part, Experts)), None)
    sizes = [size for part in parts if (size := _dense_size(part)) is not None]
    unused = config.get("intermediate_size_mlp", config.get("intermediate_size"))  # files have this key anyway
    settings = {"intermediate_size": _one_or_all(sizes) if sizes else unused}
    return settings | (dict.fromkeys(_OF_EXPERTS) if experts is None else _experts(form, experts, parts))


def _dense_size(part: Dense | Experts | None) -> int | None:
    if isinstance(part, Dense):
        return part.intermediate_size
    return part.shared_size if isinstance(part, Experts) and part.has_norms else None


def _experts(form: GGUFForm, experts: Experts, parts: Sequence[Dense | Experts | None]) -> dict[str, Any]:
    router = experts.router
    is_counted = experts.has_norms or "expert_shared_count" in form.keys  # then files do not have the size
    is_counted &= "expert_shared_feed_forward_length" not in form.keys
    return {
        "num_experts": router.num_experts,
        "num_experts_per_tok": router.num_chosen,
        "moe_intermediate_size": experts.intermediate_size,
        "shared_expert_intermediate_size": None if is_counted else experts.shared_size or None,
        "n_group": None,  # only one group is supported
        "n_shared_experts": experts.shared_size // experts.intermediate_size,
        "expert_gating_func": SIGMOID,
        "norm_topk_prob": router.is_normalized,
        "routed_scaling_factor": router.scale,
        "first_k_dense_replace": next(i for i, part in enumerate(parts) if isinstance(part, Experts)),
    }


def _one_or_all(values: list[int]) -> int | list[int]:
    """Return the value of all layers if it is equal, or else a list with one value per layer."""
    return values[0] if len(set(values)) == 1 else values


def _ropes(architecture: Architecture) -> dict[str, Any]:
    """Return the settings of ropes. Layers with windows have their own if other layers have none."""
    wide, narrow = (_rope(architecture, is_windowed=is_windowed) for is_windowed in (False, True))
    main = wide or narrow
    if main is None:
        return {"rope_theta": None}
    settings: dict[str, Any] = {"rope_theta": main.theta, "rotated_dim": main.dim, "rope_local_base_freq": None}
    if narrow is not None and any(mixer.window is None for mixer in architecture.attention):
        settings |= {"rope_local_base_freq": narrow.theta, "windowed_rotated_dim": narrow.dim}
    return settings


def _rope(architecture: Architecture, *, is_windowed: bool) -> Rope | None:
    """Return the rope of the layers with windows, or of the other layers."""
    found = [mixer.rope for mixer in architecture.attention if (mixer.window is not None) == is_windowed]
    return next((rope for rope in found if rope is not None), None)


def _scaling(form: GGUFForm, config: Config, architecture: Architecture) -> tuple[dict[str, Value], Factors]:
    """Return the keys of a scaled rope, and its tensors of factors."""
    wide = _rope(architecture, is_windowed=False)
    rope = wide or _rope(architecture, is_windowed=True)
    if rope is None:
        return {}, {}
    given = family_of(config).rope_settings(config, FULL if wide else SLIDING)
    kind = given.get("rope_type", given.get("type", "default"))
    original = config.get(_ORIGINAL, given.get(_ORIGINAL, config["max_position_embeddings"]))
    settings, unused, factors = dict[str, Any](), "rope.scaling.attn_factor", _factors(kind, rope)
    if kind in ("linear", "yarn"):
        factor = float(given.get("factor", config["max_position_embeddings"] / original))
        settings = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        settings = {**given, **settings, _ORIGINAL: original, "mscale_all_dim": given.get("mscale_all_dim") or None}
    if kind == "longrope":
        settings, unused = {_ORIGINAL: original}, "rope.scaling.yarn_attn_factor"
        settings |= {"attention_factor": rope.attention_factor} if factors else {}
    settings["mrope_section"] = [*(given.get("mrope_section") or _MROPE_SECTIONS), 0, 0, 0, 0][:4]
    values = _values_of(SCALING_KEYS, form, settings)
    if "attention.temperature_scale" not in values:
        values.pop("rope.scaling.yarn_log_multiplier", None)
    values.pop(unused, None)
    return values, factors


def _factors(kind: str, rope: Rope) -> Factors:
    short, long = rope.frequency_factors, None if rope.long is None else rope.long.frequency_factors
    if kind == "longrope" and short and long:
        return {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    if kind in ("llama3", "proportional") and short is not None:
        turned = tuple(_NO_ROTATION if math.isinf(each) else each for each in short)
        return {"rope_freqs.weight": turned}
    return {}
