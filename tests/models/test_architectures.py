"""Architectures: those of recurrent families, from configs and GGUF metadata, and the identity of each value."""

import json
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import gguf
import numpy as np
import pytest

from gguf_files import write_file
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.operands import identity
from infer.compute.operands.architecture import Architecture, Layer, Norms
from infer.compute.operands.feed_forwards import Dense, Experts, Router
from infer.compute.operands.identity import NAMES, Names, identity_of
from infer.compute.operands.mixers import Attention, GatedDeltaNet, LongRope, QueryScale, Rope, ShortConv
from infer.errors import InvalidRequestError, ModelError
from infer.files import open_checkpoint
from infer.files.config import config_from_folder
from infer.models.families import make_architecture
from infer.models.memory.memory_budget import context_length
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


def test_a_context_has_no_more_tokens_than_positions_were_learned(tmp_path: Path) -> None:
    """Unlike rotated positions, which an evicting cache may continue."""
    sliding = CacheSettings(eviction_policy="sliding", eviction_window=64)
    lengths = []
    for name in ("gpt2", "llama"):
        architecture = make_architecture(BY_NAME[name].config.to_dict())
        lengths.append(context_length(None, architecture, sliding))
        if name == "llama":
            assert context_length(300, architecture, sliding) == 300
        else:
            with pytest.raises(
                InvalidRequestError, match="must be at most the 256 positions that were learned, got 300"
            ):
                context_length(300, architecture, sliding)
    assert lengths == [256, 256]


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
    ("phi", {"layer_norm_eps": 0}, "layer_norm_eps must be a number above 0, got 0"),
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
    ("qwen3_5_moe", {"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size must be a whole"),
]


@pytest.mark.parametrize(("name", "settings", "message"), IMPOSSIBLE_SETTINGS)
def test_settings_that_cannot_be_are_refused_in_a_line(name: str, settings: dict[str, Any], message: str) -> None:
    assert message in refusal(lambda: make_architecture(BY_NAME[name].config.to_dict() | settings), ModelError)


def reachable(hint: Any, found: dict[type, None] | None = None) -> dict[type, None]:
    """Return the dataclasses that a type and its fields name."""
    found = {} if found is None else found
    if is_dataclass(hint):
        assert isinstance(hint, type)
        if hint not in found:
            found[hint] = None
            for inner in get_type_hints(hint).values():
                reachable(inner, found)
    elif get_origin(hint) is not Literal:
        for inner in get_args(hint):
            reachable(inner, found)
    return found


def samples(hint: Any) -> Iterator[Any]:
    """Yield some different values of a type."""
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    elif isinstance(hint, UnionType) or get_origin(hint) is Union:
        for inner in get_args(hint):
            yield from samples(inner)
    elif get_origin(hint) is tuple:
        inner = list(samples(get_args(hint)[0]))
        yield from ((), (inner[0],), tuple(inner))
    elif is_dataclass(hint):
        hints = get_type_hints(hint)
        first: Any = hint(**{name: next(samples(inner)) for name, inner in hints.items()})
        yield first
        for name, inner in hints.items():
            yield from (replace(first, **{name: value}) for value in list(samples(inner))[1:2])
    else:
        plain = {int: (1, 2), float: (1.0, 0.1, float("inf")), str: ("a", "b"), bool: (False, True), NoneType: (None,)}
        yield from plain[hint]


CLASSES = list(reachable(Architecture))


def test_every_part_of_an_architecture_has_names() -> None:
    assert set(CLASSES) == set(NAMES)
    assert len({names.kind for names in NAMES.values()}) == len(NAMES)


@pytest.mark.parametrize("kind", CLASSES)
def test_every_attribute_has_one_name(kind: type) -> None:
    names = NAMES[kind]
    attributes = [*names.first.values(), *names.later.values()]
    assert sorted(attributes) == sorted(get_type_hints(kind))
    assert not set(names.first) & set(names.later)


@pytest.mark.parametrize("kind", CLASSES)
def test_no_later_attribute_lacks_a_default(kind: type) -> None:
    """Without a default, each architecture would have another identity than before."""
    defaults = {field.name: field.default for field in fields(kind)}
    assert [name for name in NAMES[kind].later.values() if defaults[name] is MISSING] == []


