"""A decoder's network → GGUF's keys under the architecture's name: the inverse of `files.config`.

A key is written if the network has the part that it describes. llama.cpp has constants for everything else;
`round_trip` refuses a network for which they are wrong.
"""

from collections.abc import Sequence

from infer.compute.operands.architecture import Architecture
from infer.compute.operands.feed_forwards import Dense, Experts
from infer.compute.operands.mixers import Attention, GatedDeltaNet, ShortConv
from infer.files.gguf.gguf_recurrent import WITH_DELTA_NETS
from infer.models.families.config_values import Config
from infer.models.families.recurrent import gated_delta_net
from infer.models.gguf_export.values import Value

_SIGMOID = 2  # a value of `expert_gating_func`
_WITH_COUNTED_SHARED_EXPERTS = frozenset({"glm4moe"})
_SCALES = {  # Granite: eps and embedding in `Architecture` are divided by the residual's multiplier
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
_WITH_SCALES = frozenset({"granite", "granitemoe"})
# Without a window, 0 is written, because llama.cpp's default for them is a window.
_WITH_A_WINDOW_OF_ZERO = frozenset({"phi3", "llama4"})


def network_values(name: str, config: Config, architecture: Architecture) -> dict[str, Value]:
    """Return all keys except those of ropes.

    Args:
        name: The architecture's name in GGUF.
        config: The config as its family reads it.
        architecture: The network of this config.
    """
    layers, attention = architecture.layers, architecture.attention
    values: dict[str, Value] = {
        "block_count": len(layers),
        "context_length": architecture.own_length,
        "embedding_length": architecture.hidden_size,
        "vocab_size": architecture.vocab_size,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
    }
    values |= _heads(architecture) | _windows(name, config, architecture) | _sizes(name, config, architecture)
    if architecture.reads_whole_texts:
        values["attention.causal"] = False
    if attention and attention[0].softcap is not None:
        values["attn_logit_softcapping"] = attention[0].softcap
    if architecture.logit_softcap is not None:
        values["final_logit_softcapping"] = architecture.logit_softcap
    if name in _WITH_SCALES:
        values |= {key: float(config[own]) for own, key in _SCALES.items() if config.get(own) is not None}
    elif architecture.logit_scale != 1:
        values["logit_scale"] = architecture.logit_scale
    return values | _recurrent(name, config, architecture)


def _heads(architecture: Architecture) -> dict[str, Value]:
    """Return the numbers and sizes of heads. Layers with a short convolution have no heads of keys."""
    attention = architecture.attention
    mixers = [layer.mixer for layer in architecture.layers]
    has_convolutions = any(isinstance(mixer, ShortConv) for mixer in mixers)
    kv_heads = [mixer.num_kv_heads if isinstance(mixer, Attention) else 0 for mixer in mixers]
    wide = next((mixer.head_dim for mixer in attention if mixer.window is None), attention[0].head_dim)
    narrow = next((mixer.head_dim for mixer in attention if mixer.window is not None), wide)
    values: dict[str, Value] = {
        "attention.head_count": _one_or_all([mixer.num_heads for mixer in attention]),
        "attention.head_count_kv": kv_heads if has_convolutions else _one_or_all([each for each in kv_heads if each]),
        "attention.key_length": wide,
        "attention.value_length": wide,
    }
    if architecture.layers[0].has_scale:  # Gemma 4
        values |= {"attention.key_length_swa": narrow, "attention.value_length_swa": narrow}
        values["attention.shared_kv_layers"] = sum(mixer.shared_from is not None for mixer in attention)
        own = architecture.per_layer_input
        values["embedding_length_per_layer_input"] = 0 if own is None else own.dim
    return values


def _windows(name: str, config: Config, architecture: Architecture) -> dict[str, Value]:
    """Return the size of windows, and the layers with a window if other layers have none."""
    attention = architecture.attention
    have_windows = [mixer.window is not None for mixer in attention]
    if not any(have_windows):
        has_chunks = any(mixer.chunk is not None for mixer in attention)
        return {"attention.sliding_window": 0} if name in _WITH_A_WINDOW_OF_ZERO and not has_chunks else {}
    values: dict[str, Value] = {"attention.sliding_window": config["sliding_window"]}
    return values if all(have_windows) else values | {"attention.sliding_window_pattern": have_windows}


def _sizes(name: str, config: Config, architecture: Architecture) -> dict[str, Value]:
    """Return the sizes of feed-forwards, and the settings of experts."""
    parts = [layer.feed_forward for layer in architecture.layers]
    experts = next((part for part in parts if isinstance(part, Experts)), None)
    sizes = [size for part in parts if (size := _dense_size(part)) is not None]
    unused = config.get("intermediate_size_mlp", config.get("intermediate_size"))  # files have this key anyway
    values: dict[str, Value] = {"feed_forward_length": _one_or_all(sizes)} if sizes else {}
    if not sizes and unused is not None:
        values["feed_forward_length"] = unused
    return values if experts is None else values | _experts(name, config, experts, parts)


def _dense_size(part: Dense | Experts | None) -> int | None:
    if isinstance(part, Dense):
        return part.intermediate_size
    return part.shared_size if isinstance(part, Experts) and part.has_norms else None


def _experts(name: str, config: Config, experts: Experts, parts: Sequence[Dense | Experts | None]) -> dict[str, Value]:
    router = experts.router
    values: dict[str, Value] = {
        "expert_count": router.num_experts,
        "expert_used_count": router.num_chosen,
        "expert_feed_forward_length": experts.intermediate_size,
    }
    if name in _WITH_COUNTED_SHARED_EXPERTS:
        values["expert_shared_count"] = experts.shared_size // experts.intermediate_size
    elif experts.shared_size and not experts.has_norms:
        values["expert_shared_feed_forward_length"] = experts.shared_size
    if router.scores == "sigmoid":
        values |= {"expert_gating_func": _SIGMOID, "expert_weights_norm": router.is_normalized}
        values["expert_weights_scale"] = router.scale
        values["leading_dense_block_count"] = next(i for i, part in enumerate(parts) if isinstance(part, Experts))
    if router.weighs_inputs:  # Llama 4
        values["interleave_moe_layer_step"] = config.get("interleave_moe_layer_step", 1)
    return values


def _recurrent(name: str, config: Config, architecture: Architecture) -> dict[str, Value]:
    """Return the settings of convolutions and of gated delta nets, which files always have."""
    mixers = [layer.mixer for layer in architecture.layers]
    conv = next((mixer for mixer in mixers if isinstance(mixer, ShortConv)), None)
    if conv is not None:
        return {"shortconv.l_cache": conv.num_taps}
    if name not in WITH_DELTA_NETS:
        return {}
    net = gated_delta_net(config)
    return {
        "ssm.conv_kernel": net.num_taps,
        "ssm.state_size": net.key_dim,
        "ssm.group_count": net.num_key_heads,
        "ssm.time_step_rank": net.num_value_heads,
        "ssm.inner_size": net.value_features,
        "full_attention_interval": config.get("full_attention_interval", 4),
        "attention.recurrent_layers": [isinstance(mixer, GatedDeltaNet) for mixer in mixers],
    }


def _one_or_all(values: list[int]) -> int | list[int]:
    """Return the value of all layers if it is equal, or else a list with one value per layer."""
    return values[0] if len(set(values)) == 1 else values
