"""Hyperparameters under the names of Hugging Face's config.json, from GGUF's metadata or from config.json itself.

GGUF's values are returned in the flat dialect (`rope_theta`, `rope_scaling`, `rope_local_base_freq`). config.json is
returned unchanged, or its text part if the model is multimodal. `models.families` interprets the values.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from infer.errors import ModelFormatError, UnsupportedModelError
from infer.files.gguf.forms import FOLDERS, GGUFForm, form_of
from infer.files.gguf.gguf import GGUFFile
from infer.files.gguf.gguf_values import GGUFValues, rotated_share, shortest
from infer.files.gguf.keys import DRAFTING_LAYERS, ENCODER_KEYS, SCALING_KEYS, Key
from infer.files.tensors.tensor_names import names_from_gguf
from infer.system.json_limits import inside, read_json_file

_FLAGS: dict[str, str | tuple[str, ...]] = {  # settings, and the tensors of GGUF files that set them
    "attention_bias": (".attn_q.bias", "_qkv.bias"),
    "attention_output_bias": "blk.0.attn_output.bias",
    "mlp_bias": "blk.0.ffn_up.bias",
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


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """Return the config of a GGUF file. Raises ModelFormatError for a key that is missing or of the wrong type."""
    values = GGUFValues(file)
    form = form_of(values.architecture)
    if values.architecture in FOLDERS:
        problem = f"GGUF files of {values.architecture} are not supported: use the folder of safetensors"
        raise UnsupportedModelError(f"{file.path.name}: {problem}")
    if form.is_encoder:
        return _encoder(values, form)
    # Layers after the network's own draft tokens.
    num_drafting, has_experts = values.count(DRAFTING_LAYERS, 0, least=0), bool(values.get("expert_count", 0))
    num_layers = max(1, values.count("block_count", most=len(file.tensors)) - num_drafting)
    config = _sizes(values, form)
    config |= {"model_type": form.model_type, "num_hidden_layers": num_layers}
    config |= _windows(values, form, num_layers)
    if has_experts:
        config |= _experts(values, form)
    config |= _read(form.all_keys, values, form, has_experts=has_experts)
    config |= _flags(values, {**_FLAGS, **form.flags})
    config |= _rope(values, form, config["head_dim"])
    config |= _masks(values, form)
    if num_drafting:
        config["num_nextn_predict_layers"] = num_drafting
    return config | _constants(values, form, config)


def _encoder(values: GGUFValues, form: GGUFForm) -> dict[str, Any]:
    """Return the config of an encoder. Raises UnsupportedModelError for unsupported parts."""
    file, num_heads = values.file, values.count("attention.head_count")
    if values.get("expert_count"):
        raise UnsupportedModelError(f"{file.path.name}: encoders with experts are not supported")
    if values.get("attention.causal", False) is not False:
        raise UnsupportedModelError(f"{file.path.name}: {values.architecture} with a mask is not supported")
    config: dict[str, Any] = {
        "model_type": form.model_type,
        "vocab_size": _vocab_size(values),
        "num_hidden_layers": values.count("block_count", most=len(file.tensors)),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
    }
    config |= _read(ENCODER_KEYS, values, form, has_experts=False)
    config |= {**_flags(values, {**_FLAGS, **form.flags}), **form.fixed}
    return config | ({} if form.derived is None else form.derived(values, config))


def _flags(values: GGUFValues, endings: Mapping[str, str | tuple[str, ...]]) -> dict[str, bool]:
    """Return each setting of `endings`: True if the file has a tensor whose name ends with the setting's ending."""
    names = names_from_gguf(values.file.tensors)
    return {flag: any(name.endswith(ending) for name in names) for flag, ending in endings.items()}


def _read(keys: Iterable[Key], values: GGUFValues, form: GGUFForm, *, has_experts: bool) -> dict[str, Any]:
    """Return the settings of the keys that have no rules of their own."""
    asked = {key: form.settings.get(key.key, key.name) for key in keys if key.kind is not None}
    is_asked = {"": True, "experts": has_experts, "form": False}
    return {
        name: key.read(values)
        for key, name in asked.items()
        if name is not None and (key.key in form.keys or is_asked.get(key.needs, values.has(key.key)))
    }


