"""Tiny encoders as GGUF files, under the names and keys that llama.cpp's converter writes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
from torch import Tensor

from encoder_models import with_fused_qkv
from gguf_files import write_file

ARCHITECTURES = dict.fromkeys(("bert", "distilbert", "electra", "roberta", "xlm-roberta"), "bert")
ARCHITECTURES |= {"nomic_bert": "nomic-bert", "modernbert": "modern-bert"}
_NAMES = {  # GGUF's name of a part: the names in `transformers`
    "token_embd": ("embeddings.word_embeddings", "embeddings.tok_embeddings"),
    "position_embd": ("embeddings.position_embeddings",),
    "token_types": ("embeddings.token_type_embeddings",),
    "token_embd_norm": ("embeddings.LayerNorm", "embeddings.norm"),
    "output_norm": ("final_norm",),
    "attn_q": ("attention.self.query", "attention.q_lin"),
    "attn_k": ("attention.self.key", "attention.k_lin"),
    "attn_v": ("attention.self.value", "attention.v_lin"),
    "attn_qkv": ("attn.Wqkv",),
    "attn_norm": ("attn_norm",),
    "attn_output": ("attention.output.dense", "attention.out_lin", "self_attn.o_proj", "attn.Wo"),
    "attn_output_norm": ("attention.output.LayerNorm", "sa_layer_norm", "post_attention_layernorm"),
    "ffn_norm": ("mlp_norm",),
    "ffn_gate": ("mlp.gate_proj",),
    "ffn_up": ("intermediate.dense", "ffn.lin1", "mlp.up_proj", "mlp.Wi"),
    "ffn_down": ("output.dense", "ffn.lin2", "mlp.down_proj", "mlp.Wo"),
    "layer_output_norm": ("output.LayerNorm", "output_layer_norm", "post_mlp_layernorm"),
    "cls": ("classifier.dense", "head.dense"),
    "cls.norm": ("head.norm",),
    "cls.output": ("classifier.out_proj", "classifier"),
}
_PARTS = {name: stored for stored, names in _NAMES.items() for name in names}


def write_gguf(model: Any, path: Path, metadata: Mapping[str, Any], pooling: int, **changes: Any) -> None:
    """Save a model of `encoder_models` with the metadata of a tokenizer. `changes` replace keys of the architecture."""
    config, architecture = model.config, ARCHITECTURES[model.config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in _settings(config, pooling).items():
        value = changes.get(key, value)
        adding = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        adding(f"{architecture}.{key}", value)
    for key, value in metadata.items():
        if key.startswith("tokenizer."):
            add_value(writer, key, value)
    if hasattr(model, "classifier"):
        writer.add_array(f"{architecture}.classifier.output_labels", list(config.id2label.values()))
    for name, tensor in _tensors(model).items():
        writer.add_tensor(name, tensor.numpy())
    write_file(writer, path)


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_array(key, list(value))


def _settings(config: Any, pooling: int) -> dict[str, Any]:
    eps = getattr(config, "layer_norm_eps", getattr(config, "norm_eps", 1e-12))
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings - (2 if "roberta" in config.model_type else 0),
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_epsilon": eps,
        "attention.causal": False,
        "pooling_type": pooling,
    }
    if config.model_type == "nomic_bert":
        found["rope.freq_base"] = config.rope_parameters["rope_theta"]
    if config.model_type == "modernbert":
        found["rope.freq_base"] = config.rope_parameters["full_attention"]["rope_theta"]
        found["rope.freq_base_swa"] = config.rope_parameters["sliding_attention"]["rope_theta"]
        found["classifier.pooling_type"] = {"mean": 1, "cls": 2}[config.classifier_pooling]
        found["attention.sliding_window"] = config.local_attention
        found["attention.sliding_window_pattern"] = config.layer_types[1:].index("full_attention") + 1
    return found


def _tensors(model: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    named = {name.removeprefix(prefix): tensor for name, tensor in model.state_dict().items()}
    tensors = {name: tensor for name, tensor in named.items() if not name.startswith("pooler.")}
    for name, tensor in with_fused_qkv(tensors).items():
        if name.startswith("embeddings.position_embeddings") and "roberta" in model.config.model_type:
            tensor = tensor[2:]
        module, _, kind = name.rpartition(".")
        at, layer = "", module.removeprefix("encoder.").removeprefix("transformer.")
        if layer.startswith(("layer.", "layers.")):
            _, index, layer = layer.split(".", 2)
            at = f"blk.{index}."
        found[f"{at}{_PARTS[layer]}.{kind}"] = tensor.contiguous()
    return found
