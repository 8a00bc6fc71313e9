"""A folder's model as the GGUF file that llama.cpp's convert_hf_to_gguf.py makes of it: float32, under the names of the
`gguf` package, with each architecture's own keys."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from converted_encoders import add_value
from gguf_files import permuted, write_file

_GEMMA4 = ("gemma4_text", "gemma4_unified_text")
_ARCHITECTURES = dict.fromkeys(("mistral", "mixtral"), "llama") | dict.fromkeys(_GEMMA4, "gemma4")
_ARCHITECTURES |= {"gemma3_text": "gemma3", "olmo3": "olmo2", "ministral3": "mistral3", "lfm2_moe": "lfm2moe"}
_ARCHITECTURES |= {"qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe", "glm4_moe": "glm4moe", "gpt_oss": "gpt-oss"}
_ARCHITECTURES |= {"muse_glimmer_text": "muse-glimmer", "llama4_text": "llama4", "llama_bidirec": "llama-embed"}
_ARCHITECTURES |= {"qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}
_ARCHITECTURES |= {"hunyuan_v1_dense": "hunyuan-dense", "cohere": "command-r", "hunyuan_v1_moe": "hunyuan-moe"}
_ARCHITECTURES |= {"gpt_neox": "gptneox", "minimax_m2": "minimax-m2", "exaone_moe": "exaone-moe", "phi": "phi2"}
_ARCHITECTURES |= {"granitemoeshared": "granitemoe", "internlm3": "llama", "iquestcoder": "llama", "glm": "chatglm"}
_ARCHITECTURES |= {"ernie4_5_moe": "ernie4_5-moe", "solar_open": "glm4moe", "sarvam_moe": "bailingmoe2"}
# Architectures that the `gguf` package does not have.
_NAMED_AS = {"mellum": "qwen3moe", "laguna": "afmoe", "muse-glimmer": "afmoe"}
_PERMUTED = {"llama", "mistral", "granite", "smollm3", "mixtral", "granitemoe", "ministral3", "muse_glimmer_text"}
_PERMUTED |= {"llama_bidirec", "arcee", "olmo", "internlm3", "iquestcoder", "granitemoeshared"}
_WITH_LAYER_NORM = {"gpt2", "gpt_neox", "cohere", "cohere2", "starcoder2", "stablelm", "nemotron", "phi", "olmo"}
_WITH_LAYER_NORM |= {"jais2"}
_WITH_KINDS = {"gemma3_text", *_GEMMA4, "olmo3", "exaone4", "exaone_moe", "mellum", "muse_glimmer_text"}
_WITH_KINDS |= {"cohere2", "afmoe"}
_EPS_NAMES = ("norm_eps", "rms_norm_eps", "layer_norm_eps", "norm_epsilon")
_WITHOUT_MODEL = re.compile(r"(embed_tokens|layers|norm)\.")
_GPT2_SETTINGS = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
_GPT2_SETTINGS |= {"n_positions": "max_position_embeddings", "layer_norm_epsilon": "rms_norm_eps"}
_EXPERT = re.compile(r"model\.layers\.(\d+)\..*experts\.(\d+)\.(\w+)\.weight")
_EXPERT_KINDS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_GRANITE_EXPERTS = re.compile(r"model\.layers\.(\d+)\.block_sparse_moe\.(input|output)_linear\.weight")
_GRANITE_SHARED = re.compile(r"model\.layers\.(\d+)\.shared_mlp\.input_linear\.weight")
_GPT_OSS_EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?")
_LLAMA4_EXPERTS = re.compile(r"model\.layers\.(\d+)\.feed_forward\.experts\.(gate_up|down)_proj")
_GEMMA4_EXPERTS = re.compile(r"model\.layers\.(\d+)\.(router\..*scale|experts\..*)")
_GEMMA4_PARTS = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
_GEMMA4_PARTS |= {f"experts.{kind}_proj": f"ffn_{kind}_exps.weight" for kind in ("gate_up", "down")}
_NORMS_PLUS_ONE = {"gemma", "nemotron", "gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}


def convert(folder: Path, path: Path, metadata: Mapping[str, Any] | None = None) -> Path:
    """Write the file, with the metadata of a tokenizer, and with the layers after an embedding model's states."""
    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    if family == "gpt2":
        config |= {usual: config[own] for own, usual in _GPT2_SETTINGS.items()}
        config["intermediate_size"] = config["n_inner"] or 4 * config["n_embd"]
    architecture = _ARCHITECTURES.get(family, family)
    if config.get("use_bidirectional_attention") is True:
        architecture = "gemma-embedding"
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    known = _NAMED_AS.get(architecture, architecture)
    names = gguf.get_tensor_name_map(kinds[known], config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, architecture)
    _add_settings(writer, config)
    _add_rope(writer, config)
    _add_embedding(writer, folder, config)
    for key, value in (metadata or {}).items():
        if key.startswith("tokenizer."):
            add_value(writer, key, value)
    if family in _GEMMA4:
        _add_gemma4(writer, config)
    if family == "laguna":
        _add_laguna(writer, config)
    if family == "muse_glimmer_text":
        _add_muse_glimmer(writer, config)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config.get("num_key_value_heads")}
    tensors = _with_stacked_experts(load_file(folder / "model.safetensors"))
    for name in [name for name in tensors if name.endswith("_layernorm.norms.0.weight")]:
        norms = [tensors.pop(f"{name[:-9]}.{head}.weight") for head in range(heads[f"{name.split('.')[4][0]}_proj"])]
        tensors[f"{name[:-15]}.weight"] = np.stack(norms)
    for name in [name for name in tensors if family == "sarvam_moe" and ".self_attn.q_proj." in name]:
        parts = [tensors.pop(name.replace("q_proj", f"{which}_proj")) for which in "qkv"]
        tensors[f"blk.{name.split('.')[2]}.attn_qkv.weight"] = np.concatenate(parts)
    for value in ("alpha_n", "alpha_p", "beta", "eps") if family == "apertus" else ():
        layers = [f"model.layers.{at}.mlp.act_fn.{value}" for at in range(config["num_hidden_layers"])]
        writer.add_array(f"apertus.xielu.{value}", [float(tensors.pop(name).item()) for name in layers])
    if "linear_num_key_heads" in config:
        add_delta_nets(writer, config)
        tensors = {key: value for item in tensors.items() for key, value in convert_delta_net(*item, config).items()}
    for name, values in tensors.items():
        name = f"model.{name}" if _WITHOUT_MODEL.match(name) else name
        module = name.split(".")[-2]
        if family in _PERMUTED and module in heads:
            values = permuted(values, heads[module] or config["num_attention_heads"])
        if family == "muse_glimmer_text" and name.endswith("layernorm.weight"):
            values = values + 1
        if family == "gpt2" and module in ("c_attn", "c_proj", "c_fc") and values.ndim == 2:
            values = values.T
        if family == "gpt_neox" and module == "query_key_value":  # rows of each head → rows of q, k and v
            heads_of_rows = values.reshape(config["num_attention_heads"], 3, -1, *values.shape[1:])
            values = heads_of_rows.swapaxes(0, 1).reshape(values.shape)
        if family in _NORMS_PLUS_ONE and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight"):
            values = values + 1
        name = f"{name}.weight" if name.endswith("layer_scalar") else name
        stored = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        stored = stored.replace("post_attention_norm", "ffn_norm") if family == "laguna" else stored
        writer.add_tensor(stored, np.ascontiguousarray(values))
    return write_file(writer, path)


