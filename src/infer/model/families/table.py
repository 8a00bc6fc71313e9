"""Every family as data: values that its configs leave out, settings that its code reads, and differences of its layers.

Defaults are those of Hugging Face's configuration classes, except for sizes, which a config must give.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from infer.errors import ModelError, UnsupportedModelError
from infer.model.families.config_values import Config, count, positive, settings
from infer.model.families.experts import (
    every_layer_is_sparse,
    gemma4_experts,
    glm_experts,
    gpt_oss_experts,
    granite_experts,
    is_sparse_as_listed,
    is_sparse_in_glm,
    is_sparse_in_laguna,
    is_sparse_in_lfm2,
    is_sparse_in_qwen,
    laguna_experts,
    lfm2_experts,
    mixtral_experts,
    olmoe_experts,
    qwen_experts,
)
from infer.model.families.gemma import gemma3_rope, gemma4_of_kind, gemma4_per_layer_input, gemma4_rope
from infer.model.families.heads import equal_heads, laguna_gates, laguna_heads, sigmoid_of_elements
from infer.model.families.layer_kinds import (
    CONVOLUTION,
    FULL,
    LINEAR,
    SLIDING,
    all_full,
    all_rotated,
    all_windowed,
    all_windowed_but_every,
    convolutions_but_listed,
    exaone4_kinds,
    full_unless_given,
    gemma4_kinds,
    last_share_keys,
    linear_but_every_nth,
    none_shared,
    rotated_but_every_nth,
    rotated_where_windowed,
    windowed_from_a_layer_on,
    windowed_where_not_rotated,
)
from infer.model.families.recurrent import gated_delta_net, short_conv
from infer.model.families.rope_scaling import rope_settings
from infer.model.families.widths import intermediate_size, lfm2_size
from infer.operands.architecture import Activation, Experts, GateCurve, Norms, PerLayerInput, QueryScale, Recurrent

# Settings that some families' code reads, and others' does not though a config may have them.
OPTIONAL = frozenset(
    {"attention_bias", "attention_output_bias", "mlp_bias", "query_pre_attn_scalar"}
    | {"attn_logit_softcapping", "final_logit_softcapping"}
    | {"attention_k_eq_v", "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"}
)
# A null is a value of these; of others it is as if it were not there.
OFF_IF_NULL = frozenset({"head_dim", "num_key_value_heads", "sliding_window", "attn_logit_softcapping"}) | {
    "final_logit_softcapping",
    "block_ffn_dim_multiplier",
    "hidden_size_per_layer_input",
}
_ATTENTION_BIAS = frozenset({"attention_bias", "attention_output_bias"})
_PRE_NORMS = Norms(before=True, after=False)


def _usual_rope(config: Config, kind: str) -> Config:
    return rope_settings(config, kind, theta=10_000.0)


def _smollm3_rope(config: Config, kind: str) -> Config:
    return rope_settings(config, kind, theta=2_000_000.0)


def _million_rope(config: Config, kind: str) -> Config:
    return rope_settings(config, kind, theta=1_000_000.0)


def _gpt_oss_rope(config: Config, kind: str) -> Config:
    """Return gpt-oss's rope settings: those of the published models if a config has none."""
    if config.get("rope_scaling") is None and config.get("rope_parameters") is None:
        config = {**config, "rope_scaling": _GPT_OSS_YARN}
    return rope_settings(config, kind, theta=150_000.0)


def _ministral3_rope(config: Config, kind: str) -> Config:
    """Return Ministral 3's rope settings: those of the published models if a config has none."""
    if config.get("rope_scaling") is None and config.get("rope_parameters") is None:
        config = {**config, "rope_scaling": _MINISTRAL3_YARN}
    return rope_settings(config, kind, theta=1_000_000.0)


def _ministral3_scale(config: Config) -> QueryScale | None:
    """Return the scale of queries, which is among Ministral 3's rope settings."""
    given = _ministral3_rope(config, FULL)
    if not given.get("llama_4_scaling_beta"):
        return None
    original = count(given, "original_max_position_embeddings", default=count(config, "max_position_embeddings"))
    return QueryScale(positive(given, "llama_4_scaling_beta"), original)


