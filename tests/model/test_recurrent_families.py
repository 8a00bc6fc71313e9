"""Families with recurrent layers: the architecture of a config, and every tensor of a folder and of a GGUF file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from converted import convert
from infer.checkpoint import Checkpoint, open_checkpoint
from infer.checkpoint.lazy_weights import LazyWeights
from infer.errors import ModelError
from infer.model.families import make_architecture
from infer.model.tensors import check_tensors, expected_shapes
from infer.model.weight_loader import dense
from infer.operands.architecture import Architecture, Attention, Dense, Experts, Norms, Rope, Router, ShortConv
from tiny import RECURRENT, Tiny, make_tiny

_NOT_IN_GGUF = {"lfm2_biases", "lfm2_moe_plain"}  # llama.cpp has neither these biases nor such a router
CONVERTED = [tiny for tiny in RECURRENT if tiny.name not in _NOT_IN_GGUF]
BY_NAME = {tiny.name: tiny for tiny in RECURRENT}


def opened(path: Path) -> tuple[Checkpoint, Architecture, Mapping[str, Any]]:
    checkpoint = open_checkpoint(path)
    return checkpoint, make_architecture(checkpoint.config), LazyWeights(checkpoint.tensors)


def wanted_tensors(oracle: Any) -> dict[str, Tensor]:
    """Return the parameters of `transformers`' model under our names, from where its code uses them."""
    found = {"model.embed_tokens.weight": oracle.model.embed_tokens.weight, "lm_head.weight": oracle.lm_head.weight}
    found["model.norm.weight"] = oracle.model.embedding_norm.weight
    for index, layer in enumerate(oracle.model.layers):
        tensors = {"attention_norm.weight": layer.operator_norm.weight, "mlp_norm.weight": layer.ffn_norm.weight}
        tensors |= _attention(layer.self_attn) if hasattr(layer, "self_attn") else _short_conv(layer.conv)
        tensors |= _feed_forward(layer.feed_forward)
        found |= {f"model.layers.{index}.{name}": tensor for name, tensor in tensors.items() if tensor is not None}
    return {name: tensor.detach() for name, tensor in found.items()}


def _attention(attention: Any) -> dict[str, Tensor]:
    found = {f"self_attn.{which}_proj.weight": getattr(attention, f"{which}_proj").weight for which in "qkv"}
    found["self_attn.o_proj.weight"] = attention.out_proj.weight
    return found | {f"self_attn.{which}_norm.weight": getattr(attention, f"{which}_layernorm").weight for which in "qk"}


def _short_conv(conv: Any) -> dict[str, Tensor]:
    found = {"conv.taps": conv.conv.weight[:, 0], "conv.bias": conv.conv.bias}
    for name in ("in_proj", "out_proj"):
        module = getattr(conv, name)
        found |= {f"conv.{name}.weight": module.weight, f"conv.{name}.bias": module.bias}
    return found


def _feed_forward(module: Any) -> dict[str, Tensor]:
    if hasattr(module, "w1"):
        names = {"gate": "w1", "up": "w3", "down": "w2"}
        return {f"mlp.{ours}_proj.weight": getattr(module, theirs).weight for ours, theirs in names.items()}
    found = {"mlp.router.weight": module.gate.weight, "mlp.router.correction": getattr(module, "expert_bias", None)}
    for expert, (gate_up, down) in enumerate(zip(module.experts.gate_up_proj, module.experts.down_proj, strict=True)):
        gate, up = gate_up.chunk(2)
        parts = {"gate": gate, "up": up, "down": down}
        found |= {f"mlp.experts.{expert}.{name}_proj.weight": tensor for name, tensor in parts.items()}
    return found