def _add_embedding(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    """Add the pooling and the dense layers of sentence-transformers' modules, and the key for a missing mask."""
    if config.get("is_causal") is False:
        writer.add_causal_attention(False)
    if (folder / "1_Pooling").exists():
        writer.add_pooling_type(gguf.PoolingType.MEAN)
    for place in (2, 3):
        if (own := folder / f"{place}_Dense" / "model.safetensors").exists():
            weight = load_file(own)["linear.weight"]
            writer.add_dense_features_dims(f"dense_{place}", *weight.shape[::-1])
            writer.add_tensor(f"dense_{place}.weight", weight)


def _with_stacked_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors. Those of experts are stacked, under GGUF's names."""
    found, experts = dict[str, np.ndarray](), dict[str, dict[int, np.ndarray]]()
    for name, values in tensors.items():
        if match := _EXPERT.fullmatch(name):
            kind = _EXPERT_KINDS[match[3]]
            experts.setdefault(f"blk.{match[1]}.ffn_{kind}_exps.weight", {})[int(match[2])] = values
        elif match := _GRANITE_EXPERTS.fullmatch(name):
            kinds = ("gate", "up") if match[2] == "input" else ("down",)
            parts = np.split(values, len(kinds), axis=1)
            found |= {f"blk.{match[1]}.ffn_{kind}_exps.weight": part for kind, part in zip(kinds, parts, strict=True)}
        elif match := _GRANITE_SHARED.fullmatch(name):
            halves = zip(("gate", "up"), np.split(values, 2), strict=True)
            found |= {f"blk.{match[1]}.ffn_{kind}_shexp.weight": half for kind, half in halves}
        elif match := _GPT_OSS_EXPERTS.fullmatch(name):
            rows = values if match[3] else values.swapaxes(1, 2)
            halves = {"gate": rows[:, ::2], "up": rows[:, 1::2]} if match[2] == "gate_up" else {"down": rows}
            ending = "bias" if match[3] else "weight"
            found |= {f"blk.{match[1]}.ffn_{kind}_exps.{ending}": part for kind, part in halves.items()}
        elif match := _GEMMA4_EXPERTS.fullmatch(name):
            found[f"blk.{match[1]}.{_GEMMA4_PARTS[match[2]]}"] = values
        elif match := _LLAMA4_EXPERTS.fullmatch(name):
            rows = values.swapaxes(1, 2)
            kinds = ("gate", "up") if match[2] == "gate_up" else ("down",)
            parts = np.split(rows, len(kinds), axis=1)
            found |= {f"blk.{match[1]}.ffn_{kind}_exps.weight": part for kind, part in zip(kinds, parts, strict=True)}
        elif name.endswith(("self_attn.g_proj.weight", "self_attn.gate_proj.weight")):
            found[f"blk.{name.split('.')[2]}.attn_gate.weight"] = values
        elif name.endswith("self_attn.sinks"):
            found[f"blk.{name.split('.')[2]}.attn_sinks.weight"] = values
        elif name.endswith((".e_score_correction_bias", ".expert_bias")):
            found[f"blk.{name.split('.')[2]}.exp_probs_b.bias"] = values.reshape(-1)
        elif name.endswith("mlp.shared_expert_gate.weight"):
            found[name] = values[0]  # one row: llama.cpp's files drop this axis
        elif name.endswith("conv.conv.weight"):
            found[name] = values.squeeze(1)
        else:
            found[name] = values
    return found | {name: np.stack([each[key] for key in sorted(each)]) for name, each in experts.items()}


def _add_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if "intermediate_size" in config:
        size = _intermediate_size(config)
        num_own = config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0)
        sizes = [size if layer < num_own else 2 * size for layer in range(config["num_hidden_layers"])]
        writer.add_feed_forward_length(sizes if config.get("use_double_wide_mlp") else size)
    by_layer = config.get("num_attention_heads_per_layer") or [heads]
    writer.add_head_count(heads if len(set(by_layer)) == 1 else by_layer)
    kv_heads = heads if config["model_type"] in ("gpt_neox", "gpt2") else config.get("num_key_value_heads") or heads
    if config["model_type"] in ("lfm2", "lfm2_moe"):
        writer.add_head_count_kv([0 if kind == "conv" else kv_heads for kind in config["layer_types"]])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    elif "per_layer_config" in config:
        layers = config["per_layer_config"]
        counts = [layers.get(str(at), {}).get("num_key_value_heads") for at in range(config["num_hidden_layers"])]
        writer.add_head_count_kv([count or kv_heads for count in counts] if any(counts) else kv_heads)
    else:
        writer.add_head_count_kv(kv_heads)
    add_eps = writer.add_layer_norm_eps if config["model_type"] in _WITH_LAYER_NORM else writer.add_layer_norm_rms_eps
    add_eps(next((config[name] for name in _EPS_NAMES if name in config), 1e-5))
    writer.add_vocab_size(config["vocab_size"])
    if config.get("head_dim") is not None and "per_layer_config" not in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if config.get("sliding_window") and "sliding_attention" in config.get("layer_types", ["sliding_attention"]):
        writer.add_sliding_window(config["sliding_window"])
    chosen = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
    num_chosen = next((config[name] for name in chosen if config.get(name)), None)
    if num_chosen is not None:
        names = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
        writer.add_expert_count(next(config[name] for name in names if config.get(name)))
        writer.add_expert_used_count(num_chosen)
        if "moe_intermediate_size" in config:
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        if config["model_type"] == "llama4_text":
            writer.add_expert_feed_forward_length(config["intermediate_size"])
            writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
        if config["model_type"] == "ernie4_5_moe":
            writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
            writer.add_leading_dense_block_count(config["moe_layer_start_index"])
            writer.add_expert_shared_count(config["moe_num_shared_experts"])
            # The script divides intermediate_size by the number of key heads, which is the same for published models.
            shared = config["moe_num_shared_experts"] * config["moe_intermediate_size"]
            writer.add_expert_shared_feed_forward_length(shared)
        if "shared_intermediate_size" in config:
            writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
        if config["model_type"] in ("glm4_moe", "solar_open", "sarvam_moe", "dots1", "exaone_moe", "afmoe"):
            _add_sigmoid_experts(writer, config)
        if config["model_type"] in ("minimax_m2", "hunyuan_v1_moe"):
            writer.add_expert_feed_forward_length(config["intermediate_size"])
        if config["model_type"] == "hunyuan_v1_moe":
            writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
        if config["model_type"] == "lfm2_moe":
            writer.add_leading_dense_block_count(config["num_dense_layers"])
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        if "shared_expert_intermediate_size" in config:
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    has_kinds = config["model_type"] in _WITH_KINDS and config.get("sliding_window") is not None
    if config.get("use_bidirectional_attention") is True:
        has_kinds = False  # the file leaves out the pattern that llama.cpp has for its architecture
    if has_kinds or config.get("use_sliding_window"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    for key, add in (
        ("use_parallel_residual", writer.add_parallel_residual),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("logit_scale", writer.add_logit_scale),
    ):
        if config.get(key) is not None:
            add(config[key])


def _add_sigmoid_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_shared_count(config.get("n_shared_experts", config.get("num_shared_experts")))
    writer.add_expert_weights_scale(config.get("routed_scaling_factor", config.get("route_scale")))
    writer.add_expert_weights_norm(config.get("norm_topk_prob", True))
    first = config.get("num_dense_layers", config.get("first_k_dense_replace", 0))
    writer.add_leading_dense_block_count(first)
    if config["model_type"] != "glm4_moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _intermediate_size(config: dict[str, Any]) -> int:
    size: int = config.get("intermediate_size_mlp", config["intermediate_size"])
    if config.get("block_auto_adjust_ff_dim"):
        unit = config["block_multiple_of"]
        size = unit * ((int(config["block_ffn_dim_multiplier"] * int(2 * size / 3)) + unit - 1) // unit)
    return size


def _add_rope(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters")
    if rope is None:
        return
    if "sliding_attention" in rope:
        if config["model_type"] in ("gemma3_text", *_GEMMA4, "mellum") or _sliding_rope(config) is not None:
            writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    if rope.get("rope_type") == "proportional":  # `_add_gemma4` adds the other keys
        writer.add_rope_freq_base(rope["rope_theta"])
        return
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(rotated)
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for key, add in (
            ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ):
            if rope.get(key) is not None:
                add(rope[key])
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    if kind == "longrope":
        original = config["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        for which in ("long", "short"):
            writer.add_tensor(f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], np.float32))
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, rotated))


