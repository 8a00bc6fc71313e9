"""Hyperparameters under the names of Hugging Face's config.json, from GGUF's metadata or from config.json itself.

GGUF's values are returned in the flat dialect (`rope_theta`, `rope_scaling`, `rope_local_base_freq`). config.json is
returned unchanged, or its text part if the model is multimodal. `models.families` interprets the values.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infer.errors import ModelFormatError, UnsupportedModelError
from infer.files.gguf.gguf import GGUFFile
from infer.files.gguf.gguf_gated import laguna_settings, muse_glimmer_settings
from infer.files.gguf.gguf_gemma4 import gemma4_settings
from infer.files.gguf.gguf_llama4 import llama4_settings
from infer.files.gguf.gguf_recurrent import WITH_SHORT_CONVS, recurrent_settings
from infer.files.gguf.gguf_text_encoders import ENCODERS, encoder_settings
from infer.files.gguf.gguf_values import GGUFValues, rotated_share, shortest
from infer.files.tensors.tensor_names import names_from_gguf
from infer.system.json_limits import inside, read_json_file

_MODEL_TYPES = {
    "gemma3": "gemma3_text",
    "gemma-embedding": "gemma3_text",
    "llama-embed": "llama_bidirec",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "muse-glimmer": "muse_glimmer_text",
    "qwen3moe": "qwen3_moe",
    "qwen2moe": "qwen2_moe",
    "glm4moe": "glm4_moe",
    "gpt-oss": "gpt_oss",
    "mistral3": "ministral3",
    "lfm2moe": "lfm2_moe",
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
}  # all others have the same name in both
_WITH_WINDOWS = {"llama": "mistral", "olmo2": "olmo3"}  # an architecture whose layers have windows is another family
_SAME_NAMES = frozenset(
    {"llama", "qwen2", "qwen3", "gemma2", "phi3", "smollm3", "olmo2", "exaone4", "seed_oss", "granite", "granitemoe"}
    | {"olmoe", "lfm2", "mellum", "laguna"}
)
_ARCHITECTURES = {ours: theirs for theirs, ours in {**_WITH_WINDOWS, **_MODEL_TYPES}.items()}
_ARCHITECTURES |= {"mixtral": "llama", "gemma3_text": "gemma3", "qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe"}
_ARCHITECTURES |= dict.fromkeys(("gemma4", "gemma4_unified", "gemma4_unified_text"), "gemma4")
_ARCHITECTURES |= dict.fromkeys(("bert", "distilbert", "electra", "roberta", "xlm-roberta"), "bert")
_ARCHITECTURES |= {"nomic_bert": "nomic-bert", "modernbert": "modern-bert"}
_ARCHITECTURES |= {"gemma3": "gemma3", "llama4": "llama4", "muse_glimmer": "muse-glimmer"}
# Constants of llama.cpp: the period of layers without a window, the theta of the other layers, and the number of layers
# of the size whose attention is scaled by hidden_size / heads instead of head_dim.
_WINDOW_PATTERNS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2, "mellum": 4, "muse-glimmer": 4, "gemma-embedding": 6}
_GEMMA3_LOCAL_BASE = 10000.0
_WITH_LOCAL_ROPE = ("gemma3", "gemma4", "gemma-embedding", "mellum")
_27B_LAYERS = {"gemma2": 46, "gemma3": 62, "gemma-embedding": 0}
_OWN_SETTINGS = {"gemma4": gemma4_settings, "llama4": llama4_settings}
_OWN_SETTINGS |= {"laguna": laguna_settings, "muse-glimmer": muse_glimmer_settings}
_NORMALIZED_EXPERTS = {"qwen3moe", "lfm2moe", "qwen3next", "qwen35moe", "mellum"}
_SIGMOID = 2  # a value of `expert_gating_func`
_SCALES = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
_YARN = {
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
    "attention.temperature_scale": "llama_4_scaling_beta",
}
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_OF_THE_WHOLE = (  # keys of a multimodal model as a whole
    "tie_word_embeddings", "torch_dtype", "dtype", "quantization_config", "compression_config", "quantization"
)  # fmt: skip
_KINDS: dict[str, tuple[type, str]] = {  # types of values that are read before the family is known
    "model_type": (str, "a name"),
    "text_config": (dict, "an object"),
    "quantization_config": (dict, "an object"),
}
SAMPLING_KEYS = {  # GGUF's `general.sampling.*` → the names of SamplingParams
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
    "penalty_last_n": "repetition_window",
}


def config_from_folder(folder: Path) -> dict[str, Any]:
    """Return config.json. For a multimodal model, return its text part with the settings of the whole model.

    An example is tied embeddings.
    """
    path = inside(folder, "config.json")
    config = read_json_file(path)
    _check_kinds(path, config)
    text = config.get("text_config")
    if text is None:
        return config
    _check_kinds(path, text)
    shared = {key: config[key] for key in _OF_THE_WHOLE if key in config}
    return {"model_type": config.get("model_type"), **shared, **text}


def _check_kinds(path: Path, config: Mapping[str, Any]) -> None:
    for name, (kind, words) in _KINDS.items():
        if config.get(name) is not None and not isinstance(config[name], kind):
            raise ModelFormatError(path, name, f"expected {words}, got {config[name]!r:.80}")


def generation_config_from_folder(folder: Path) -> dict[str, Any]:
    return read_json_file(inside(folder, name)) if (folder / (name := "generation_config.json")).exists() else {}


def architecture_in_gguf(config: Mapping[str, Any]) -> str | None:
    """Return the architecture name in GGUF for the family of a config, or None if GGUF has none."""
    name = str(config.get("model_type"))
    found = _ARCHITECTURES.get(name, name if name in _SAME_NAMES else None)
    return "gemma-embedding" if found == "gemma3" and config.get("use_bidirectional_attention") is True else found


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """Return the config of a GGUF file. Raises ModelFormatError for a key that is missing or of the wrong type."""
    values = GGUFValues(file)
    if values.architecture in ENCODERS:
        return encoder_settings(file, values, _vocab_size(file, values))
    num_drafting = _num_drafting_layers(values)
    num_layers = max(1, values.count("block_count", most=len(file.tensors)) - num_drafting)
    hidden_size = values.count("embedding_length")
    num_heads = values.count("attention.head_count", may_differ=values.architecture == "laguna")
    head_dim = values.count("attention.key_length", default=max(1, hidden_size // num_heads))
    if values.count("attention.value_length", default=head_dim) != head_dim:
        raise UnsupportedModelError(f"{file.path.name}: keys and values of different length are not supported")
    config = {
        "model_type": _MODEL_TYPES.get(values.architecture, values.architecture),
        "vocab_size": _vocab_size(file, values),
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": values.count(
            "attention.head_count_kv",
            num_heads,
            skips_zeros=values.architecture in WITH_SHORT_CONVS,
            may_differ=values.architecture == "gemma4",
        ),
        "head_dim": head_dim,
        "intermediate_size": values.count(
            key if values.has(key := "feed_forward_length") else f"expert_{key}",
            may_differ=values.architecture == "gemma4",
        ),
        "rms_norm_eps": values.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": values.real("rope.freq_base", default=10000.0),
        "max_position_embeddings": values.count("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": any(name.endswith((".attn_q.bias", "_qkv.bias")) for name in names_from_gguf(file.tensors)),
        "attention_output_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "attention_multiplier": head_dim**-0.5,
    }
    config |= {name: values.real(key) for key, name in _SCALES.items() if values.has(key)}
    config |= _rope(file, values, head_dim)
    config |= _windows(values, num_layers)
    config |= _experts(values)
    config |= recurrent_settings(values, num_layers)
    config |= _masks(values)
    if num_drafting:
        config["num_nextn_predict_layers"] = num_drafting
    return config | _own_settings(values, config)


def _own_settings(values: GGUFValues, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that only some architectures have."""
    found = dict[str, Any]()
    if values.architecture in _27B_LAYERS:
        is_27b = config["num_hidden_layers"] == _27B_LAYERS[values.architecture]
        of_hidden = config["hidden_size"] // config["num_attention_heads"]
        found["query_pre_attn_scalar"] = of_hidden if is_27b else config["head_dim"]
    if values.architecture in _OWN_SETTINGS:
        found |= _OWN_SETTINGS[values.architecture](values, config | found)
    if values.architecture in _WITH_LOCAL_ROPE:
        default = config["rope_theta"] if values.architecture == "mellum" else _GEMMA3_LOCAL_BASE
        found["rope_local_base_freq"] = values.real("rope.freq_base_swa", default=default)
    return found


