"""Config → `Architecture`: the only place that knows one model family from another.

A config is a mapping in the names of Hugging Face's `config.json`; `checkpoint` gives GGUF metadata the same names.
Both dialects of rope settings are read: `rope_theta` + `rope_scaling`, and `rope_parameters` of transformers 5.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from infer.architecture import Activation, Architecture, Layer, Rope
from infer.errors import ModelError, UnsupportedModelError

Config = Mapping[str, Any]

_MAX_LAYERS = 1024
_LARGEST = 3.4028234663852886e38  # a float32
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def make_architecture(config: Config) -> Architecture:
    """Raises UnsupportedModelError for a family that we do not run, ModelError for a value that makes no sense."""
    family = str(config.get("model_type", ""))
    if family not in _FAMILIES:
        names = ", ".join(sorted(_FAMILIES))
        raise UnsupportedModelError(f"model_type {family or 'missing'!r:.80} is not supported; supported are: {names}")
    return _FAMILIES[family](config)


def _llama(config: Config) -> Architecture:
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise UnsupportedModelError(f"{name}=true is not supported yet")
    layer = replace(_layer(config), rope=_rope(config, _rope_settings(config)))
    return _architecture(config, (layer,) * _count(config, "num_hidden_layers", maximum=_MAX_LAYERS))


def _qwen3(config: Config) -> Architecture:
    if config.get("use_sliding_window"):
        raise UnsupportedModelError("use_sliding_window=true is not supported yet for qwen3")
    config = {"head_dim": 128, **config}
    llama = _llama(config)
    return replace(llama, layers=tuple(replace(layer, has_qk_norm=True) for layer in llama.layers))


# What published configs leave out, as in Hugging Face's Gemma3TextConfig.
_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}


def _gemma3(config: Config) -> Architecture:
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError("use_bidirectional_attention=true (an embedding model) is not supported")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(name) is not None:
            raise UnsupportedModelError(f"{name} is not supported yet")
    config = _GEMMA3_DEFAULTS | dict(config)
    config["hidden_act"] = config["hidden_activation"]
    full = replace(
        _layer(config),
        rope=_rope(config, _rope_settings(config, "full_attention", theta=1_000_000.0)),
        attention_scale=_positive(config, "query_pre_attn_scalar") ** -0.5,
        has_qk_norm=True,
        has_post_norms=True,
    )
    local_settings = (
        _rope_settings(config, "sliding_attention", theta=10_000.0)
        if "rope_parameters" in config
        else {"rope_theta": config.get("rope_local_base_freq", 10_000.0)}
    )
    window = _count(config, "sliding_window")
    local = replace(full, rope=_rope(config, local_settings), window=window)
    layers = tuple(full if kind == "full_attention" else local for kind in _layer_types(config))
    return replace(_architecture(config, layers), embedding_scale=math.sqrt(_count(config, "hidden_size")))


_FAMILIES: dict[str, Callable[[Config], Architecture]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "gemma3_text": _gemma3,
}


def _architecture(config: Config, layers: tuple[Layer, ...]) -> Architecture:
    return Architecture(
        family=str(config["model_type"]),
        vocab_size=_count(config, "vocab_size"),
        hidden_size=_count(config, "hidden_size"),
        layers=layers,
        norm_eps=_positive(config, "rms_norm_eps", 1e-6),
        max_positions=_count(config, "max_position_embeddings", default=2048),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _layer(config: Config) -> Layer:
    """What a config says of every layer; rope is left to the family."""
    num_heads = _count(config, "num_attention_heads")
    num_kv_heads = _count(config, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"num_attention_heads={num_heads} must be a multiple of num_key_value_heads={num_kv_heads}")
    name = config.get("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise UnsupportedModelError(f"hidden_act {name!r:.80} is not supported; supported are: {known}")
    head_dim = _head_dim(config)
    return Layer(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=_count(config, "intermediate_size"),
        rope=None,
        attention_scale=head_dim**-0.5,
        activation=_ACTIVATIONS[name],
    )


def _head_dim(config: Config) -> int:
    if config.get("head_dim") is not None:
        head_dim = _count(config, "head_dim")
    else:
        hidden_size, num_heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
        if hidden_size % num_heads:
            raise ModelError(f"hidden_size={hidden_size} must be a multiple of num_attention_heads={num_heads}")
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ModelError(f"head_dim must be even, got {head_dim}")
    return head_dim


def _layer_types(config: Config) -> list[str]:
    num_layers = _count(config, "num_hidden_layers", maximum=_MAX_LAYERS)
    given = config.get("layer_types")
    if given is None:
        pattern = _count(config, "sliding_window_pattern", default=6)  # every sixth layer sees everything
        return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers:
        raise ModelError(f"layer_types must list num_hidden_layers={num_layers} names, got {given!r:.80}")
    for kind in given:
        if kind not in ("sliding_attention", "full_attention"):
            raise UnsupportedModelError(f"layer type {kind!r:.80} is not supported")
    return given


def _rope_settings(config: Config, layer_type: str | None = None, theta: float = 10_000.0) -> Config:
    """The rope settings in one dialect: rope_theta, rope_type and what the type needs."""
    settings = config.get("rope_parameters")
    if settings is None:
        scaling = config.get("rope_scaling") or {}
        settings = {"rope_theta": config.get("rope_theta", theta), **scaling}
    elif layer_type is not None and layer_type in settings:
        settings = settings[layer_type]
    return {"rope_theta": theta, **settings}


def _rope(config: Config, settings: Config) -> Rope:
    dim = _head_dim(config)
    if settings.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModelError("partial_rotary_factor is not supported yet")
    rope = Rope(theta=_positive(settings, "rope_theta", 10_000.0), dim=dim)
    given = config.get("rope_frequency_factors")  # a GGUF file stores the factors themselves
    if given is not None:
        if not isinstance(given, list) or len(given) != dim // 2 or not all(map(_is_positive, given)):
            problem = f"rope_frequency_factors must be head_dim / 2 = {dim // 2} numbers above 0"
            raise ModelError(f"{problem}, got {given!r:.80}")
        return replace(rope, frequency_factors=tuple(float(factor) for factor in given))
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return rope
    if kind == "linear":
        return replace(rope, frequency_factors=(_positive(settings, "factor"),) * (dim // 2))
    if kind == "llama3":
        return replace(rope, frequency_factors=_llama3_factors(rope, settings))
    raise UnsupportedModelError(f"rope_type {kind!r:.80} is not supported; supported are: default, linear, llama3")


def _llama3_factors(rope: Rope, settings: Config) -> tuple[float, ...]:
    """Llama 3.1's scaling: long waves are slowed by `factor`, short ones kept, those between blended smoothly."""
    factor, low, high, context = (
        _positive(settings, name)
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    if low >= high:
        raise ModelError(f"config: high_freq_factor must be above low_freq_factor={low}, got {high}")
    factors = []
    for pair in range(rope.dim // 2):
        waves = context / (2 * math.pi * rope.theta ** (2 * pair / rope.dim))  # turns over the original context
        kept = min(max((waves - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - kept) / factor + kept))
    return tuple(factors)


def _count(config: Config, name: str, *, default: int | None = None, maximum: int = 2**31) -> int:
    value = config.get(name, default)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= maximum:
        raise ModelError(f"config: {name} must be a whole number from 1 to {maximum}, got {value!r:.80}")
    return value


def _positive(config: Config, name: str, default: float | None = None) -> float:
    value = config.get(name, default)
    if not _is_positive(value):
        raise ModelError(f"config: {name} must be a number above 0, got {value!r:.80}")
    return float(value)


def _is_positive(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _LARGEST
