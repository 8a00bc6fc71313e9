"""Families with recurrent layers: the architecture of a config, and every tensor of a folder and of a GGUF file."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from converted import convert
from infer.checkpoint import Checkpoint, open_checkpoint
from infer.checkpoint.config import config_from_folder
from infer.checkpoint.lazy_weights import LazyWeights
from infer.errors import ModelError
from infer.model.families import make_architecture
from infer.model.tensors import check_tensors, expected_shapes
from infer.model.weight_loader import dense
from infer.operands.architecture import Architecture, Layer, Norms
from infer.operands.feed_forwards import Dense, Experts, Router
from infer.operands.mixers import Attention, GatedDeltaNet, Rope, ShortConv
from tiny import DELTA_NETS, RECURRENT, Tiny, make_tiny

_GATED = ("gate", "up", "down")
_PARTS = ("qkv", "z", "b", "a")  # of a gated delta net's projections
# llama.cpp's files have no word for these biases, these routers, and dense layers among layers with experts.
_NOT_IN_GGUF = {"lfm2_biases", "lfm2_moe_plain", "qwen3_next_mixed"}
CASES = [*RECURRENT, *DELTA_NETS]
CONVERTED = [tiny for tiny in CASES if tiny.name not in _NOT_IN_GGUF]
BY_NAME = {tiny.name: tiny for tiny in CASES}


def opened(path: Path) -> tuple[Checkpoint, Architecture, Mapping[str, Any]]:
    checkpoint = open_checkpoint(path)
    return checkpoint, make_architecture(checkpoint.config), LazyWeights(checkpoint.tensors)


def wanted_tensors(oracle: Any) -> dict[str, Tensor]:
    """Return the parameters of `transformers`' model under our names, from where its code uses them."""
    found = {"model.embed_tokens.weight": oracle.model.embed_tokens.weight, "lm_head.weight": oracle.lm_head.weight}
    is_lfm2 = oracle.config.model_type.startswith("lfm2")
    found["model.norm.weight"] = oracle.model.embedding_norm.weight if is_lfm2 else oracle.model.norm.weight + 1
    for index, layer in enumerate(oracle.model.layers):
        tensors = _of_lfm2(layer) if is_lfm2 else _of_qwen(layer)
        found |= {f"model.layers.{index}.{name}": tensor for name, tensor in tensors.items() if tensor is not None}
    return {name: tensor.detach() for name, tensor in found.items()}


def _of_lfm2(layer: Any) -> dict[str, Tensor]:
    found = {"attention_norm.weight": layer.operator_norm.weight, "mlp_norm.weight": layer.ffn_norm.weight}
    found |= _lfm2_attention(layer.self_attn) if hasattr(layer, "self_attn") else _short_conv(layer.conv)
    return found | _lfm2_feed_forward(layer.feed_forward)


def _of_qwen(layer: Any) -> dict[str, Tensor]:
    found = {
        "attention_norm.weight": layer.input_layernorm.weight + 1,
        "mlp_norm.weight": layer.post_attention_layernorm.weight + 1,
    }
    if hasattr(layer, "self_attn"):
        for which in "qkvo":
            module = getattr(layer.self_attn, f"{which}_proj")
            found |= {f"self_attn.{which}_proj.weight": module.weight, f"self_attn.{which}_proj.bias": module.bias}
        for kind in ("weight", "bias"):  # the rows of q and of the gates alternate by heads
            both = found[f"self_attn.q_proj.{kind}"]
            if both is not None:
                heads = both.unflatten(0, (oracle_heads(layer), 2, -1))
                found[f"self_attn.q_proj.{kind}"] = heads[:, 0].flatten(0, 1)
                found[f"self_attn.gate_proj.{kind}"] = heads[:, 1].flatten(0, 1)
        found |= {
            f"self_attn.{which}_norm.weight": getattr(layer.self_attn, f"{which}_norm").weight + 1 for which in "qk"
        }
    else:
        found |= _delta_net(layer.linear_attn)
    if hasattr(layer.mlp, "gate_proj"):
        return found | {f"mlp.{which}_proj.weight": getattr(layer.mlp, f"{which}_proj").weight for which in _GATED}
    found |= {"mlp.router.weight": layer.mlp.gate.weight, "mlp.shared_gate.weight": layer.mlp.shared_expert_gate.weight}
    shared = layer.mlp.shared_expert
    found |= {f"mlp.shared_expert.{which}_proj.weight": getattr(shared, f"{which}_proj").weight for which in _GATED}
    return found | _experts(layer.mlp.experts)


def oracle_heads(layer: Any) -> int:
    heads: int = layer.self_attn.config.num_attention_heads
    return heads


