"""Llama 4's settings in GGUF's metadata, under the names of Hugging Face's config."""

from collections.abc import Mapping
from typing import Any

from infer.files.gguf.gguf_values import GGUFValues

_WITHOUT_NORMS = 128  # number of experts, by which llama.cpp distinguishes the models


def llama4_settings(values: GGUFValues, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of layers in a file. Chunks and the scale of queries are constants of llama.cpp."""
    num_layers, is_full = config["num_hidden_layers"], values.get("attention.sliding_window") == 0
    found: dict[str, Any] = {
        "intermediate_size_mlp": config["intermediate_size"],
        "intermediate_size": values.count("expert_feed_forward_length"),
        "interleave_moe_layer_step": values.count("interleave_moe_layer_step"),
        "use_qk_norm": config.get("num_experts") != _WITHOUT_NORMS,
    }
    if is_full:  # then every layer rotates
        return found | {"attention_chunk_size": None, "no_rope_layers": [1] * num_layers, "layer_types": None}
    kinds = config.get("layer_types") or []
    chunked = ["chunked_attention" if kind == "sliding_attention" else kind for kind in kinds]
    return found | {"layer_types": chunked or None}
