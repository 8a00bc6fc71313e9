"""Published configs: both dialects, missing settings, and the refusal of settings that cannot be run."""

from typing import Any

import pytest

from infer.compute.operands.architecture import Architecture, Norms
from infer.compute.operands.feed_forwards import Experts
from infer.compute.operands.mixers import GatedDeltaNet, LongRope
from infer.errors import ModelError, UnsupportedModelError
from infer.models.families import make_architecture
from refusals import refusal
from tiny import BY_NAME, ONE_EACH, Tiny

SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 256}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LAGUNA: dict[str, Any] = {"num_experts": 8, "num_key_value_heads": 2}
LLAMA4: dict[str, Any] = {"num_local_experts": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size_mlp": 32}
LLAMA4_CHUNKS = LLAMA4 | {"layer_types": ["chunked_attention"] * 4}
UNMASKED: dict[str, Any] = {"is_causal": False, "num_key_value_heads": 2}
LONG = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "original_max_position_embeddings": 64}
LONGROPE: dict[str, Any] = {"partial_rotary_factor": 0.75, "rope_scaling": {"type": "longrope", **LONG}}


def make(family: str, **settings: Any) -> Architecture:
    return make_architecture({"model_type": family, **SIZES, **settings})


ROPES = [("llama", "linear", {"factor": 4.0}), ("llama", "dynamic", {"factor": 4.0}), ("llama", "llama3", LLAMA3)]
ROPES += [("qwen2", "yarn", YARN), ("phi3", "longrope", LONG)]
ROPES += [("nemotron", "proportional", {"partial_rotary_factor": 0.25})]


@pytest.mark.parametrize(("family", "kind", "settings"), ROPES)
def test_both_dialects_of_rope_give_the_same_settings(family: str, kind: str, settings: dict[str, Any]) -> None:
    share = {"partial_rotary_factor": 0.75} if family == "phi3" else {}
    top = {"original_max_position_embeddings": 64} if family == "phi3" else {}
    flat = make(family, rope_theta=5e5, rope_scaling={"type": kind, **settings}, **share, **top)
    newer = make(family, rope_theta=5e5, rope_scaling={"rope_type": kind, **settings}, **share, **top)
    own = {"rope_type": kind, "rope_theta": 5e5, **settings}
    nested = make(family, rope_parameters=own | share, **top)
    by_layer = make(family, rope_parameters={"full_attention": own | share}, **top)
    assert flat == newer == nested == by_layer
    assert flat != make(family, rope_theta=5e5, **share)


def test_qwen_has_experts_in_every_nth_layer_that_is_not_listed() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 2}
    for name, value, sparse in (("decoder_sparse_step", 2, [1, 3]), ("mlp_only_layers", [1], [0, 2, 3])):
        layers = make("qwen3_moe", **experts | {name: value}).layers
        assert [index for index, layer in enumerate(layers) if isinstance(layer.feed_forward, Experts)] == sparse


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_phis_older_names_of_longrope_are_longrope(name: str) -> None:
    settings = {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 64}
    renamed = make("phi3", rope_scaling={"type": name, **LONG}, **settings)
    assert renamed == make("phi3", rope_scaling={"type": "longrope", **LONG}, **settings)
    rope = renamed.attention[0].rope
    assert rope is not None
    assert (rope.dim, rope.long) == (12, LongRope(64, frequency_factors=(2.0,) * 6))