def _num_drafting_layers(values: GGUFValues) -> int:
    """Return the number of layers after the network's own, which draft tokens."""
    found = values.get("nextn_predict_layers", 0)
    if type(found) is not int or found < 0:
        values.fail("nextn_predict_layers", f"expected an integer of at least 0, got {found!r:.60}")
    return found


def _masks(values: GGUFValues) -> dict[str, Any]:
    """Return the settings of attention without a mask, which `gemma-embedding` always has in llama.cpp."""
    if values.architecture == "gemma-embedding":
        return {"use_bidirectional_attention": True}
    is_causal = values.get("attention.causal", True)
    if not isinstance(is_causal, bool):
        values.fail("attention.causal", f"expected true or false, got {is_causal!r:.60}")
    return {} if is_causal else {"is_causal": False}


def _experts(values: GGUFValues) -> dict[str, Any]:
    """Return the settings of experts, if the file has any. llama.cpp normalises the weights by architecture."""
    if not values.has("expert_count") or not values.get("expert_count", 0):
        return {}
    found: dict[str, Any] = {
        "num_experts": values.count("expert_count"),
        "num_experts_per_tok": values.count("expert_used_count"),
        "norm_topk_prob": values.architecture in _NORMALIZED_EXPERTS,
    }
    if values.architecture == "glm4moe":
        found |= _glm_experts(values, found)
    if values.architecture == "lfm2moe":
        found |= _lfm2_experts(values)
    inner = values.count("feed_forward_length", default=1)
    found["moe_intermediate_size"] = values.count("expert_feed_forward_length", default=inner)
    if values.has(key := "expert_shared_feed_forward_length"):
        found["shared_expert_intermediate_size"] = values.count(key)
    if values.architecture == "llama":
        found["model_type"] = "mixtral"
    return found