def _delta_net(net: Any) -> dict[str, Tensor]:
    """Return a net's parameters. The rows of fused projections are those that `transformers`' own code takes apart."""
    found = {"linear_attn.norm.weight": net.norm.weight, "linear_attn.out_proj.weight": net.out_proj.weight}
    found |= {"linear_attn.dt_bias": net.dt_bias, "linear_attn.decay": net.A_log}
    found["linear_attn.taps"] = net.conv1d.weight[:, 0]
    if hasattr(net, "in_proj_qkv"):
        return found | {f"linear_attn.{which}_proj.weight": getattr(net, f"in_proj_{which}").weight for which in _PARTS}
    # The result for a unit vector is a column, so that for all of them the results are the matrix's columns.
    fused = (module.weight.T[None] for module in (net.in_proj_qkvz, net.in_proj_ba))
    parts = [part.reshape(net.hidden_size, -1).T for part in net.fix_query_key_value_ordering(*fused)]
    matrices = torch.cat(parts[:3]), *parts[3:]
    return found | {f"linear_attn.{which}_proj.weight": rows for which, rows in zip(_PARTS, matrices, strict=True)}


def _lfm2_attention(attention: Any) -> dict[str, Tensor]:
    found = {f"self_attn.{which}_proj.weight": getattr(attention, f"{which}_proj").weight for which in "qkv"}
    found["self_attn.o_proj.weight"] = attention.out_proj.weight
    return found | {f"self_attn.{which}_norm.weight": getattr(attention, f"{which}_layernorm").weight for which in "qk"}


def _short_conv(conv: Any) -> dict[str, Tensor]:
    found = {"conv.taps": conv.conv.weight[:, 0], "conv.bias": conv.conv.bias}
    for name in ("in_proj", "out_proj"):
        module = getattr(conv, name)
        found |= {f"conv.{name}.weight": module.weight, f"conv.{name}.bias": module.bias}
    return found


def _lfm2_feed_forward(module: Any) -> dict[str, Tensor]:
    if hasattr(module, "w1"):
        names = {"gate": "w1", "up": "w3", "down": "w2"}
        return {f"mlp.{ours}_proj.weight": getattr(module, theirs).weight for ours, theirs in names.items()}
    found = {"mlp.router.weight": module.gate.weight, "mlp.router.correction": getattr(module, "expert_bias", None)}
    return found | _experts(module.experts)


def _experts(experts: Any) -> dict[str, Tensor]:
    found = dict[str, Tensor]()
    for expert, (gate_up, down) in enumerate(zip(experts.gate_up_proj, experts.down_proj, strict=True)):
        gate, up = gate_up.chunk(2)
        parts = {"gate": gate, "up": up, "down": down}
        found |= {f"mlp.experts.{expert}.{name}_proj.weight": tensor for name, tensor in parts.items()}
    return found