def test_gemma_3s_older_dialect_scales_the_layers_that_see_everything() -> None:
    settings = {"head_dim": 16, "num_hidden_layers": 6, "sliding_window": 8}
    scaling = {"type": "linear", "factor": 8.0}
    thetas = {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
    older = make("gemma3_text", rope_scaling=scaling, sliding_window_pattern=3, **thetas, **settings)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    parameters = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    assert older == make("gemma3_text", rope_parameters=parameters, layer_types=kinds, **settings)
    assert [layer.window for layer in older.attention] == [8, 8, None] * 2


def test_settings_missing_in_published_configs_are_the_defaults_of_transformers() -> None:
    assert make("mistral", num_attention_heads=32, head_dim=2).attention[0].num_kv_heads == 8
    assert make("mistral", num_key_value_heads=4).attention[0].window == 4096
    assert make("llama").attention[0].num_kv_heads == 4
    assert not make("llama").tied_embeddings
    smollm3 = make("smollm3")
    assert smollm3.tied_embeddings
    assert [layer.rope is None for layer in smollm3.attention] == [False, False, False, True]
    gemma2 = make("gemma2", sliding_window=8)
    assert (gemma2.attention[0].softcap, gemma2.logit_softcap, gemma2.attention[0].head_dim) == (50.0, 30.0, 256)
    assert [layer.window for layer in gemma2.attention] == [8, None] * 2
    assert make("gemma2", attn_logit_softcapping=None).attention[0].softcap is None
    assert make("phi3").norm_eps == make("olmo2").norm_eps == 1e-5
    assert make("qwen3").attention[0].head_dim == 128
    olmo3 = make("olmo3", rope_scaling={"rope_type": "linear", "factor": 4.0})
    assert [layer.window for layer in olmo3.attention] == [4096] * 3 + [None]
    assert [layer.rope.frequency_factors is None for layer in olmo3.attention if layer.rope] == [True] * 3 + [False]
    kinds = ["full_attention"] + ["sliding_attention"] * 3
    exaone4 = make("exaone4", num_key_value_heads=2, sliding_window_pattern="LLLG", layer_types=kinds)
    assert [layer.rope is None for layer in exaone4.attention] == [True, False, False, False]
    seed_oss = make("seed_oss", num_key_value_heads=2).attention[0]
    assert (seed_oss.has_qkv_bias, seed_oss.has_output_bias) == (True, False)
    assert all(layer.window is None for layer in make("qwen2", sliding_window=8).attention)
    windowed = make("qwen2", sliding_window=8, use_sliding_window=True, num_hidden_layers=30)
    assert [layer.window for layer in windowed.attention] == [None] * 28 + [8] * 2


# What a config of each class must say.
_SAID = {"model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
_SAID |= {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok"}
_SAID |= {"n_shared_experts", "n_embd", "n_layer", "n_head"}
_WITHOUT_COUNTS = {"num_experts_per_tok": 8, "n_routed_experts": 64, "n_shared_experts": 1}
# Classes whose own defaults are no network.
_ODD_CLASSES = {"glm4_moe", "gemma4_text", "gemma4_unified_text"}


@pytest.mark.parametrize("tiny", ONE_EACH, ids=lambda tiny: tiny.name)
def test_every_default_is_that_of_the_class_of_transformers(tiny: Tiny) -> None:
    if tiny.config.model_type in _ODD_CLASSES:
        return
    whole = type(tiny.config)().to_dict()
    whole |= {name: value for name, value in _WITHOUT_COUNTS.items() if name in whole and whole[name] is None}
    said = {name: value for name, value in whole.items() if name in _SAID and value is not None}
    assert make_architecture(said) == make_architecture(whole)


_PARTIAL = {kind: {"partial_rotary_factor": 0.5} for kind in ("full_attention", "sliding_attention")}

REFUSED = [
    ("gptj", {}, "model_type 'gptj' is not supported: supported are"),
    ("bloom", {}, "model_type 'bloom' is not supported: it needs a bias of attention by distance"),
    ("mistral4", {}, "model_type 'mistral4' is not supported: it needs latent attention"),
    ("jamba", {}, "model_type 'jamba' is not supported: it needs the state-space layers of Mamba"),
    ("mimo2", {}, "model_type 'mimo2' is not supported: it needs values of another length than keys"),
    ("cohere", {"use_qk_norm": True}, "use_qk_norm=True is not supported for cohere: it must be False"),
    ("phi", {"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported for phi: it must be False"),
    ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window=True is not supported for qwen2_moe"),
    ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window=True is not supported for qwen3_moe"),
    ("solar_open", {"topk_group": 0}, "topk_group=0 is not supported for solar_open: it must be 1"),
    ("lfm3", {"rope_parameters": _PARTIAL}, "partial_rotary_factor=0.5 needs the rope_type proportional"),
    ("gemma4_text", {"rope_parameters": _PARTIAL}, "partial_rotary_factor=0.5 needs the rope_type proportional"),
    ("phi", {"qk_layernorm": True}, "qk_layernorm=True is not supported for phi: it must be False"),
    ("lfm3", {"use_sandwich_norm": False}, "use_sandwich_norm=False is not supported for lfm3: it must be True"),
    (
        "nanochat",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_type 'linear' is not supported for nanochat",
    ),
    ("ernie4_5_moe", {"use_bias": True}, "use_bias=True is not supported for ernie4_5_moe: it must be False"),
    ("granite_swa", {"num_key_value_heads": 2, "layer_rope_theta": [0, 1, 1, 2]}, "it may have zeros and one theta"),
    ("hunyuan_v1_dense", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type 'yarn' is not supported"),
    ("hunyuan_v1_moe", {"num_experts": [4, 2], "moe_topk": 1}, "it must be equal for all layers"),
    ("llama4", LLAMA4 | {"layer_types": ["sliding_attention"] * 4}, "layer type 'sliding_attention' is not"),
    ("llama4", LLAMA4 | {"attention_chunk_size": 0}, "attention_chunk_size must be a whole number from 1 to"),
    ("llama4", LLAMA4 | {"moe_layers": 3}, "moe_layers must list the numbers of layers, got 3"),
    ("llama4", LLAMA4 | {"rope_scaling": {"type": "yarn"}}, "rope_type 'yarn' is not supported for llama4"),
    ("llama4", LLAMA4_CHUNKS | {"attention_chunk_size": None}, "has chunked_attention, but attention_chunk_size"),
    ("gemma3n_text", {}, "it needs four parallel residual streams"),
    ("muse_glimmer", {"num_key_value_heads": 2, "attention_bias": True}, "whose gates have no bias"),
    ("muse_glimmer", {"layer_rope_theta": [1]}, "layer_rope_theta must list num_hidden_layers=4 numbers, got [1]"),
    ("olmo_hybrid", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported for olmo_hybrid"),
    ("mistral3", {}, "it needs the model_type of its text_config"),
    ("llama", {"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
    ("llama", {"hidden_act": 3}, "hidden_act 3 is not supported"),
    ("llama", {"rope_scaling": {"rope_type": "axial"}}, "rope_type 'axial' is not supported"),
    ("llama", {"rope_scaling": {"type": "mrope"}}, "type 'mrope' is not supported"),
    ("llama", {"rope_scaling": "yarn"}, "rope_scaling must be a mapping, got 'yarn'"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "factor must be a number above 0, got None"),
    ("llama", {"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "above low_freq_factor=1"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported for llama"),
    ("qwen2", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not supported"),
    ("phi3", {"partial_rotary_factor": 1.5}, "24 elements of a head cannot rotate in pairs if head_dim is 16"),
    ("phi3", {"partial_rotary_factor": 0.01}, "0 elements of a head cannot rotate"),
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' is not supported for phi3"),
    ("phi3", {"rope_scaling": {"type": "longrope", **LONG}}, "short_factor must list 8 numbers"),
    ("llama", {"attention_bias": "yes"}, "attention_bias must be true or false, got 'yes'"),
    ("llama", {"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads=3"),
    ("llama", {"head_dim": 15}, "15 elements of a head cannot rotate in pairs"),
    ("llama", {"head_dim": 2**31}, "head_dim must be a whole number from 1 to 65536, got 2147483648"),
    ("llama", {"hidden_size": 2**31, "num_attention_heads": 4}, "hidden_size / num_attention_heads must be"),
    ("llama", {"hidden_size": 66}, "hidden_size=66 must be a multiple of num_attention_heads=4"),
    ("llama", {"rope_theta": 0}, "rope_theta must be a number above 0, got 0"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number above 0, got nan"),
    ("gemma2", {"layer_types": ["full_attention"]}, "layer_types must list num_hidden_layers=4 names"),
    ("gemma2", {"layer_types": ["chunked_attention"] * 4}, "layer type 'chunked_attention' is not supported"),
    ("gemma2", {"sliding_window": None}, "sliding_window must be a whole number from 1"),
    ("gemma2", {"final_logit_softcapping": -1}, "final_logit_softcapping must be a number above 0, got -1"),
    ("gemma2", {"use_bidirectional_attention": True}, "attention=True is not supported for gemma2"),
    ("gemma3_text", {"use_bidirectional_attention": 1}, "use_bidirectional_attention must be true or false, got 1"),
    ("llama", {"is_causal": "no"}, "is_causal must be true or false, got 'no'"),
    ("mellum", {"is_causal": False, "num_experts": 8}, "mellum without a mask is not supported with experts"),
    ("gpt_oss", UNMASKED | {"num_local_experts": 4}, "is not supported with attention sinks, experts"),
    ("lfm2", UNMASKED | {"full_attn_idxs": [1]}, "without a mask is not supported with short convolutions"),
    ("phi3", {"is_causal": False} | LONGROPE, "without a mask is not supported with ropes of two lengths"),
    ("llama", {"architectures": ["LlamaEncoderModel"]}, "architectures='LlamaEncoderModel' is not supported"),
    ("qwen3", {"architectures": ["Qwen3BidirectionalModel"]}, "'Qwen3BidirectionalModel' is not supported"),
    ("llama_bidirec", {"architectures": ["LlamaBidirectionalForTokens"]}, "LlamaBidirectionalForTokens' is not"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window and sliding_window are not set"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must list num_hidden_layers=4 zeros and ones"),
    ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval must be a whole number from 1"),
    ("granite", {"residual_multiplier": 0}, "residual_multiplier must be a number above 0, got 0"),
    ("laguna", LAGUNA | {"gating": False}, "gating=False is not supported for laguna: true, per-head or"),
    ("laguna", LAGUNA | {"attention_bias": True}, "attention_bias=true is not supported for laguna"),
    ("laguna", LAGUNA | {"num_attention_heads_per_layer": [4]}, "num_attention_heads_per_layer must list 4"),
    ("laguna", LAGUNA | {"moe_router_logit_softcapping": 5.0}, "moe_router_logit_softcapping=5.0 is not supported"),
    ("laguna", LAGUNA | {"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input=True is not"),
    ("mellum", {"rope_parameters": {"rope_theta": 1e4}}, "must have full_attention, got rope_theta"),
    ("mellum", {"num_experts": 8, "mlp_layer_types": ["moe"] * 4}, "mlp_layer_types must list 4 times dense or"),
]


@pytest.mark.parametrize(("family", "settings", "message"), REFUSED)
def test_settings_that_cannot_be_run_are_refused_by_name(family: str, settings: dict[str, Any], message: str) -> None:
    assert message in refusal(lambda: make(family, **settings), ModelError)


def test_ropes_that_change_at_different_lengths_are_refused() -> None:
    kinds = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 1e4}
    lengths = {"full_attention": 32, "sliding_attention": 64}
    by_kind = {name: {**kinds, "original_max_position_embeddings": length} for name, length in lengths.items()}
    settings = {"head_dim": 16, "num_hidden_layers": 6, "sliding_window": 8, "num_key_value_heads": 2}
    with pytest.raises(UnsupportedModelError, match=r"several lengths.*\[32, 64\]"):
        make("gemma3_text", rope_parameters=by_kind, **settings)


def test_layers_of_one_kind_have_the_same_heads_in_gemma_4() -> None:
    config = BY_NAME["gemma4"].config.to_dict()
    layers = config["per_layer_config"]
    assert make_architecture({**config, "per_layer_config": {str(index): own for index, own in layers.items()}})
    changed = {str(index): {**own, "head_dim": 32 + 16 * int(index)} for index, own in layers.items()}
    with pytest.raises(ModelError, match="per_layer_config must have equal values for all layers of kind full"):
        make_architecture({**config, "per_layer_config": changed})


def test_settings_missing_in_configs_of_olmo_hybrid_are_the_defaults_of_transformers() -> None:
    found = make("olmo_hybrid", num_hidden_layers=3, rope_parameters={"rope_theta": None})
    kinds = [isinstance(layer.mixer, GatedDeltaNet) for layer in found.layers]
    assert kinds == [True, True, False]
    net, attention = found.layers[0].mixer, found.attention[0]
    assert isinstance(net, GatedDeltaNet)
    assert (net.num_key_heads, net.num_value_heads, net.key_dim, net.value_dim) == (4, 4, 12, 24)
    assert (net.beta_scale, net.norm_eps, attention.rope) == (2.0, 1e-5, None)
    assert [layer.norms for layer in found.layers] == [Norms(), Norms(), Norms(before=False, after=True)]
    assert make("olmo_hybrid", rope_theta=None).attention[0].rope is None
    assert make("olmo_hybrid", rope_parameters=None).attention[0].rope is not None
    assert make("olmo_hybrid", linear_allow_neg_eigval=False).layers[0].mixer.beta_scale == 1.0
