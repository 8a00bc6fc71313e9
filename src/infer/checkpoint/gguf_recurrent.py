"""Settings of recurrent layers under the names of Hugging Face's config.json, from GGUF's metadata."""

from typing import Any

from infer.checkpoint.gguf_values import GGUFValues

WITH_SHORT_CONVS = frozenset({"lfm2", "lfm2moe"})


def recurrent_settings(values: GGUFValues, num_layers: int) -> dict[str, Any]:
    """Return the settings of recurrent layers; {} if the architecture has none."""
    return _short_convs(values, num_layers) if values.architecture in WITH_SHORT_CONVS else {}


def _short_convs(values: GGUFValues, num_layers: int) -> dict[str, Any]:
    """Return the settings of LFM2's convolutions, which are the layers without heads of keys."""
    heads = values.get("attention.head_count_kv")
    found = {"conv_L_cache": values.count("shortconv.l_cache"), "block_auto_adjust_ff_dim": False}
    if not isinstance(heads, list):
        return found
    if len(heads) != num_layers:
        values.fail("attention.head_count_kv", f"expected a number for each of {num_layers} layers, got {len(heads)}")
    return {**found, "layer_types": ["full_attention" if count else "conv" for count in heads]}
