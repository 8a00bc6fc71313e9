"""Tiny random models of every family, made by `transformers`: the oracle for the forward pass."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PretrainedConfig, Qwen3Config

_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Tiny:
    """A family's configuration, one field away from its defaults in each interesting direction."""

    name: str
    config: PretrainedConfig


TINY = [
    Tiny("llama", LlamaConfig(num_hidden_layers=3, **_SIZES)),
    Tiny("llama_one_kv_head", LlamaConfig(num_hidden_layers=2, **_SIZES | {"num_key_value_heads": 1})),
    Tiny("llama_tied", LlamaConfig(num_hidden_layers=2, tie_word_embeddings=True, **_SIZES)),
    Tiny("llama_wide_heads", LlamaConfig(num_hidden_layers=2, head_dim=32, rms_norm_eps=1e-5, **_SIZES)),
    Tiny("llama3_rope", LlamaConfig(num_hidden_layers=2, rope_parameters=_LLAMA3_ROPE, **_SIZES)),
    Tiny(
        "llama_linear_rope",
        LlamaConfig(
            num_hidden_layers=2,
            rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
            **_SIZES,
        ),
    ),
    Tiny("qwen3", Qwen3Config(num_hidden_layers=3, head_dim=32, **_SIZES)),
    Tiny("qwen3_tied", Qwen3Config(num_hidden_layers=2, head_dim=16, tie_word_embeddings=True, **_SIZES)),
    Tiny("gemma3", Gemma3TextConfig(num_hidden_layers=7, head_dim=32, sliding_window=8, **_SIZES)),
    Tiny(
        "gemma3_scaled",
        Gemma3TextConfig(
            num_hidden_layers=6,
            head_dim=16,
            sliding_window=16,
            query_pre_attn_scalar=48,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
            **_SIZES,
        ),
    ),
]


def make_tiny(tiny: Tiny, folder: Path) -> Any:
    """The `transformers` model with random float32 weights, norms included, saved to the folder."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny.config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            parameter.add_(torch.randn_like(parameter) * spread if "norm" in name else 0)
            if parameter.dim() == 2:
                parameter.normal_(std=spread)
    model.save_pretrained(folder)
    return model