def _phi3_rope(config: Config, kind: str) -> Config:
    """Return Phi-3's rope settings.

    Its code calls "longrope" what older configs call "su" or "yarn", and supports no other scaling.
    """
    found = {"type": "default", **rope_settings(config, kind, theta=10_000.0)}
    name = found.pop("rope_type", found["type"])
    if name not in ("default", "longrope", "su", "yarn"):
        raise UnsupportedModelError(f"rope_type {name!r:.60} is not supported for phi3; supported: default, longrope")
    return {**found, "rope_type": "default" if name == "default" else "longrope"}


def _olmo3_rope(config: Config, kind: str) -> Config:
    """Return OLMo 3's rope settings. Flat settings are those of layers with full attention; windows have no scaling."""
    nested = settings(settings(config, "rope_parameters"), kind)
    scaling = settings(config, "rope_scaling") if kind == FULL else {}
    return {"rope_theta": positive(config, "rope_theta", 500_000.0), **nested, **scaling}


def _no_per_layer_input(config: Config, activation: Activation) -> None:
    return None


def _rope_by_kind(full_theta: float, sliding_theta: float) -> Callable[[Config, str], Config]:
    """Return a reader of rope settings that a config gives for each kind of layer, or leaves out altogether.

    A GGUF file has a theta for each kind. Its scaling is that of layers with full attention.
    """

    def read(config: Config, kind: str) -> Config:
        given = settings(config, "rope_parameters")
        if given and kind not in given:
            raise ModelError(f"config: rope_parameters must have {kind}, got {', '.join(map(str, given)):.80}")
        if kind == FULL:
            scaling = settings(config, "rope_scaling")
            return {"rope_theta": positive(config, "rope_theta", full_theta), **scaling, **settings(given, kind)}
        return {"rope_theta": positive(config, "rope_local_base_freq", sliding_theta), **settings(given, kind)}

    return read


def _laguna_rope(config: Config, kind: str) -> Config:
    """Return Laguna's rope settings: layers with full attention rotate half of a head if a config has none."""
    if not settings(config, "rope_parameters") and config.get("partial_rotary_factor") is None:
        config = {**config, "rope_parameters": _LAGUNA_ROPE}
    return {"partial_rotary_factor": 1.0, **_rope_by_kind(500_000.0, 10_000.0)(config, kind)}


def _of_any_kind(config: Config, kind: str) -> Config:
    return config


def _not_scaled(config: Config) -> None:
    return None


@dataclass(frozen=True)
class Family:
    defaults: Mapping[str, Any]  # where a config has not even a null
    fixed: Mapping[str, Any] = field(default_factory=dict)  # whatever a config says
    reads: frozenset[str] = frozenset()  # of the optional settings
    renamed: Mapping[str, str] = field(default_factory=dict)  # its names of settings → the usual ones
    layer_kinds: Callable[[Config, int], Sequence[str]] = all_full
    recurrent: Mapping[str, Callable[[Config], Recurrent]] = field(default_factory=dict)  # kind → mixer; others attend
    rotated_layers: Callable[[Config, int], Sequence[bool]] = all_rotated
    rope_settings: Callable[[Config, str], Config] = _usual_rope
    rotates_partly: bool = False  # reads partial_rotary_factor, which other engines read for every family
    activation_name: str = "hidden_act"
    dense_size: Callable[[Config], int] = intermediate_size
    scales_embedding: bool = False  # by the root of hidden_size
    norms: Norms = _PRE_NORMS
    experts: Callable[[Config, Activation], Experts | None] | None = None
    is_sparse: Callable[[Config, int], bool] = every_layer_is_sparse  # whether a layer has experts
    qk_norm: Literal["head", "all"] | None = None
    of_kind: Callable[[Config, str], Config] = _of_any_kind  # the settings of attention in layers of a kind
    shared_layers: Callable[[Config, Sequence[str]], Sequence[int | None]] = none_shared  # whose keys a layer reads
    per_layer_input: Callable[[Config, Activation], PerLayerInput | None] = _no_per_layer_input
    has_v_norm: bool = False
    has_scale: bool = False  # of each layer
    qk_norm_setting: str | None = None  # the setting that says whether there are such norms
    query_scale: Callable[[Config], QueryScale | None] = _not_scaled
    has_sinks: bool = False
    has_gate: bool = False
    gates: Callable[[Config], tuple[GateCurve, bool]] = sigmoid_of_elements  # their curve, and True for one per head
    num_heads: Callable[[Config, int], Sequence[int]] = equal_heads  # of each layer


