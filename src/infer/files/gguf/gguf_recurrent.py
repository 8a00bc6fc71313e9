"""Settings of recurrent layers under the names of Hugging Face's config.json, from GGUF's metadata."""

from typing import Any

from infer.files.gguf.gguf_values import GGUFValues

WITH_SHORT_CONVS = frozenset({"lfm2", "lfm2moe"})
WITH_DELTA_NETS = frozenset({"qwen3next", "qwen35", "qwen35moe"})
_IN_FILE_ORDER = "qwen3next"  # its converter keeps the value heads of a key head next to each other


def recurrent_settings(values: GGUFValues, num_layers: int) -> dict[str, Any]:
    """Return the settings of recurrent layers; {} if the architecture has none."""
    if values.architecture in WITH_SHORT_CONVS:
        return _short_convs(values, num_layers)
    return _delta_nets(values, num_layers) if values.architecture in WITH_DELTA_NETS else {}


def _short_convs(values: GGUFValues, num_layers: int) -> dict[str, Any]:
    """Return the settings of LFM2's convolutions. These layers have no heads of keys."""
    heads = values.get("attention.head_count_kv")
    found = {"conv_L_cache": values.count("shortconv.l_cache"), "block_auto_adjust_ff_dim": False}
    if not isinstance(heads, list):
        return found
    if len(heads) != num_layers:
        values.fail("attention.head_count_kv", f"expected a number for each of {num_layers} layers, got {len(heads)}")
    return {**found, "layer_types": ["full_attention" if count else "conv" for count in heads]}


def _delta_nets(values: GGUFValues, num_layers: int) -> dict[str, Any]:
    """Return the settings of gated delta nets. llama.cpp stores decays, not their logarithms."""
    num_value_heads, inner_size = values.count("ssm.time_step_rank"), values.count("ssm.inner_size")
    if inner_size % num_value_heads:
        values.fail("ssm.inner_size", f"expected a multiple of {num_value_heads} value heads, got {inner_size}")
    found = {
        "linear_conv_kernel_dim": values.count("ssm.conv_kernel"),
        "linear_num_key_heads": values.count("ssm.group_count"),
        "linear_num_value_heads": num_value_heads,
        "linear_key_head_dim": values.count("ssm.state_size"),
        "linear_value_head_dim": inner_size // num_value_heads,
        "linear_decay_is_log": False,
        "linear_value_heads_are_tiled": values.architecture != _IN_FILE_ORDER,
        "full_attention_interval": values.count("full_attention_interval", default=4),
    }
    flags = values.get("attention.recurrent_layers")  # includes layers that draft tokens
    if flags is None:
        return found
    if not isinstance(flags, list) or len(flags) < num_layers or not all(type(flag) is bool for flag in flags):
        values.fail("attention.recurrent_layers", f"expected a flag for each of {num_layers} layers, got {flags!r:.60}")
    kinds = ["linear_attention" if flag else "full_attention" for flag in flags[:num_layers]]
    return {**found, "layer_types": kinds}