def _sizes(values: GGUFValues, form: GGUFForm) -> dict[str, Any]:
    """Return the settings that follow from several keys or from tensors, which `KEYS` cannot describe."""
    heads, kv_heads, size = "attention.head_count", "attention.head_count_kv", "feed_forward_length"
    num_heads = values.count(heads, may_differ=heads in form.differing)
    head_dim = values.count("attention.key_length", default=max(1, values.count("embedding_length") // num_heads))
    if values.count("attention.value_length", default=head_dim) != head_dim:
        name = values.file.path.name
        raise UnsupportedModelError(f"{name}: keys and values of different length are not supported")
    return {
        "vocab_size": _vocab_size(values),
        "num_attention_heads": num_heads,
        "num_key_value_heads": values.count(
            kv_heads, num_heads, skips_zeros="shortconv.l_cache" in form.keys, may_differ=kv_heads in form.differing
        ),
        "head_dim": head_dim,
        "intermediate_size": values.count(
            size if values.has(size) else f"expert_{size}", may_differ=size in form.differing
        ),
        "tie_word_embeddings": "output.weight" not in values.file.tensors,
        "attention_multiplier": head_dim**-0.5,
    }


def _constants(values: GGUFValues, form: GGUFForm, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that only some architectures have, or that llama.cpp does not read from files."""
    for key, only in form.only.items():
        if values.get(key, only) != only:
            problem = f"{key} {values.get(key)!r:.60} is not supported for {values.architecture}: {only}"
            raise UnsupportedModelError(f"{values.file.path.name}: {problem}")
    found = dict(form.fixed)
    if form.num_wide_layers is not None:
        is_wide = config["num_hidden_layers"] == form.num_wide_layers
        of_hidden = config["hidden_size"] // config["num_attention_heads"]
        found["query_pre_attn_scalar"] = of_hidden if is_wide else config["head_dim"]
    if form.derived is not None:
        found |= form.derived(values, config | found)
    if (key := "rope.freq_base_swa") in form.keys:
        theta = config["rope_theta"] if form.local_theta is None else form.local_theta
        found["rope_local_base_freq"] = values.real(key, default=theta)
    return found


def _masks(values: GGUFValues, form: GGUFForm) -> dict[str, Any]:
    """Return the setting of attention without a mask, which some architectures always have in llama.cpp."""
    if "use_bidirectional_attention" in form.fixed:
        return {}
    is_causal = values.get("attention.causal", True)
    if not isinstance(is_causal, bool):
        values.fail("attention.causal", f"expected true or false, got {is_causal!r:.60}")
    return {} if is_causal else {"is_causal": False}


def _experts(values: GGUFValues, form: GGUFForm) -> dict[str, Any]:
    """Return the settings of experts that have rules of their own. By default, experts have the size of the MLP."""
    inner = values.count("feed_forward_length", default=1)
    found: dict[str, Any] = {"norm_topk_prob": False}
    found["moe_intermediate_size"] = values.count("expert_feed_forward_length", default=inner)
    if values.has(shared := "expert_shared_feed_forward_length"):
        found["shared_expert_intermediate_size"] = values.count(shared)
    return found | ({} if form.sparse_type is None else {"model_type": form.sparse_type})


def generation_config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """Return the values of `general.sampling.*` for which Hugging Face has a name."""
    found = {ours: file.metadata.get(f"general.sampling.{key}") for key, ours in SAMPLING_KEYS.items()}
    return {
        name: shortest(value) if isinstance(value, int | float) else value
        for name, value in found.items()
        if value is not None
    }


def _vocab_size(values: GGUFValues) -> int:
    embedding = values.file.tensors.get("token_embd.weight")
    return values.count("vocab_size", default=None if embedding is None else embedding.shape[0])


def _rope(values: GGUFValues, form: GGUFForm, head_dim: int) -> dict[str, Any]:
    file, found = values.file, dict[str, Any]()
    rotated = values.count("rope.dimension_count", default=head_dim)
    if values.has("rope.dimension_count"):
        found["partial_rotary_factor"] = rotated_share(rotated, head_dim)
    scaling_type = values.get("rope.scaling.type", "linear")
    if not isinstance(scaling_type, str):
        values.fail("rope.scaling.type", f"expected a name, got {scaling_type!r:.60}")
    has_two_sets = _LONG_FACTORS in file.tensors and _SHORT_FACTORS in file.tensors
    named = next(filter(values.has, ("rope.scaling.factor", "rope.scale_linear")), None)  # in 2023 it was the second
    factor = 1.0 if named is None else values.real(named) or 1.0  # 0 is no scaling
    if has_two_sets or (scaling_type != "none" and (scaling_type, factor) != ("linear", 1.0)):
        scaling: dict[str, Any] = {"rope_type": "longrope" if has_two_sets else scaling_type}
        scaling |= {key.name: key.read(values) for key in SCALING_KEYS if key.kind and values.has(key.key)}
        if named or not has_two_sets:
            scaling["factor"] = factor
        if values.has(key := "rope.scaling.original_context_length"):
            # Hugging Face's phi3 has this value next to the settings, and prefers it.
            scaling["original_max_position_embeddings"] = values.count(key)
            found |= {"original_max_position_embeddings": values.count(key)} if has_two_sets else {}
        if "mscale_all_dim" in scaling:  # llama.cpp's factor is a quotient of this value
            scaling["mscale"] = 1.0
        if has_two_sets:
            scaling["long_factor"] = file.floats(_LONG_FACTORS, rotated // 2)
            scaling["short_factor"] = file.floats(_SHORT_FACTORS, rotated // 2)
        found["rope_scaling"] = {**scaling, **form.scaling}
    elif form.has_default_rope:
        found["rope_scaling"] = {"rope_type": "default"}
    if "rope_freqs.weight" in file.tensors:
        found["rope_frequency_factors"] = file.floats("rope_freqs.weight", rotated // 2)
    return found


def _windows(values: GGUFValues, form: GGUFForm, num_layers: int) -> dict[str, Any]:
    """Return the layers that have a window, and its size. llama.cpp has its own pattern for some architectures."""
    found: dict[str, Any] = {"sliding_window": None}
    if values.get("attention.sliding_window", 0) != 0:
        found["sliding_window"] = values.count("attention.sliding_window")
        found |= {} if form.windowed_type is None else {"model_type": form.windowed_type}
    pattern = values.get("attention.sliding_window_pattern", form.window_period)
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
