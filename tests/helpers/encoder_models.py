"""Tiny random encoders of every family, made by `transformers`: the oracle for hidden states and vectors."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

import embedding_model

CONTEXT = 1200
_SIZES: dict[str, Any] = {"vocab_size": 300, "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
_SIZES |= {"intermediate_size": 112, "pad_token_id": 1}
SLIDING = "sliding_attention"
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4}
_LLAMA3 |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_MARKS = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}


@dataclass(frozen=True)
class Encoder:
    """A family, and settings that differ from its class's defaults."""

    name: str
    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)


_BIASED = {"max_position_embeddings": CONTEXT, "local_attention": 600, "norm_bias": True, "attention_bias": True}
_BIASED |= {"mlp_bias": True, "global_attn_every_n_layers": 2, "norm_eps": 1e-3, **_MARKS}
ENCODERS = (
    Encoder("bert", "bert", {"max_position_embeddings": CONTEXT}),
    Encoder("bert-odd", "bert", {"max_position_embeddings": CONTEXT, "hidden_size": 60, "hidden_act": "gelu_new"}),
    Encoder("bert-relu", "bert", {"max_position_embeddings": CONTEXT, "hidden_act": "relu", "type_vocab_size": 3}),
    Encoder("distilbert", "distilbert", {"max_position_embeddings": CONTEXT, "hidden_dim": 112}),
    Encoder("electra", "electra", {"max_position_embeddings": CONTEXT, "embedding_size": 96}),
    Encoder("roberta", "roberta", {"max_position_embeddings": CONTEXT + 2, "type_vocab_size": 1}),
    Encoder("xlm-roberta", "xlm-roberta", {"max_position_embeddings": CONTEXT + 2, "layer_norm_eps": 1e-5}),
    Encoder("nomic", "nomic_bert", {"max_position_embeddings": CONTEXT}),
    Encoder("modernbert", "modernbert", {"max_position_embeddings": CONTEXT, "local_attention": 32, **_MARKS}),
    Encoder("modernbert-biased", "modernbert", _BIASED),
)
_OF_DECODERS: dict[str, Any] = {"max_position_embeddings": CONTEXT, "num_key_value_heads": 2, "is_causal": False}
_EMBEDDING_GEMMA = {key: value for key, value in _OF_DECODERS.items() if key != "is_causal"}
_EMBEDDING_GEMMA |= {"use_bidirectional_attention": True, "sliding_window": 40, "head_dim": 32}
_EMBEDDING_GEMMA |= {"query_pre_attn_scalar": 32, "num_hidden_layers": 7}
_WINDOWS = {"use_sliding_window": True, "sliding_window": 33}
_MULTIPLIERS = {"residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 8.0}
_BOTH = {"use_bidirectional_attention": True, "sliding_window": 601, "layer_types": [SLIDING] * 4}
_BOTH |= {"head_dim": 24, "query_pre_attn_scalar": 24}
_CAUSAL_FALSE = {"sliding_window": 40, "sliding_window_pattern": 2, "num_key_value_heads": 1}
# Decoders whose configs say that there is no mask.
WITHOUT_MASK = (
    Encoder("embedding-gemma", "gemma3_text", _EMBEDDING_GEMMA),
    Encoder("gemma3-both", "gemma3_text", _OF_DECODERS | _BOTH),
    Encoder("gemma3-causal-false", "gemma3_text", _OF_DECODERS | _CAUSAL_FALSE),
    Encoder("gemma2", "gemma2", _OF_DECODERS | {"sliding_window": 40, "head_dim": 32, "attn_logit_softcapping": 1.5}),
    Encoder("llama", "llama", {**_OF_DECODERS, "rope_parameters": _LLAMA3}),
    Encoder("qwen2", "qwen2", _OF_DECODERS),
    Encoder("qwen2-windows", "qwen2", _OF_DECODERS | _WINDOWS | {"max_window_layers": 1}),
    Encoder("qwen3", "qwen3", _OF_DECODERS | {"head_dim": 32}),
    Encoder("mistral", "mistral", _OF_DECODERS | {"sliding_window": 16}),
    Encoder("phi3", "phi3", _OF_DECODERS | {"sliding_window": None}),
    Encoder("olmo2", "olmo2", _OF_DECODERS),
    Encoder("granite", "granite", _OF_DECODERS | _MULTIPLIERS),
)
BY_NAME = {encoder.name: encoder for encoder in (*ENCODERS, *WITHOUT_MASK)}


def config_of(encoder: Encoder, **settings: Any) -> Any:
    return AutoConfig.for_model(encoder.model_type, **_SIZES | dict(encoder.settings) | settings)


def make_encoder(encoder: Encoder, folder: Path, **settings: Any) -> Any:
    """Save a model with random weights, norms and biases, and return it. With `id2label` it is a classifier."""
    torch.manual_seed(0)
    config = config_of(encoder, **settings)
    kind = AutoModelForSequenceClassification if "id2label" in settings else AutoModel
    model = kind.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1 if "embedding" in name else parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return model


def with_fused_qkv(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with q, k and v of each layer as one, `attn.Wqkv`, if they are `self_attn.[qkv]_proj`."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".self_attn.q_proj" in name:
            parts = [tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            found[name.replace("self_attn.q_proj", "attn.Wqkv")] = torch.cat(parts)
        elif ".self_attn.k_proj" not in name and ".self_attn.v_proj" not in name:
            found[name] = tensor
    return found


def states_of(model: Any, ids: list[int], second_start: int | None = None) -> Tensor:
    """Return the last hidden states of one text, or of a pair whose second text begins at a place."""
    kinds: dict[str, Tensor] = {}
    if second_start is not None:
        kinds["token_type_ids"] = (torch.arange(len(ids)) >= second_start).long()[None]
    with torch.inference_mode():
        found: Tensor = model(torch.tensor([ids]), **kinds).last_hidden_state[0]
    return found


def write_modules(folder: Path, **pooling: Any) -> None:
    """Write the files of sentence-transformers for a pooling and a norm of the vectors."""
    embedding_model.write_modules(folder, ["Transformer", "Pooling", "Normalize"])
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
