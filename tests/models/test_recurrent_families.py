"""Families with recurrent layers: the architecture of a config, and of the metadata of a GGUF file."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from gguf_files import write_file
from infer.compute.operands.feed_forwards import Dense
from infer.compute.operands.mixers import Attention, GatedDeltaNet, Rope, ShortConv
from infer.errors import ModelError
from infer.files import open_checkpoint
from infer.files.config import config_from_folder
from infer.models.families import make_architecture
from refusals import refusal
from tiny import BY_NAME


def test_published_configs_of_lfm2_use_older_names() -> None:
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 16}
    older = {"block_ff_dim": 12288, "theta": 1e6, "tie_embedding": True, "norm_eps": 1e-5, "full_attn_idxs": [2]}
    newer = {"intermediate_size": 12288, "tie_word_embeddings": True, "layer_types": ["conv"] * 2 + ["full_attention"]}
    architecture = make_architecture({"model_type": "lfm2", **sizes, **older})
    assert architecture == make_architecture({"model_type": "lfm2", **sizes, **newer})
    assert architecture.layers[0].feed_forward == Dense(8192)
    assert architecture.attention[0].num_kv_heads == 8
    both = {**older, "intermediate_size": 5, "tie_word_embeddings": False}
    assert make_architecture({"model_type": "lfm2", **sizes, **both}) == architecture


def test_published_configs_of_qwen3_5_have_their_text_inside(tmp_path: Path) -> None:
    rope = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_theta": 1e7, "rope_type": "default"}
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8}
    sizes |= {"num_attention_heads": 8, "max_position_embeddings": 262_144}
    text = {**sizes, "rope_parameters": rope, "attn_output_gate": True, "mtp_num_hidden_layers": 1}
    whole = {"model_type": "qwen3_5", "vision_config": {}, "tie_word_embeddings": True, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    architecture = make_architecture(config_from_folder(tmp_path))
    assert [type(layer.mixer) for layer in architecture.layers] == [*[GatedDeltaNet] * 3, Attention] * 2
    assert architecture.mixers[0] == GatedDeltaNet(16, 32, 128, 128, 4)
    assert (architecture.attention[0].head_dim, architecture.attention[0].num_kv_heads) == (256, 4)
    assert architecture.ropes == (Rope(theta=1e7, dim=64),)
    assert architecture.tied_embeddings
    named = {**text, "model_type": "qwen3_5_text", "tie_word_embeddings": True}
    assert replace(make_architecture(named), family="qwen3_5") == architecture
    third = make_architecture({**named, "full_attention_interval": 3})
    assert [layer for layer, mixer in enumerate(third.mixers) if isinstance(mixer, Attention)] == [2, 5]


def lfm2_file(path: Path, kv_heads: list[int], *, gating: int = 2, cache: int = 3) -> Path:
    """Write a file with the metadata of an LFM2-MoE, and one tensor."""
    writer = gguf.GGUFWriter(path, "lfm2moe")
    numbers = {"block_count": 3, "context_length": 64, "embedding_length": 8, "feed_forward_length": 8, "vocab_size": 3}
    numbers |= {"head_count": 4, "shortconv_l_cache": cache, "expert_count": 4, "expert_used_count": 2}
    for name, value in numbers.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType(gating))
    for name in "abc":  # a file has as many layers as tensors, at most
        writer.add_tensor(name, np.zeros((3, 8), np.float32))
    return write_file(writer, path)


def test_layers_without_heads_of_keys_are_convolutions_in_a_gguf_file(tmp_path: Path) -> None:
    config = open_checkpoint(lfm2_file(tmp_path / "model.gguf", [0, 2, 0])).config
    assert (config["layer_types"], config["num_key_value_heads"]) == (["conv", "full_attention", "conv"], 2)
    assert not config["use_expert_bias"]
    kinds = [type(layer.mixer) for layer in make_architecture(config).layers]
    assert kinds == [ShortConv, Attention, ShortConv]
    none = open_checkpoint(lfm2_file(tmp_path / "none.gguf", [0, 0, 0])).config
    assert not make_architecture(none).attention


IMPOSSIBLE_METADATA = [
    ({"kv_heads": [0, 2]}, "head_count_kv: expected a number for each of 3 layers, got 2"),
    ({"kv_heads": [1, 2, 0]}, "head_count_kv differs between layers"),
    ({"kv_heads": [0, 2, 0], "gating": 1}, "expert_gating_func 1 is not supported for lfm2moe"),
    ({"kv_heads": [0, 2, 0], "cache": 0}, "shortconv.l_cache: expected an integer from 1"),
]


@pytest.mark.parametrize(("settings", "message"), IMPOSSIBLE_METADATA)
def test_metadata_that_cannot_be_is_refused_in_a_line(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert message in refusal(lambda: open_checkpoint(lfm2_file(tmp_path / "model.gguf", **settings)), ModelError)


IMPOSSIBLE_SETTINGS = [
    ("lfm2", {"layer_types": ["conv"]}, "layer_types must list num_hidden_layers=4 names, got ['conv']"),
    ("lfm2", {"layer_types": ["mamba"] * 4}, "layer type 'mamba' is not supported"),
    ("lfm2", {"layer_types": None, "full_attn_idxs": 2}, "full_attn_idxs must list the numbers of layers, got 2"),
    ("lfm2", {"conv_L_cache": 0}, "conv_L_cache must be a whole number from 1 to 64, got 0"),
    ("lfm2", {"conv_L_cache": 65}, "conv_L_cache must be a whole number from 1 to 64, got 65"),
    ("lfm2", {"conv_bias": 1}, "conv_bias must be true or false, got 1"),
    ("lfm2", {"block_ffn_dim_multiplier": 0}, "block_ffn_dim_multiplier must be a number above 0, got 0"),
    ("lfm2", {"block_multiple_of": 0}, "block_multiple_of must be a whole number from 1"),
    ("lfm2", {"intermediate_size": 1, "block_ffn_dim_multiplier": None}, "from 1 to 2147483648, got 0"),
    ("lfm2", {"norm_eps": 0}, "rms_norm_eps must be a number above 0, got 0"),
    ("lfm2", {"sliding_window": 8}, "sliding_window=8 is not supported for lfm2"),
    ("lfm2_moe", {"num_dense_layers": -1}, "num_dense_layers must be a whole number of at least 0, got -1"),
    ("lfm2_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok must be at most num_experts=6, got 7"),
    ("lfm2_moe", {"routed_scaling_factor": 0}, "routed_scaling_factor must be a number above 0, got 0"),
    ("qwen3_5", {"layer_types": ["conv"] * 4}, "layer type 'conv' is not supported"),
    ("qwen3_5", {"layer_types": None, "full_attention_interval": 0}, "full_attention_interval must be a whole"),
    ("qwen3_5", {"linear_num_value_heads": 5}, "must be a multiple of linear_num_key_heads=2"),
    ("qwen3_5", {"linear_num_key_heads": 0}, "linear_num_key_heads must be a whole number from 1"),
    ("qwen3_5", {"linear_key_head_dim": 5000}, "must be a whole number from 1 to 4096, got 5000"),
    ("qwen3_5", {"linear_value_head_dim": "x"}, "linear_value_head_dim must be a whole number from 1 to 4096"),
    ("qwen3_5", {"linear_conv_kernel_dim": 65}, "linear_conv_kernel_dim must be a whole number from 1 to 64"),
    ("qwen3_5", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported for qwen3_5_text: it must be 'silu'"),
    ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate=false is not supported for qwen3_5_text"),
    ("qwen3_next", {"num_experts_per_tok": 7}, "num_experts_per_tok must be at most num_experts=6, got 7"),
    ("qwen3_5_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size must be a whole"),
]


@pytest.mark.parametrize(("name", "settings", "message"), IMPOSSIBLE_SETTINGS)
def test_settings_that_cannot_be_are_refused_in_a_line(name: str, settings: dict[str, Any], message: str) -> None:
    assert message in refusal(lambda: make_architecture(BY_NAME[name].config.to_dict() | settings), ModelError)