def assert_equal(weights: Mapping[str, Any], wanted: Mapping[str, Tensor], architecture: Architecture) -> None:
    names = expected_shapes(architecture)
    assert set(names) <= set(wanted)
    for name in names:
        torch.testing.assert_close(dense(weights[name]), wanted[name], rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("tiny", RECURRENT, ids=lambda tiny: tiny.name)
def test_a_folder_has_every_tensor_of_the_architecture_with_its_values(tiny: Tiny, tmp_path: Path) -> None:
    oracle = make_tiny(tiny, tmp_path)
    checkpoint, architecture, weights = opened(tmp_path)
    check_tensors(expected_shapes(architecture), checkpoint.tensors)
    assert_equal(weights, wanted_tensors(oracle), architecture)


@pytest.mark.parametrize("tiny", CONVERTED, ids=lambda tiny: tiny.name)
def test_a_converted_file_has_the_architecture_and_the_values_of_the_folder(tiny: Tiny, tmp_path: Path) -> None:
    oracle = make_tiny(tiny, tmp_path)
    checkpoint, architecture, weights = opened(convert(tmp_path, tmp_path / "model.gguf"))
    assert architecture == make_architecture(json.loads((tmp_path / "config.json").read_text()))
    check_tensors(expected_shapes(architecture), checkpoint.tensors)
    assert_equal(weights, wanted_tensors(oracle), architecture)


def test_lfm2_is_convolutions_and_attention_with_norms_of_heads() -> None:
    architecture = make_architecture(BY_NAME["lfm2"].config.to_dict())
    rope = Rope(theta=1e6, dim=16)
    attention = Attention(num_heads=4, num_kv_heads=2, head_dim=16, rope=rope, scale=0.25, qk_norm="head")
    assert [layer.mixer for layer in architecture.layers] == [ShortConv(64, 3), attention] * 2
    assert {layer.feed_forward for layer in architecture.layers} == {Dense(96)}  # 83 = ⌊1.3 ⌊2 / 3 · 96⌋⌋, by 32
    assert {layer.norms for layer in architecture.layers} == {Norms(before=True)}
    assert architecture.tied_embeddings
    assert architecture.norm_eps == 1e-5
    biased = make_architecture(BY_NAME["lfm2_biases"].config.to_dict())
    assert biased.layers[0].mixer == ShortConv(64, 4, has_bias=True)
    assert biased.norm_eps == 1e-3
    assert not biased.tied_embeddings


def test_lfm2_moe_has_experts_after_its_first_layers() -> None:
    architecture = make_architecture(BY_NAME["lfm2_moe"].config.to_dict())
    router = Router(6, 2, "sigmoid", is_normalized=True, floor=1e-6, has_correction=True)
    assert [layer.feed_forward for layer in architecture.layers] == [Dense(96), *[Experts(router, 64)] * 3]
    plain = make_architecture(BY_NAME["lfm2_moe_plain"].config.to_dict())
    assert plain.layers[0].feed_forward == Experts(Router(5, 3, "sigmoid", floor=1e-6, scale=1.8), 64)


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


def lfm2_file(path: Path, kv_heads: list[int], *, gating: int = 2, cache: int = 3) -> Path:
    """Write a file with the metadata of an LFM2-MoE, and one tensor."""
    writer = gguf.GGUFWriter(path, "lfm2moe")
    writer.add_block_count(3)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(4)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(3)
    writer.add_shortconv_l_cache(cache)
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType(gating))
    for name in "abc":  # a file has as many layers as tensors, at most
        writer.add_tensor(name, np.zeros((3, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_layers_without_heads_of_keys_are_convolutions_in_a_gguf_file(tmp_path: Path) -> None:
    config = open_checkpoint(lfm2_file(tmp_path / "model.gguf", [0, 2, 0])).config
    assert config["layer_types"] == ["conv", "full_attention", "conv"]
    assert config["num_key_value_heads"] == 2
    assert not config["use_expert_bias"]
    kinds = [type(layer.mixer) for layer in make_architecture(config).layers]
    assert kinds == [ShortConv, Attention, ShortConv]
    none = open_checkpoint(lfm2_file(tmp_path / "none.gguf", [0, 0, 0])).config
    assert not make_architecture(none).attention


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_heads": [0, 2]}, "head_count_kv: expected a number for each of 3 layers, got 2"),
        ({"kv_heads": [1, 2, 0]}, "head_count_kv differs between layers"),
        ({"kv_heads": [0, 2, 0], "gating": 1}, "expert_gating_func 1 is not supported for lfm2moe"),
        ({"kv_heads": [0, 2, 0], "cache": 0}, "shortconv.l_cache: expected an integer from 1"),
    ],
)
def test_metadata_that_cannot_be_is_refused_in_a_line(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        open_checkpoint(lfm2_file(tmp_path / "model.gguf", **settings))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
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
    ],
)
def test_settings_that_cannot_be_are_refused_in_a_line(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        make_architecture(BY_NAME[name].config.to_dict() | settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