@pytest.mark.parametrize("kind", CLASSES)
def test_each_value_changes_the_identity(kind: type) -> None:
    first = next(samples(kind))
    for name, hint in get_type_hints(kind).items():
        values = list(samples(hint))
        texts = [identity_of(replace(first, **{name: value})) for value in values]
        assert len(values) > 1
        assert len(set(texts)) == len(set(values)) == len(values), name


def test_an_inner_value_changes_the_identity_of_the_whole() -> None:
    def network(theta: float) -> Architecture:
        layer = Layer(Attention(4, 2, 16, Rope(theta, 16), 0.25), Dense(96))
        return Architecture("llama", 99, 64, (layer, layer), 1e-6, 256)

    assert identity_of(network(1e4)) == identity_of(network(1e4)) != identity_of(network(1e6))


def test_a_text_is_the_one_of_files_that_exist() -> None:
    """The first sessions have the digest of this text. So a change of the text refuses each saved session."""
    rope = Rope(10000.0, 16, (1.0, 2.0), long=LongRope(64, growth=0.1))
    attention = Attention(4, 2, 16, rope, 0.25, window=8, query_scale=QueryScale(0.5, 8), qk_norm="head")
    experts = Experts(Router(8, 2, "softmax"), 32)
    layers = Layer(attention, experts, Norms(after=True)), Layer(ShortConv(64, 3), Dense(96, "gelu"), has_scale=True)
    found = identity_of(Architecture("a", 99, 64, layers, 1e-6, 256))
    norms = "eps_after=None, are_centred=False, have_bias=False, skip_mixer=False)"
    assert found == (
        "Architecture(family='a', vocab_size=99, hidden_size=64, layers=(Layer(mixer=Attention(num_heads=4, "
        "num_kv_heads=2, head_dim=16, rope=Rope(theta=10000.0, dim=16, frequency_factors=(1.0, 2.0), "
        "attention_factor=1.0, long=LongRope(beyond=64, frequency_factors=None, growth=0.1)), scale=0.25, window=8, "
        "chunk=None, softcap=None, has_qkv_bias=False, has_output_bias=False, qk_norm='head', has_sinks=False, "
        "has_gate=False, gate_curve='sigmoid', are_gates_of_heads=False, has_v_norm=False, are_values_keys=False, "
        "shared_from=None, query_scale=QueryScale(growth=0.5, period=8, offset=0), is_causal=True), "
        "feed_forward=Experts(router=Router(num_experts=8, num_chosen=2, scores='softmax', is_normalized=False, "
        "floor=0.0, scale=1.0, has_bias=False, has_correction=False, has_expert_scales=False, weighs_inputs=False), "
        "intermediate_size=32, activation='silu', has_bias=False, shared_size=0, has_shared_gate=False, "
        f"has_norms=False), norms=Norms(before=True, after=True, of_sum=False, {norms}, per_layer_input=None, "
        "has_scale=False), Layer(mixer=ShortConv(num_channels=64, num_taps=3, has_bias=False), "
        "feed_forward=Dense(intermediate_size=96, activation='gelu', has_bias=False, is_gated=True), "
        f"norms=Norms(before=True, after=False, of_sum=False, {norms}, per_layer_input=None, has_scale=True)), "
        "norm_eps=1e-06, max_positions=256, embedding_scale=1.0, has_embedding_norm=False, logit_scale=1.0, "
        "logit_softcap=None, tied_embeddings=False, text_inputs=None, has_last_norm=True)"
    )


@dataclass(frozen=True)
class ReorderedDense:
    """`Dense` with other names, in another order, and with a new value."""

    act: str = "silu"
    size: int = 0
    clamp: float | None = None
    gated: bool = True
    biased: bool = False


def test_a_rename_another_order_and_a_new_default_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"intermediate_size": "size", "activation": "act", "has_bias": "biased", "is_gated": "gated"}
    monkeypatch.setitem(identity.NAMES, ReorderedDense, Names("Dense", first, {"clamp": "clamp"}))
    assert identity_of(ReorderedDense("gelu", 96)) == identity_of(Dense(96, "gelu"))
    clamped = identity_of(ReorderedDense("gelu", 96, 7.0))
    assert clamped == identity_of(Dense(96, "gelu")).replace(")", ", clamp=7.0)")


class Colour(StrEnum):
    RED = "red"


@pytest.mark.parametrize("value", [Colour.RED, len, [1], object(), ReorderedDense()])
def test_a_value_without_a_lasting_text_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=f"a {type(value).__name__} has no identity"):
        identity_of(value)