def _glm_experts(values: GGUFValues, found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "n_routed_experts": found["num_experts"],
        "n_shared_experts": values.count("expert_shared_count", default=1),
        "n_group": values.count("expert_group_count", default=1),
        "norm_topk_prob": bool(values.get("expert_weights_norm", True)),
        "routed_scaling_factor": values.real("expert_weights_scale", default=1.0),
        "first_k_dense_replace": values.get("leading_dense_block_count", 0),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in values.file.tensors,
    }


def _lfm2_experts(values: GGUFValues) -> dict[str, Any]:
    gating = values.count("expert_gating_func", default=_SIGMOID)
    if gating != _SIGMOID:
        name = values.file.path.name
        raise UnsupportedModelError(f"{name}: expert_gating_func {gating} is not supported for lfm2moe")
    return {
        "num_dense_layers": values.get("leading_dense_block_count", 0),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in values.file.tensors),
        "routed_scaling_factor": values.real("expert_weights_scale", default=1.0),
    }


def generation_config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """Return the values of `general.sampling.*` for which Hugging Face has a name."""
    found = {ours: file.metadata.get(f"general.sampling.{key}") for key, ours in SAMPLING_KEYS.items()}
    return {
        name: shortest(value) if isinstance(value, int | float) else value
        for name, value in found.items()
        if value is not None
    }


def _vocab_size(file: GGUFFile, values: GGUFValues) -> int:
    embedding = file.tensors.get("token_embd.weight")
    return values.count("vocab_size", default=None if embedding is None else embedding.shape[0])


def _rope(file: GGUFFile, values: GGUFValues, head_dim: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rotated = values.count("rope.dimension_count", default=head_dim)
    if rotated != head_dim:
        found["partial_rotary_factor"] = rotated_share(rotated, head_dim)
    scaling_type = values.get("rope.scaling.type", "linear")
    if not isinstance(scaling_type, str):
        values.fail("rope.scaling.type", f"expected a name, got {scaling_type!r:.60}")
    has_two_sets = _LONG_FACTORS in file.tensors and _SHORT_FACTORS in file.tensors
    named = next(filter(values.has, ("rope.scaling.factor", "rope.scale_linear")), None)  # in 2023 it was the second
    factor = 1.0 if named is None else values.real(named) or 1.0  # 0 is no scaling
    if has_two_sets or (scaling_type != "none" and (scaling_type, factor) != ("linear", 1.0)):
        scaling: dict[str, Any] = {"rope_type": "longrope" if has_two_sets else scaling_type}
        scaling |= {name: values.real(key) for key, name in _YARN.items() if values.has(key)}
        if named or not has_two_sets:
            scaling["factor"] = factor
        if values.has(key := "rope.scaling.original_context_length"):
            # Hugging Face's phi3 has this value next to the settings, and prefers it.
            scaling["original_max_position_embeddings"] = values.count(key)
            found |= {"original_max_position_embeddings": values.count(key)} if has_two_sets else {}
        if values.architecture == "gpt-oss":  # its files do not tell that yarn's bounds are not rounded
            scaling["truncate"] = False
        if "mscale_all_dim" in scaling:  # llama.cpp's factor is a quotient of this value
            scaling["mscale"] = 1.0
        if has_two_sets:
            scaling["long_factor"] = file.floats(_LONG_FACTORS, rotated // 2)
            scaling["short_factor"] = file.floats(_SHORT_FACTORS, rotated // 2)
        found["rope_scaling"] = scaling
    elif values.architecture in ("gpt-oss", "mistral3"):  # otherwise the family's default would be used
        found["rope_scaling"] = {"rope_type": "default"}
    if "rope_freqs.weight" in file.tensors:
        found["rope_frequency_factors"] = file.floats("rope_freqs.weight", rotated // 2)
    return found


def _windows(values: GGUFValues, num_layers: int) -> dict[str, Any]:
    """Return the layers that have a window, and its size. llama.cpp has its own pattern for some architectures."""
    found: dict[str, Any] = {"sliding_window": None}
    if values.get("attention.sliding_window", 0) != 0:
        found["sliding_window"] = values.count("attention.sliding_window")
        if values.architecture in _WITH_WINDOWS:
            found["model_type"] = _WITH_WINDOWS[values.architecture]
    pattern = values.get("attention.sliding_window_pattern", _WINDOW_PATTERNS.get(values.architecture))
    if pattern is None:
        return found
    if isinstance(pattern, list) and len(pattern) == num_layers:
        sliding = [bool(flag) for flag in pattern]
    elif type(pattern) is int and pattern > 0:
        sliding = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    else:
        values.fail("attention.sliding_window_pattern", f"expected a number or one flag per layer, got {pattern!r:.60}")
    found["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in sliding]
    return {**found, "use_sliding_window": any(sliding)}
