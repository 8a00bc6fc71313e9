"""Encoders in GGUF files: their settings under the names of Hugging Face's config.json, and our tensor names.

The architectures are llama.cpp's `bert` (also of DistilBERT, ELECTRA, RoBERTa and XLM-R; tables begin with a text's
first position), `nomic-bert` and `modern-bert`. GELU is computed exactly, as in training; llama.cpp approximates it.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from infer.errors import UnsupportedModelError
from infer.files.gguf.gguf import GGUFFile
from infer.files.gguf.gguf_values import GGUFValues
from infer.files.tensors.tensor_info import TensorInfo

_MODEL_TYPES = {"bert": "bert", "nomic-bert": "nomic_bert", "modern-bert": "modernbert"}
ENCODERS = frozenset(_MODEL_TYPES)
_TYPES = "token_types.weight"
_TOP = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embed_norm",
    "position_embd": "model.embed_positions",
    "token_types": "model.embed_types",
    "output_norm": "model.norm",
}
_LAYER = {
    "attn_norm": "attention_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_output_norm": "post_attention_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "layer_output_norm": "post_mlp_norm",
}
_TOP_IN_GGUF = {ours: theirs for theirs, ours in _TOP.items()}
_LAYER_IN_GGUF = {ours: theirs for theirs, ours in _LAYER.items()} | {"mlp.gate_up_proj": "ffn_up"}
_OUR_LAYER = re.compile(r"model\.layers\.([0-9]+)\.(.+)")
_IN_LAYER = re.compile(r"blk\.([0-9]+)\.(\w+)\.(weight|bias)")


def encoder_settings(file: GGUFFile, values: GGUFValues, vocab_size: int) -> dict[str, Any]:
    """Return the config of an encoder. Raises UnsupportedModelError for unsupported parts."""
    if values.has("expert_count") and values.get("expert_count"):
        raise UnsupportedModelError(f"{file.path.name}: encoders with experts are not supported")
    if values.get("attention.causal", False) is not False:
        raise UnsupportedModelError(f"{file.path.name}: {values.architecture} with a mask is not supported")
    num_heads = values.count("attention.head_count")
    has_bias = any(name.endswith((".attn_q.bias", ".attn_qkv.bias")) for name in file.tensors)
    config: dict[str, Any] = {
        "model_type": _MODEL_TYPES[values.architecture],
        "vocab_size": vocab_size,
        "hidden_size": values.count("embedding_length"),
        "num_hidden_layers": values.count("block_count", most=len(file.tensors)),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "intermediate_size": values.count("feed_forward_length"),
        "layer_norm_eps": values.real("attention.layer_norm_epsilon"),
        "max_position_embeddings": values.count("context_length"),
        "tie_word_embeddings": True,
    }
    if values.architecture == "bert":
        rows = {name: file.tensors[name].shape[0] for name in ("position_embd.weight",) if name in file.tensors}
        length = config["max_position_embeddings"]
        config["max_position_embeddings"] = most = rows.get("position_embd.weight", length)
        if length < most:
            config["text_limit"] = length
        return config | {"hidden_act": "gelu", "type_vocab_size": _num_types(file)}
    theta = values.real("rope.freq_base")
    if values.architecture == "nomic-bert":
        bias = {"qkv_proj_bias": has_bias, "mlp_fc1_bias": "blk.0.ffn_up.bias" in file.tensors}
        return config | bias | {"rope_parameters": {"rope_theta": theta}, "type_vocab_size": _num_types(file)}
    return config | {
        "global_rope_theta": theta,
        "local_rope_theta": values.real("rope.freq_base_swa", default=10_000.0),
        "local_attention": values.count("attention.sliding_window"),
        "global_attn_every_n_layers": values.count("attention.sliding_window_pattern", default=3),
        "norm_bias": "token_embd_norm.bias" in file.tensors,
        "attention_bias": has_bias,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def encoder_names_from_gguf(architecture: str, names: Iterable[str]) -> dict[str, str]:
    """Return our name for each name in the file. An unknown name stays unchanged."""
    found: dict[str, str] = {}
    for name in names:
        module, _, kind = name.rpartition(".")
        found[name] = f"{_TOP[module]}.{kind}" if module in _TOP else name
        match = _IN_LAYER.fullmatch(name)
        if match is not None and match[2] in _LAYER:
            own = "mlp.gate_up_proj" if architecture == "modern-bert" and match[2] == "ffn_up" else _LAYER[match[2]]
            found[name] = f"model.layers.{match[1]}.{own}.{match[3]}"
    return found


def encoder_name_in_gguf(name: str) -> str | None:
    """Return the name of one of our tensors in an encoder's GGUF file, or None if there is none."""
    module, _, kind = name.rpartition(".")
    match = _OUR_LAYER.fullmatch(module)
    if match is None:
        found = _TOP_IN_GGUF.get(module)
        return None if found is None else f"{found}.{kind}"
    own = _LAYER_IN_GGUF.get(match[2])
    return None if own is None else f"blk.{match[1]}.{own}.{kind}"


def with_rows_of_types(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors with a table of types that has two axes. Some writers drop an axis of length one."""
    types = tensors.get(name := "model.embed_types.weight")
    if types is None or len(types.shape) > 1:
        return tensors
    return tensors | {name: replace(types, shape=(1, *types.shape))}


def _num_types(file: GGUFFile) -> int:
    types = file.tensors.get(_TYPES)
    if types is None:
        return 0
    return types.shape[0] if len(types.shape) > 1 else 1
