"""Gemma 4's settings in GGUF's metadata, under the names of Hugging Face's config."""

from collections.abc import Mapping
from typing import Any

from infer.files.gguf.gguf_values import GGUFValues

_KV_HEADS, _SIZES = "attention.head_count_kv", "feed_forward_length"


def gemma4_settings(values: GGUFValues, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the two kinds of layers, which a file has as lists."""
    kinds = config.get("layer_types") or []
    full = kinds.index("full_attention") if "full_attention" in kinds else 0
    sliding = kinds.index("sliding_attention") if "sliding_attention" in kinds else 0
    kv_heads, sizes = values.get(_KV_HEADS), values.get(_SIZES)
    for key, given in ((_KV_HEADS, kv_heads), (_SIZES, sizes)):
        if isinstance(given, list) and len(given) != config["num_hidden_layers"]:
            values.fail(key, f"expected a number for each of {config['num_hidden_layers']} layers, got {len(given)}")
    names = values.file.tensors
    found: dict[str, Any] = {
        "global_head_dim": config["head_dim"],
        "head_dim": values.count("attention.key_length_swa", default=config["head_dim"]),
        "hidden_size_per_layer_input": values.get("embedding_length_per_layer_input", 0),
        "num_kv_shared_layers": values.get("attention.shared_kv_layers", 0),
        "attention_k_eq_v": not {f"blk.{full}.attn_v.weight", f"blk.{full}.attn_qkv.weight"} & set(names),
        "enable_moe_block": bool(values.get("expert_count", 0)),
        "use_double_wide_mlp": isinstance(sizes, list) and sizes[-1] == 2 * sizes[0],
    }
    if isinstance(kv_heads, list):
        found |= {"num_key_value_heads": kv_heads[sliding], "num_global_key_value_heads": kv_heads[full]}
    return found