def _defaults(max_positions: int, *, eps: float = 1e-6, **others: Any) -> dict[str, Any]:
    return {"max_position_embeddings": max_positions, "rms_norm_eps": eps, "hidden_act": "silu", **others}


_GEMMA: dict[str, Any] = {"rms_norm_eps": 1e-6, "head_dim": 256, "tie_word_embeddings": True}
_GEMMA |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096}
_GPT_OSS_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
_GPT_OSS_YARN |= {"original_max_position_embeddings": 4096}
_LAGUNA_ROPE = {FULL: {"partial_rotary_factor": 0.5}, SLIDING: {"partial_rotary_factor": 1.0}}
_MINISTRAL3_YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16_384}
_MINISTRAL3_YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
_QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

_GEMMA3 = Family(
    # The published configs of multimodal models leave out much of what they have in common.
    defaults=_GEMMA
    | {"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
    | {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072},
    # attn_logit_softcapping is a setting that its code has and never applies.
    reads=_ATTENTION_BIAS | {"query_pre_attn_scalar", "final_logit_softcapping"},
    layer_kinds=all_windowed_but_every(6),
    rope_settings=gemma3_rope,
    activation_name="hidden_activation",
    scales_embedding=True,
    norms=Norms(after=True),
    qk_norm="head",
)

_GEMMA4 = Family(
    defaults={**_GEMMA3.defaults, "num_hidden_layers": 30, "vocab_size": 262_144, "sliding_window": 512}
    | {"global_head_dim": 512, "hidden_size_per_layer_input": 256},
    fixed={"query_pre_attn_scalar": 1.0},
    renamed={"top_k_experts": "num_experts_per_tok"},
    reads=_ATTENTION_BIAS | {"final_logit_softcapping", "attention_k_eq_v"},
    experts=gemma4_experts,
    per_layer_input=gemma4_per_layer_input,
    layer_kinds=gemma4_kinds,
    of_kind=gemma4_of_kind,
    shared_layers=last_share_keys,
    rope_settings=gemma4_rope,
    rotates_partly=True,
    activation_name="hidden_activation",
    scales_embedding=True,
    norms=Norms(after=True),
    qk_norm="head",
    has_v_norm=True,
    has_scale=True,
)

_GEMMA4_UNIFIED = replace(
    _GEMMA4,
    defaults={**_GEMMA4.defaults, "sliding_window": 1024, "max_position_embeddings": 262_144}
    | {"hidden_size_per_layer_input": None, "enable_moe_block": False},
)

_LFM2 = Family(
    _defaults(128_000, eps=1e-5, num_key_value_heads=8, tie_word_embeddings=True, conv_L_cache=3),
    fixed={"hidden_act": "silu"},
    renamed={"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"},
    layer_kinds=convolutions_but_listed,
    recurrent={CONVOLUTION: short_conv},
    rope_settings=_million_rope,
    qk_norm="head",
)

_DELTA_NETS = _defaults(32_768, head_dim=256, partial_rotary_factor=0.25) | {"linear_conv_kernel_dim": 4}
_DELTA_NETS |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
_DELTA_NETS |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
_QWEN35 = Family(
    _DELTA_NETS | {"num_key_value_heads": 4},
    reads=_ATTENTION_BIAS,
    layer_kinds=linear_but_every_nth,
    recurrent={LINEAR: gated_delta_net},
    rotates_partly=True,
    qk_norm="head",
    has_gate=True,
)
_QWEN35_MOE = replace(
    _QWEN35,
    defaults=_DELTA_NETS
    | {"num_key_value_heads": 2, "num_experts_per_tok": 8}
    | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    fixed={"norm_topk_prob": True},
    experts=qwen_experts,
)

FAMILIES: dict[str, Family] = {
    "llama": Family(_defaults(2048), reads=_ATTENTION_BIAS | {"mlp_bias"}),
    "mistral": Family(_defaults(131_072, num_key_value_heads=8, sliding_window=4096), layer_kinds=all_windowed),
    "ministral3": Family(
        _defaults(262_144, eps=1e-5, num_key_value_heads=8, head_dim=128),
        layer_kinds=all_windowed,
        rope_settings=_ministral3_rope,
        query_scale=_ministral3_scale,
    ),
    "qwen2": Family(
        _defaults(32_768, **_QWEN_WINDOWS),
        fixed={"attention_bias": True, "attention_output_bias": False},
        layer_kinds=windowed_from_a_layer_on,
    ),
    "qwen3": Family(
        _defaults(32_768, head_dim=128, **_QWEN_WINDOWS),
        reads=_ATTENTION_BIAS,
        layer_kinds=windowed_from_a_layer_on,
        qk_norm="head",
    ),
    "gemma2": Family(
        _GEMMA
        | {"num_key_value_heads": 4, "max_position_embeddings": 8192}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        reads=_ATTENTION_BIAS | {"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"},
        layer_kinds=all_windowed_but_every(2),
        activation_name="hidden_activation",
        scales_embedding=True,
        norms=Norms(after=True),
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "gemma4_text": _GEMMA4,
    "gemma4": _GEMMA4,
    "gemma4_unified_text": _GEMMA4_UNIFIED,
    "gemma4_unified": _GEMMA4_UNIFIED,
    "phi3": Family(
        _defaults(4096, eps=1e-5, original_max_position_embeddings=4096),
        layer_kinds=all_windowed,
        rope_settings=_phi3_rope,
        rotates_partly=True,
    ),
    "smollm3": Family(
        _defaults(32_768, num_key_value_heads=4, tie_word_embeddings=True),
        reads=_ATTENTION_BIAS | {"mlp_bias"},
        layer_kinds=windowed_where_not_rotated,
        rotated_layers=rotated_but_every_nth,
        rope_settings=_smollm3_rope,
    ),
    "olmo2": Family(
        _defaults(2048, eps=1e-5),
        reads=_ATTENTION_BIAS,
        norms=Norms(before=False, after=True),
        qk_norm="all",
    ),
    "olmo3": Family(
        _defaults(2048, eps=1e-5, sliding_window=4096),
        reads=_ATTENTION_BIAS,
        layer_kinds=all_windowed_but_every(4),
        rope_settings=_olmo3_rope,
        norms=Norms(before=False, after=True),
        qk_norm="all",
    ),
    "exaone4": Family(
        _defaults(2048, eps=1e-5, num_key_value_heads=32, sliding_window=4096),
        layer_kinds=exaone4_kinds,
        rotated_layers=rotated_where_windowed,
        norms=Norms(before=False, after=True),
        qk_norm="head",
    ),
    "seed_oss": Family(
        _defaults(524_288, num_key_value_heads=8, head_dim=128)
        | {"attention_bias": True, "attention_output_bias": False},
        reads=_ATTENTION_BIAS | {"mlp_bias"},
        renamed={"attention_out_bias": "attention_output_bias"},
    ),
    "granite": Family(
        _defaults(2048, attention_multiplier=1.0),
        reads=_ATTENTION_BIAS
        | {"mlp_bias", "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"},
    ),
    "qwen3_moe": Family(
        _defaults(32_768, num_key_value_heads=4, num_experts_per_tok=8, moe_intermediate_size=768)
        | {"head_dim": 128, **_QWEN_WINDOWS},
        reads=_ATTENTION_BIAS,
        layer_kinds=windowed_from_a_layer_on,
        qk_norm="head",
        experts=qwen_experts,
        is_sparse=is_sparse_in_qwen,
    ),
    "mellum": Family(
        _defaults(131_072, num_key_value_heads=4, num_experts_per_tok=8, moe_intermediate_size=896)
        | {"head_dim": 128, "sliding_window": 1024, "norm_topk_prob": True},
        reads=_ATTENTION_BIAS,
        layer_kinds=full_unless_given,
        rope_settings=_rope_by_kind(500_000.0, 10_000.0),
        rotates_partly=True,
        qk_norm="head",
        experts=qwen_experts,
        is_sparse=is_sparse_as_listed,
    ),
    "laguna": Family(
        _defaults(131_072, num_key_value_heads=8, num_experts_per_tok=8, moe_intermediate_size=512)
        | {"shared_expert_intermediate_size": 512, "head_dim": 128, "sliding_window": 512},
        reads=_ATTENTION_BIAS,
        layer_kinds=full_unless_given,
        rope_settings=_laguna_rope,
        rotates_partly=True,
        qk_norm="head",
        experts=laguna_experts,
        is_sparse=is_sparse_in_laguna,
        has_gate=True,
        gates=laguna_gates,
        num_heads=laguna_heads,
    ),
    "qwen2_moe": Family(
        _defaults(32_768, num_key_value_heads=16, num_experts_per_tok=4, moe_intermediate_size=1408)
        | {"shared_expert_intermediate_size": 5632, **_QWEN_WINDOWS},
        fixed={"attention_bias": True, "attention_output_bias": False},
        layer_kinds=windowed_from_a_layer_on,
        experts=qwen_experts,
        is_sparse=is_sparse_in_qwen,
    ),
    "mixtral": Family(
        _defaults(131_072, eps=1e-5, num_key_value_heads=8, num_experts_per_tok=2),
        layer_kinds=all_windowed,
        rope_settings=_million_rope,
        experts=mixtral_experts,
    ),
    "olmoe": Family(
        _defaults(4096, eps=1e-5, num_experts_per_tok=8),
        reads=_ATTENTION_BIAS,
        qk_norm="all",
        experts=olmoe_experts,
    ),
    "glm4_moe": Family(
        _defaults(131_072, eps=1e-5, num_key_value_heads=8, num_experts_per_tok=8, moe_intermediate_size=1408)
        | {"n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "partial_rotary_factor": 0.5},
        fixed={"attention_output_bias": False},
        reads=frozenset({"attention_bias"}),
        rotates_partly=True,
        qk_norm="head",
        qk_norm_setting="use_qk_norm",
        experts=glm_experts,
        is_sparse=is_sparse_in_glm,
    ),
    "gpt_oss": Family(
        _defaults(131_072, eps=1e-5, num_key_value_heads=8, num_experts_per_tok=4, head_dim=64)
        | {"sliding_window": 128, "attention_bias": True},
        reads=_ATTENTION_BIAS,
        layer_kinds=all_windowed_but_every(2),
        rope_settings=_gpt_oss_rope,
        experts=gpt_oss_experts,
        has_sinks=True,
    ),
    "granitemoe": Family(
        _defaults(2048, num_experts_per_tok=2),
        reads=_ATTENTION_BIAS
        | {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"},
        experts=granite_experts,
    ),
    "lfm2": replace(
        _LFM2,
        defaults={**_LFM2.defaults}
        | {"block_auto_adjust_ff_dim": True, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0},
        renamed={**_LFM2.renamed, "block_ff_dim": "intermediate_size"},
        dense_size=lfm2_size,
    ),
    "lfm2_moe": replace(
        _LFM2,
        defaults={**_LFM2.defaults}
        | {"num_experts_per_tok": 4, "moe_intermediate_size": 1792, "num_dense_layers": 2}
        | {"use_expert_bias": True, "norm_topk_prob": True},
        experts=lfm2_experts,
        is_sparse=is_sparse_in_lfm2,
    ),
    "qwen3_5": _QWEN35,
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe": _QWEN35_MOE,
    "qwen3_5_moe_text": _QWEN35_MOE,
    "qwen3_next": replace(
        _QWEN35_MOE,
        defaults={**_QWEN35_MOE.defaults, "num_experts_per_tok": 10, "norm_topk_prob": True},
        fixed={},
        is_sparse=is_sparse_in_qwen,
    ),
}

_NEIGHBOURS = "a rotation of neighbouring elements"
_COHERE = "LayerNorm, and attention beside the MLP"
_LATENT = "latent attention"
_STATES = "recurrent layers"
_LLAMA4 = "attention in chunks, a rotation of neighbouring elements, and experts whose input is weighted"
_ALTUP = "four residual streams at once"
_NORMED_EMBEDDING = "a norm of the embedding"
# Parts that models need which we refuse, by the names of both worlds.
NEEDS: dict[str, str] = {
    "glm": _NEIGHBOURS,
    "glm4": _NEIGHBOURS,
    "ernie4_5": _NEIGHBOURS,
    "cohere": _COHERE,
    "command-r": _COHERE,
    "cohere2": _COHERE,
    "hunyuan_v1_dense": "norms of q and k after their rotation",
    "hunyuan-dense": "norms of q and k after their rotation",
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek2": _LATENT,
    "kimi_k2": _LATENT,
    "glm4_moe_lite": _LATENT,
    "granitemoehybrid": _STATES,
    "nemotron_h": _STATES,
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "gemma3n": _ALTUP,
    "gemma3n_text": _ALTUP,
    "muse_glimmer": _NORMED_EMBEDDING,
    "muse_glimmer_text": _NORMED_EMBEDDING,
    "muse-glimmer": _NORMED_EMBEDDING,
    "olmo_hybrid": "gated delta nets with q, k and v apart and beta up to 2",
    "mistral3": "the model_type of its text_config",
}
