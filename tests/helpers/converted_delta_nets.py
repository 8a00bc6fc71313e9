"""Gated delta nets as llama.cpp's convert_hf_to_gguf.py writes them: decays, split projections, tiled value heads."""

from typing import Any

import gguf
import numpy as np


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