def _add_gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    full = next(layer["head_dim"] for layer in config["per_layer_config"].values())
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(full)
    for add in (writer.add_key_length_swa, writer.add_value_length_swa, writer.add_rope_dimension_count_swa):
        add(config["head_dim"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config.get("hidden_size_per_layer_input", 0))
    turned = int(full * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    factors = [1.0] * turned + [1e30] * (full // 2 - turned)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


def _sliding_rope(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the rope of Laguna's layers with windows, if it has any."""
    is_used = config["model_type"] == "laguna" and "sliding_attention" in config["layer_types"]
    return config["rope_parameters"]["sliding_attention"] if is_used else None


def _add_laguna(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(config["moe_routed_scaling_factor"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_leading_dense_block_count(config["mlp_layer_types"].index("sparse"))
    if (sliding := _sliding_rope(config)) is not None:
        writer.add_rope_dimension_count_swa(int(config["head_dim"] * sliding["partial_rotary_factor"]))


def _add_muse_glimmer(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the scale of the logits, and norms of q and k that have the scale of queries as their weights."""
    writer.add_logit_scale(config["output_multiplier"])
    for layer in range(config["num_hidden_layers"]):
        for which, weight in (("q", config["qk_scale_factor"]), ("k", 1.0)):
            values = np.full(config["head_dim"], weight, np.float32)
            writer.add_tensor(f"blk.{layer}.attn_{which}_norm.weight", values)


def _llama3_factors(rope: dict[str, Any], rotated: int) -> np.ndarray:
    """Return the factors as the converter computes them, from wave lengths and two bounds."""
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, rotated, 2) / rotated)
    context, factors = rope["original_max_position_embeddings"], []
    for wave in 2 * np.pi / frequencies:
        if wave < context / rope["high_freq_factor"]:
            factors.append(1.0)
        elif wave > context / rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            smooth = (context / wave - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def add_delta_nets(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    kinds = [kind == "linear_attention" for kind in config["layer_types"]]
    writer.add_full_attention_interval(4)
    if kinds != [bool((layer + 1) % 4) for layer in range(len(kinds))]:  # older files have only the interval
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", kinds)
    if writer.arch != "qwen3next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def convert_delta_net(name: str, values: np.ndarray, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors of a file for one tensor of a folder."""
    _, _, part = name.partition(".linear_attn.")
    if not part:
        return {name: values}
    at, key_dim = f"blk.{name.split('.')[2]}", config["linear_key_head_dim"]
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    shared, value_dim = value_heads // key_heads, config["linear_value_head_dim"]
    key_rows = 2 * key_heads * key_dim
    if part == "A_log":
        values = -np.exp(values)
    if part == "conv1d.weight":
        values = values.squeeze(1)
    if part == "in_proj_qkvz.weight":
        groups = values.reshape(key_heads, -1, values.shape[1])
        bounds = np.cumsum([key_dim, key_dim, shared * value_dim])
        q, k, v, z = (each.reshape(-1, values.shape[1]) for each in np.split(groups, bounds, axis=1))
        return {f"{at}.attn_qkv.weight": np.concatenate([q, k, v]), f"{at}.attn_gate.weight": z}

    def tiled(rows: np.ndarray) -> np.ndarray:
        """Return the rows of value heads so that neighbours belong to different key heads."""
        heads = rows.reshape(key_heads, shared, -1, *rows.shape[1:])
        return heads.swapaxes(0, 1).reshape(rows.shape)

    if config["model_type"] != "qwen3_next":
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            values = np.concatenate([values[:key_rows], tiled(values[key_rows:])])
        elif part == "out_proj.weight":
            values = tiled(values.T).T
        elif part != "norm.weight":
            values = tiled(values)
    return {f"{at}.{_NAMES[part]}": np.ascontiguousarray(values)}


_NAMES = {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias", "conv1d.weight": "ssm_conv1d.weight"}
_NAMES |= {"norm.weight": "ssm_norm.weight", "out_proj.weight": "ssm_out.weight", "in_proj_ba.weight": "ssm_ba.weight"}
_NAMES |= {"in_proj_qkv.weight": "attn_qkv.weight", "in_proj_z.weight": "attn_gate.weight"}
_NAMES |= {"in_proj_b.weight": "ssm_beta.weight", "in_proj_a.weight": "ssm_alpha.weight"}