def assert_equal(weights: Mapping[str, Any], wanted: Mapping[str, Tensor], architecture: Architecture) -> None:
    names = expected_shapes(architecture)
    assert set(names) <= set(wanted)
    for name in names:
        torch.testing.assert_close(dense(weights[name]), wanted[name], rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("tiny", CASES, ids=lambda tiny: tiny.name)
def test_a_folder_has_every_tensor_of_the_architecture_with_its_values(tiny: Tiny, tmp_path: Path) -> None:
    oracle = make_tiny(tiny, tmp_path)
    checkpoint, architecture, weights = opened(tmp_path)
    check_tensors(architecture, checkpoint.tensors)
    assert_equal(weights, wanted_tensors(oracle), architecture)


@pytest.mark.parametrize("tiny", CONVERTED, ids=lambda tiny: tiny.name)
def test_a_converted_file_has_the_architecture_and_the_values_of_the_folder(tiny: Tiny, tmp_path: Path) -> None:
    oracle = make_tiny(tiny, tmp_path)
    checkpoint, architecture, weights = opened(convert(tmp_path, tmp_path / "model.gguf"))
    wanted = make_architecture(json.loads((tmp_path / "config.json").read_text()))
    assert replace(architecture, layers=()) == replace(wanted, layers=())
    assert architecture.layers == tuple(as_llama_cpp(layer, wanted.family) for layer in wanted.layers)
    check_tensors(architecture, checkpoint.tensors)
    tensors = wanted_tensors(oracle)
    for name in tensors:
        tensors[name] = in_llama_cpps_order(tensors[name], name, architecture)
    assert_equal(weights, tensors, architecture)


def as_llama_cpp(layer: Layer, family: str) -> Layer:
    if not isinstance(layer.mixer, GatedDeltaNet):
        return layer
    is_tiled = family != "qwen3_next"
    return replace(layer, mixer=replace(layer.mixer, is_decay_log=False, are_heads_tiled=is_tiled))


def in_llama_cpps_order(tensor: Tensor, name: str, architecture: Architecture) -> Tensor:
    """Return a tensor as llama.cpp stores it, with its value heads one by one where they stand in a file."""
    _, _, part = name.partition(".linear_attn.")
    if part == "decay":
        tensor = -tensor.exp()
    net = next((mixer for mixer in architecture.mixers if isinstance(mixer, GatedDeltaNet)), None)
    if net is None or not net.are_heads_tiled or part in ("", "norm.weight"):
        return tensor
    shared = net.num_value_heads // net.num_key_heads
    order = [key_head * shared + copy for copy in range(shared) for key_head in range(net.num_key_heads)]
    if part == "out_proj.weight":
        return torch.cat([tensor.split(net.value_dim, 1)[head] for head in order], 1)
    num_key_rows = 2 * net.num_key_heads * net.key_dim if part in ("qkv_proj.weight", "taps") else 0
    heads = tensor[num_key_rows:].chunk(net.num_value_heads)
    return torch.cat([tensor[:num_key_rows], *(heads[head] for head in order)])


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


def test_qwen3_5_is_delta_nets_with_every_fourth_layer_attention_that_is_gated() -> None:
    architecture = make_architecture(BY_NAME["qwen3_5"].config.to_dict())
    rope = Rope(theta=1e4, dim=8)
    attention = Attention(4, 2, 32, rope, scale=32**-0.5, qk_norm="head", has_gate=True)
    net = GatedDeltaNet(num_key_heads=2, num_value_heads=6, key_dim=16, value_dim=16, num_taps=4)
    assert [layer.mixer for layer in architecture.layers] == [net, net, net, attention]
    assert {layer.feed_forward for layer in architecture.layers} == {Dense(96)}
    assert {layer.norms for layer in architecture.layers} == {Norms(before=True)}
    uneven = make_architecture(BY_NAME["qwen3_5_uneven"].config.to_dict())
    biased = replace(attention, has_qkv_bias=True, has_output_bias=True)
    assert [layer.mixer for layer in uneven.layers] == [biased, *[GatedDeltaNet(3, 3, 32, 48, 3)] * 2]
    assert (uneven.norm_eps, uneven.tied_embeddings) == (1e-3, True)


def test_experts_of_qwen3_5_and_qwen3_next_have_a_shared_one_with_a_gate() -> None:
    router = Router(6, 2, "softmax", is_normalized=True)
    experts = Experts(router, 64, shared_size=32, has_shared_gate=True)
    for name in ("qwen3_5_moe", "qwen3_next"):
        architecture = make_architecture(BY_NAME[name].config.to_dict())
        assert {layer.feed_forward for layer in architecture.layers} == {experts}
    mixed = make_architecture(BY_NAME["qwen3_next_mixed"].config.to_dict())
    given = replace(experts, router=replace(router, is_normalized=False))
    assert [layer.feed_forward for layer in mixed.layers] == [Dense(96), given, given]
    always = make_architecture(BY_NAME["qwen3_5_moe"].config.to_dict() | {"norm_topk_prob": False})
    assert always.layers[0].feed_forward == experts


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
        ("qwen3_5", {"layer_types": ["conv"] * 4}, "layer type 'conv' is not supported"),
        ("qwen3_5", {"layer_types": None, "full_attention_interval": 0}, "full_attention_interval must be a whole"),
        (
            "qwen3_5",
            {"linear_num_value_heads": 5},
            "linear_num_value_heads=5 must be a multiple of linear_num_key_heads=2",
        ),
        ("qwen3_5", {"linear_num_key_heads": 0}, "linear_num_key_heads must be a whole number from 1"),
        (
            "qwen3_5",
            {"linear_key_head_dim": 5000},
            "linear_key_head_dim must be a whole number from 1 to 4096, got 5000",
        ),
        ("qwen3_5", {"linear_value_head_dim": "x"}, "linear_value_head_dim must be a whole number from 1 to 4096"),
        (
            "qwen3_5",
            {"linear_conv_kernel_dim": 65},
            "linear_conv_kernel_dim must be a whole number from 1 to 64, got 65",
        ),
        ("qwen3_5", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported for qwen3_5_text: it must be 'silu'"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate=false is not supported for qwen3_5_text"),
        ("qwen3_next", {"num_experts_per_tok": 7}, "num_experts_per_tok must be at most num_experts=6, got 7"),
        ("qwen3_5_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size must be a whole"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_a_line(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        make_architecture(BY_NAME[name].config.to_dict() | settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
