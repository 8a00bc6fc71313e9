"""Tiny random models of every family, made by `transformers`: the oracle for the forward pass."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file

_SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
_SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 256}
_SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0}
_LLAMA3_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def _yarn(**others: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64} | others


def _longrope(pairs: int) -> dict[str, Any]:
    factors = {"short_factor": [1.0 + 0.1 * pair for pair in range(pairs)]}
    factors |= {"long_factor": [1.5 + 2.0 * pair for pair in range(pairs)]}
    return {"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": pairs / 8, **factors}


def _ropes(full: dict[str, Any], theta: float = 10_000.0, **others: Any) -> dict[str, Any]:
    """Return the ropes of layers that see everything, and of those with windows."""
    return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": theta, **others}}


@dataclass(frozen=True)
class Tiny:
    """A configuration of a family. It differs from the defaults in one interesting setting."""

    name: str
    config: hf.PretrainedConfig

    @property
    def has_experts(self) -> bool:
        return hasattr(self.config, "num_experts_per_tok")


def _tiny(name: str, kind: type[hf.PretrainedConfig], **settings: Any) -> Tiny:
    """Return a model of two layers, or of as many as the settings say."""
    return Tiny(name, kind(**{"num_hidden_layers": 2} | _SIZES | settings))


TINY = [
    _tiny("llama", hf.LlamaConfig, num_hidden_layers=3),
    _tiny("llama_one_kv_head", hf.LlamaConfig, num_key_value_heads=1),
    _tiny("llama_tied", hf.LlamaConfig, tie_word_embeddings=True),
    _tiny("llama_wide_heads", hf.LlamaConfig, head_dim=32, rms_norm_eps=1e-5),
    _tiny("llama3_rope", hf.LlamaConfig, rope_parameters=_LLAMA3_ROPE),
    _tiny(
        "llama_linear_rope", hf.LlamaConfig,
        rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    ),
    _tiny("qwen3", hf.Qwen3Config, num_hidden_layers=3, head_dim=32),
    _tiny("qwen3_tied", hf.Qwen3Config, head_dim=16, tie_word_embeddings=True),
    _tiny("gemma3", hf.Gemma3TextConfig, num_hidden_layers=7, head_dim=32, sliding_window=8),
    _tiny(
        "gemma3_scaled", hf.Gemma3TextConfig, num_hidden_layers=6, head_dim=16, sliding_window=16,
        query_pre_attn_scalar=48,
        rope_parameters=_ropes({"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0}),
    ),
    _tiny(
        "gemma3_capped", hf.Gemma3TextConfig, num_hidden_layers=3, head_dim=16, sliding_window=8,
        sliding_window_pattern=3, final_logit_softcapping=2.0, attention_bias=True, tie_word_embeddings=False,
        hidden_activation="gelu",
    ),
    _tiny("llama_biases", hf.LlamaConfig, attention_bias=True, mlp_bias=True),
    _tiny(
        "llama_odd_sizes", hf.LlamaConfig, head_dim=12, mlp_bias=True, hidden_act="gelu",
        intermediate_size=50, vocab_size=99, hidden_size=60, num_attention_heads=5, num_key_value_heads=5,
    ),
    _tiny("llama_relu", hf.LlamaConfig, hidden_act="relu"),
    _tiny("llama_relu2", hf.LlamaConfig, hidden_act="relu2"),
    _tiny("llama_quick_gelu", hf.LlamaConfig, hidden_act="quick_gelu"),
    _tiny("llama_yarn", hf.LlamaConfig, rope_parameters=_yarn()),
    _tiny(
        "llama_yarn_mscale", hf.LlamaConfig,
        rope_parameters=_yarn(mscale=0.7, mscale_all_dim=1.3, truncate=False, beta_fast=8.0, beta_slow=0.5),
    ),
    _tiny("mistral", hf.MistralConfig, sliding_window=16),
    _tiny("mistral_full", hf.MistralConfig, sliding_window=None, head_dim=32),
    _tiny("qwen2", hf.Qwen2Config),
    _tiny("qwen2_yarn", hf.Qwen2Config, tie_word_embeddings=True, rope_parameters=_yarn(attention_factor=1.2)),
    _tiny(
        "qwen2_windows", hf.Qwen2Config, num_hidden_layers=4, use_sliding_window=True, sliding_window=8,
        max_window_layers=2,
    ),
    _tiny(
        "qwen3_windows", hf.Qwen3Config, num_hidden_layers=3, head_dim=32, use_sliding_window=True, sliding_window=8,
        max_window_layers=1, attention_bias=True,
    ),
    _tiny(
        "gemma2", hf.Gemma2Config, num_hidden_layers=4, head_dim=32, sliding_window=8, query_pre_attn_scalar=20,
        attn_logit_softcapping=1.5, final_logit_softcapping=2.0,
    ),
    _tiny(
        "gemma2_uncapped", hf.Gemma2Config, head_dim=16, sliding_window=8, attn_logit_softcapping=None,
        final_logit_softcapping=None, attention_bias=True, tie_word_embeddings=False,
    ),
    _tiny("phi3", hf.Phi3Config, sliding_window=16),
    _tiny(
        "phi3_partial", hf.Phi3Config,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
    ),
    _tiny("smollm3", hf.SmolLM3Config, num_hidden_layers=5, attention_bias=True, mlp_bias=True),
    _tiny(
        "smollm3_windows", hf.SmolLM3Config, num_hidden_layers=4, use_sliding_window=True, sliding_window=8,
        no_rope_layers=[1, 0, 0, 1], tie_word_embeddings=False,
    ),
    _tiny("olmo2", hf.Olmo2Config, num_hidden_layers=3),
    _tiny("olmo2_biases", hf.Olmo2Config, attention_bias=True, num_key_value_heads=4),
    _tiny("olmo3", hf.Olmo3Config, num_hidden_layers=4, sliding_window=8),
    _tiny(
        "olmo3_yarn", hf.Olmo3Config, num_hidden_layers=4, sliding_window=8, attention_bias=True,
        rope_parameters=_ropes(_yarn(attention_factor=1.2)),
    ),
    _tiny("exaone4", hf.Exaone4Config, num_hidden_layers=5, sliding_window=8, rope_parameters=_LLAMA3_ROPE),
    _tiny(
        "exaone4_full", hf.Exaone4Config, sliding_window=None, layer_types=["full_attention"] * 2,
        tie_word_embeddings=True,
    ),
    _tiny("seed_oss", hf.SeedOssConfig, head_dim=32),
    _tiny("seed_oss_biases", hf.SeedOssConfig, head_dim=16, attention_out_bias=True, mlp_bias=True),
    _tiny(
        "granite", hf.GraniteConfig, num_hidden_layers=3, embedding_multiplier=12.0, residual_multiplier=0.22,
        attention_multiplier=0.05, logits_scaling=8.0, rms_norm_eps=1e-2,
    ),
    _tiny("granite_biases", hf.GraniteConfig, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    _tiny(
        "qwen3_moe", hf.Qwen3MoeConfig, head_dim=32, num_experts=20, num_experts_per_tok=3, moe_intermediate_size=64,
        norm_topk_prob=True,
    ),
    _tiny(
        "qwen3_moe_mixed", hf.Qwen3MoeConfig, num_hidden_layers=3, head_dim=32, num_experts=8, num_experts_per_tok=1,
        moe_intermediate_size=80, mlp_only_layers=[1],
    ),
    _tiny(
        "qwen3_moe_odd", hf.Qwen3MoeConfig, head_dim=32, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20,
    ),
    _tiny(
        "qwen2_moe", hf.Qwen2MoeConfig, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    ),
    _tiny(
        "glm4_moe", hf.Glm4MoeConfig, num_hidden_layers=3, head_dim=32, n_routed_experts=10, num_experts_per_tok=3,
        moe_intermediate_size=64, n_shared_experts=2, routed_scaling_factor=1.8, use_qk_norm=True, attention_bias=True,
    ),
    _tiny(
        "glm4_moe_plain", hf.Glm4MoeConfig, head_dim=16, n_routed_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=64, norm_topk_prob=False, first_k_dense_replace=0,
    ),
    _tiny("mixtral", hf.MixtralConfig, num_local_experts=4, sliding_window=16),
    _tiny("olmoe", hf.OlmoeConfig, num_experts=8, num_experts_per_tok=4),
    _tiny(
        "gpt_oss", hf.GptOssConfig, num_hidden_layers=4, head_dim=32, num_local_experts=6, num_experts_per_tok=2,
        sliding_window=8, rope_parameters=_yarn(truncate=False),
    ),
    _tiny(
        "gpt_oss_plain", hf.GptOssConfig, head_dim=16, num_local_experts=3, num_experts_per_tok=3, attention_bias=False,
        layer_types=["full_attention"] * 2, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    ),
    _tiny(
        "gpt_oss_odd", hf.GptOssConfig, head_dim=16, num_local_experts=3, num_experts_per_tok=2,
        **_SIZES | {"intermediate_size": 28},
    ),
    _tiny(
        "granitemoe", hf.GraniteMoeConfig, num_local_experts=5, num_experts_per_tok=2, embedding_multiplier=12.0,
        residual_multiplier=0.22, attention_multiplier=0.05, logits_scaling=8.0, rms_norm_eps=1e-2,
    ),
]  # fmt: skip

_DELTA_NETS = _SIZES | {"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 6}
_DELTA_NETS |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
_DELTA_NETS_MOE = _DELTA_NETS | {"num_experts": 6, "num_experts_per_tok": 2}
_DELTA_NETS_MOE |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 32}

DELTA_NETS = [
    _tiny("qwen3_5", hf.Qwen3_5TextConfig, num_hidden_layers=4, **_DELTA_NETS),
    _tiny(
        "qwen3_5_uneven", hf.Qwen3_5TextConfig, num_hidden_layers=3,
        layer_types=["full_attention", "linear_attention", "linear_attention"], tie_word_embeddings=True,
        attention_bias=True, rms_norm_eps=1e-3,
        **_DELTA_NETS | {
            "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3,
            "linear_key_head_dim": 32, "linear_value_head_dim": 48,
        },
    ),
    _tiny("qwen3_5_moe", hf.Qwen3_5MoeTextConfig, num_hidden_layers=4, **_DELTA_NETS_MOE),
    _tiny("qwen3_next", hf.Qwen3NextConfig, num_hidden_layers=4, **_DELTA_NETS_MOE),
    _tiny(
        "qwen3_next_mixed", hf.Qwen3NextConfig, num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"], mlp_only_layers=[0],
        norm_topk_prob=False, **_DELTA_NETS_MOE | {"linear_value_head_dim": 32},
    ),
]  # fmt: skip

OLMO_HYBRID = [
    _tiny(
        "olmo_hybrid", hf.OlmoHybridConfig, num_hidden_layers=5,
        rope_parameters={"rope_type": "default", "rope_theta": None}, linear_key_head_dim=16,
    ),
    _tiny(
        "olmo_hybrid_rotated", hf.OlmoHybridConfig, num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"], linear_num_key_heads=2,
        linear_num_value_heads=6, linear_key_head_dim=16, linear_value_head_dim=48, linear_allow_neg_eigval=False,
        attention_bias=True, tie_word_embeddings=True, linear_conv_kernel_dim=3,
        rope_parameters={"rope_type": "default", "rope_theta": 5_000.0},
    ),
]  # fmt: skip

# Attention of these families has output gates and partial rotation.
GATED = [
    _tiny(
        "qwen3_5_gates", hf.Qwen3_5TextConfig, layer_types=["full_attention"] * 2, attention_bias=True,
        **_DELTA_NETS | {"head_dim": 256},
    ),
    _tiny("qwen3_next_gates", hf.Qwen3NextConfig, layer_types=["full_attention"] * 2, **_DELTA_NETS_MOE),
]  # fmt: skip

RECURRENT = [
    _tiny(
        "lfm2", hf.Lfm2Config, num_hidden_layers=4, full_attn_idxs=[1, 3], block_multiple_of=32,
        block_ffn_dim_multiplier=1.3,
    ),
    _tiny(
        "lfm2_biases", hf.Lfm2Config, num_hidden_layers=3, layer_types=["conv", "conv", "full_attention"],
        conv_bias=True, conv_L_cache=4, block_auto_adjust_ff_dim=False, tie_word_embeddings=False, norm_eps=1e-3,
    ),
    _tiny(
        "lfm3", hf.models.lfm3.configuration_lfm3.Lfm3Config, num_hidden_layers=5, head_dim=32, sliding_window=8,
        conv_L_cache=5,
    ),
    _tiny(
        "lfm2_moe", hf.Lfm2MoeConfig, num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2,
        num_dense_layers=1, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=64,
    ),
    _tiny(
        "lfm2_moe_plain", hf.Lfm2MoeConfig, layer_types=["full_attention", "conv"], num_dense_layers=0, num_experts=5,
        num_experts_per_tok=3, moe_intermediate_size=64, use_expert_bias=False, norm_topk_prob=False,
        routed_scaling_factor=1.8,
    ),
]  # fmt: skip

_GEMMA4: dict[str, Any] = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 9, "final_logit_softcapping": 30.0}
_GEMMA4 |= {"hidden_size_per_layer_input": 0}
GEMMA4 = [
    _tiny(
        "gemma4", hf.Gemma4TextConfig, num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2,
        attention_k_eq_v=True, num_global_key_value_heads=1, **_GEMMA4,
    ),
    _tiny(
        "gemma4_unified", hf.Gemma4UnifiedTextConfig, num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "full_attention"], attention_k_eq_v=True,
        num_global_key_value_heads=1, head_dim=16, global_head_dim=32, sliding_window=9,
    ),
    _tiny(
        "gemma4_per_layer", hf.Gemma4TextConfig, num_hidden_layers=5,
        layer_types=["sliding_attention", "full_attention"] * 2 + ["full_attention"], num_kv_shared_layers=2,
        use_double_wide_mlp=True, vocab_size_per_layer_input=96, **_GEMMA4 | {"hidden_size_per_layer_input": 24},
    ),
    _tiny(
        "gemma4_moe", hf.Gemma4TextConfig, num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2,
        attention_k_eq_v=True, num_global_key_value_heads=1, enable_moe_block=True, num_experts=6, top_k_experts=2,
        moe_intermediate_size=48, **_GEMMA4,
    ),
    _tiny(
        "gemma4_shared", hf.Gemma4TextConfig, num_hidden_layers=7,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["full_attention"],
        num_kv_shared_layers=4, use_double_wide_mlp=True, **_GEMMA4,
    ),
]  # fmt: skip

_MELLUM: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "head_dim": 32}
MELLUM = [
    _tiny(
        "mellum", hf.MellumConfig, num_hidden_layers=4, sliding_window=9, **_MELLUM,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters=_ropes(_yarn(), 5_000.0),
    ),
    _tiny(
        "mellum_mixed", hf.MellumConfig, num_hidden_layers=3, attention_bias=True, norm_topk_prob=False,
        tie_word_embeddings=True, mlp_layer_types=["sparse", "dense", "sparse"], **_MELLUM,
    ),
]  # fmt: skip

_MINISTRAL3 = _yarn(mscale=1.0, mscale_all_dim=1.0, beta_fast=32.0, beta_slow=1.0)
MINISTRAL3 = [
    _tiny(
        "ministral3", hf.Ministral3Config, num_hidden_layers=3, head_dim=32,
        rope_parameters=_MINISTRAL3 | {
            "original_max_position_embeddings": 16, "factor": 16.0, "llama_4_scaling_beta": 0.3,
        },
    ),
    _tiny(
        "ministral3_windows", hf.Ministral3Config, head_dim=16, sliding_window=9, tie_word_embeddings=True,
        rope_parameters=_MINISTRAL3 | {"llama_4_scaling_beta": 0.5},
    ),
]  # fmt: skip

_LAGUNA: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "head_dim": 32}
_LAGUNA |= {"shared_expert_intermediate_size": 96}
LAGUNA = [
    _tiny(
        "laguna", hf.LagunaConfig, num_hidden_layers=4, sliding_window=9, moe_routed_scaling_factor=2.5, **_LAGUNA,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"],
        num_attention_heads_per_layer=[4, 6, 6, 6],
        rope_parameters=_ropes(_yarn(partial_rotary_factor=0.5), 5_000.0, partial_rotary_factor=1.0),
    ),
    _tiny(
        "laguna_elements", hf.LagunaConfig, num_hidden_layers=3, gating="per-element", attention_bias=False,
        tie_word_embeddings=True, mlp_layer_types=["dense", "dense", "sparse"], **_LAGUNA,
    ),
]  # fmt: skip

MUSE_GLIMMER = [
    _tiny(
        "muse_glimmer", hf.MuseGlimmerTextConfig, num_hidden_layers=5, head_dim=32, sliding_window=9,
        output_multiplier=0.7, qk_scale_factor=1.5, post_norm_eps=1e-3,
    ),
    _tiny(
        "muse_glimmer_listed", hf.MuseGlimmerTextConfig, head_dim=16,
        layer_types=["full_attention", "sliding_attention"], sliding_window=7, layer_rope_theta=[10_000.0, 0],
        final_logit_softcapping=3.0,
    ),
]  # fmt: skip

_LLAMA4 = _SIZES | {"head_dim": 32, "num_local_experts": 6, "intermediate_size_mlp": 128}
LLAMA4 = [
    _tiny("llama4", hf.Llama4TextConfig, num_hidden_layers=5, rope_parameters=_LLAMA3_ROPE, **_LLAMA4),
    _tiny(
        "llama4_chunks", hf.Llama4TextConfig, num_hidden_layers=4, attention_chunk_size=23, floor_scale=16,
        attn_scale=0.5, interleave_moe_layer_step=2, no_rope_layers=[1, 0, 1, 1], **_LLAMA4,
    ),
    _tiny(
        "llama4_plain", hf.Llama4TextConfig, num_hidden_layers=3, use_qk_norm=False, attn_temperature_tuning=False,
        attention_chunk_size=None, moe_layers=[0, 1], num_experts_per_tok=2, attention_bias=True,
        tie_word_embeddings=True, **_LLAMA4 | {"head_dim": 16},
    ),
]  # fmt: skip

_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
# Families that differ from others in data only.
ROWS = [
    _tiny("gemma", hf.GemmaConfig, head_dim=32),
    _tiny("gemma_biases", hf.GemmaConfig, head_dim=16, attention_bias=True, tie_word_embeddings=False),
    _tiny("vaultgemma", hf.VaultGemmaConfig, num_hidden_layers=4, head_dim=32, sliding_window=8),
    _tiny("glm", hf.GlmConfig, head_dim=32),
    _tiny("glm4", hf.Glm4Config, num_hidden_layers=3, head_dim=32),
    _tiny("glm4_whole", hf.Glm4Config, head_dim=16, attention_bias=False, partial_rotary_factor=1.0),
    _tiny(
        "glm4_proportional", hf.Glm4Config, head_dim=16,
        rope_parameters={"rope_type": "proportional", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    ),
    _tiny("ernie4_5", hf.Ernie4_5Config, head_dim=32),
    _tiny("ernie4_5_biases", hf.Ernie4_5Config, head_dim=16, use_bias=True, tie_word_embeddings=False),
    _tiny("ernie4_5_moe", hf.Ernie4_5_MoeConfig, moe_num_experts=6, moe_k=2, moe_intermediate_size=64),
    _tiny(
        "ernie4_5_moe_alternating", hf.Ernie4_5_MoeConfig, num_hidden_layers=4, moe_num_experts=5, moe_k=3,
        moe_intermediate_size=32, moe_num_shared_experts=0, moe_layer_interval=2, moe_layer_start_index=0,
        moe_layer_end_index=2, tie_word_embeddings=False,
    ),
    _tiny("helium", hf.HeliumConfig, head_dim=16),
    _tiny("helium_biases", hf.HeliumConfig, head_dim=16, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    _tiny("internlm3", hf.InternLM3Config, head_dim=32, attention_bias=True, mlp_bias=True),
    _tiny("iquestcoder", hf.IQuestCoderConfig, head_dim=32),
    _tiny(
        "ministral", hf.MinistralConfig, num_hidden_layers=3, head_dim=16, sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    _tiny(
        "granite_swa", hf.models.granite_swa.configuration_granite_swa.GraniteSWAConfig, num_hidden_layers=5,
        sliding_window=8, embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.05,
        logits_scaling=8.0, layer_rope_theta=[0, 5_000.0, 5_000.0, 5_000.0, 0], rms_norm_eps=1e-2,
    ),
    _tiny("granitemoeshared", hf.GraniteMoeSharedConfig, num_local_experts=5, shared_intermediate_size=64),
    _tiny(
        "granitemoe_swa", hf.models.granitemoe_swa.configuration_granitemoe_swa.GraniteMoeSWAConfig,
        num_hidden_layers=3, sliding_window=8, num_local_experts=5, shared_intermediate_size=64,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"], residual_multiplier=0.5,
    ),
    _tiny("flex_olmo", hf.FlexOlmoConfig, num_experts=8, num_experts_per_tok=3),
    _tiny("solar_open", hf.SolarOpenConfig, head_dim=32, n_routed_experts=6, norm_topk_prob=False, **_MOE),
    _tiny(
        "dots1", hf.Dots1Config, num_hidden_layers=3, head_dim=32, n_routed_experts=6, n_shared_experts=2,
        first_k_dense_replace=1, max_window_layers=1, sliding_window=8, routed_scaling_factor=2.5, norm_topk_prob=True,
        **_MOE,
    ),
    _tiny("dots1_full", hf.Dots1Config, head_dim=16, n_routed_experts=5, n_shared_experts=1, **_MOE),
    _tiny(
        "minimax_m2", hf.MiniMaxM2Config, head_dim=32, num_local_experts=6, num_experts_per_tok=2, rotary_dim=16,
    ),
    _tiny(
        "afmoe", hf.AfmoeConfig, num_hidden_layers=5, head_dim=32, num_experts=6, num_shared_experts=1,
        num_dense_layers=2, mup_enabled=True, sliding_window=8, route_scale=1.8, **_MOE,
    ),
    _tiny("afmoe_plain", hf.AfmoeConfig, head_dim=16, num_experts=4, num_dense_layers=0, **_MOE),
    _tiny("exaone", hf.models.exaone.configuration_exaone.ExaoneConfig, rope_parameters=_LLAMA3_ROPE),
    _tiny("cwm", hf.CwmConfig, num_hidden_layers=5, head_dim=32, sliding_window=8, rope_parameters=_LLAMA3_ROPE),
    _tiny(
        "hyperclovax", hf.models.hyperclovax.configuration_hyperclovax.HyperCLOVAXConfig, num_hidden_layers=3,
        embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.05, logits_scaling=0.5,
        rms_norm_eps=1e-2,
    ),
    _tiny("apertus", hf.ApertusConfig, num_hidden_layers=3, rope_parameters=_LLAMA3_ROPE),
    _tiny("apertus_biases", hf.ApertusConfig, attention_bias=True, hidden_act="silu"),
    _tiny("nanochat", hf.NanoChatConfig, num_hidden_layers=3, rms_norm_eps=1e-4, final_logit_softcapping=2.0),
    _tiny(
        "sarvam_moe", hf.models.sarvam_moe.configuration_sarvam_moe.SarvamMoEConfig, head_dim=16, n_routed_experts=6,
        n_shared_experts=1, **_MOE,
    ),
    _tiny(
        "hy_v3", hf.models.hy_v3.configuration_hy_v3.HYV3Config, num_hidden_layers=3, head_dim=32, num_experts=6,
        **_MOE,
    ),
    _tiny(
        "flint", hf.models.flint.configuration_flint.FlintConfig, num_hidden_layers=5, head_dim=32, num_experts=6,
        sliding_window=8, shared_expert_intermediate_size=32, mlp_only_layers=[1], **_MOE,
    ),
    _tiny(
        "kolibri1", hf.models.kolibri1.configuration_kolibri1.Kolibri1Config, num_hidden_layers=5, head_dim=32,
        num_experts=6, sliding_window=8, shared_expert_intermediate_size=32, norm_topk_prob=True, **_MOE,
    ),
    _tiny(
        "exaone_moe", hf.ExaoneMoeConfig, num_hidden_layers=5, head_dim=32, num_experts=6, sliding_window=8, **_MOE,
    ),
    _tiny(
        "exaone_moe_listed", hf.ExaoneMoeConfig, num_hidden_layers=3, num_experts=4, num_shared_experts=2,
        sliding_window_pattern="LG", layer_types=["sliding_attention", "full_attention", "full_attention"],
        sliding_window=8, mlp_layer_types=["sparse", "dense", "sparse"], norm_topk_prob=False, **_MOE,
    ),
]  # fmt: skip

CENTRED = [
    _tiny("cohere", hf.CohereConfig, num_hidden_layers=3),
    _tiny("cohere_biases", hf.CohereConfig, attention_bias=True, tie_word_embeddings=False, logit_scale=0.5),
    _tiny("cohere2", hf.Cohere2Config, num_hidden_layers=5, sliding_window=8),
    _tiny("phi", hf.PhiConfig, num_key_value_heads=4),
    _tiny("starcoder2", hf.Starcoder2Config, sliding_window=8),
    _tiny("starcoder2_plain", hf.Starcoder2Config, use_bias=False, tie_word_embeddings=False),
    _tiny("stablelm", hf.StableLmConfig, use_qkv_bias=True),
    _tiny("stablelm_parallel", hf.StableLmConfig, use_parallel_residual=True),
    _tiny("stablelm_norms", hf.StableLmConfig, num_hidden_layers=3, qk_layernorm=True, use_parallel_residual=True),
    _tiny("jais2", hf.models.jais2.configuration_jais2.Jais2Config),
    _tiny("nemotron", hf.NemotronConfig),
    _tiny("gpt2", hf.GPT2Config),
    _tiny("gpt2_narrow", hf.GPT2Config, n_inner=48, tie_word_embeddings=False, activation_function="relu"),
    _tiny("gpt_neox", hf.GPTNeoXConfig),
    _tiny("gpt_neox_in_turn", hf.GPTNeoXConfig, use_parallel_residual=False),
    _tiny("gpt_neox_wide", hf.GPTNeoXConfig, rotary_pct=1.0, attention_bias=False, tie_word_embeddings=True),
    _tiny("hunyuan_v1_dense", hf.HunYuanDenseV1Config, head_dim=32),
    _tiny(
        "hunyuan_v1_dense_alpha", hf.HunYuanDenseV1Config, head_dim=16, attention_bias=True,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 1000.0, "factor": 1.0},
    ),
    _tiny("hunyuan_v1_moe", hf.HunYuanMoEV1Config, head_dim=16, num_experts=6, moe_topk=2),
    _tiny("arcee", hf.ArceeConfig, num_hidden_layers=3),
    _tiny("olmo", hf.OlmoConfig, attention_bias=True),
]  # fmt: skip

_LONG: dict[str, Any] = {"original_max_position_embeddings": 64, "rope_parameters": _longrope(6)}
LONGROPE = _tiny("phi3_longrope", hf.Phi3Config, tie_word_embeddings=True, **_LONG)
TINY += [*RECURRENT, *DELTA_NETS, *GATED, *GEMMA4, *MELLUM, *MINISTRAL3, *LAGUNA, *MUSE_GLIMMER, *LLAMA4, *OLMO_HYBRID]
TINY += [*ROWS, *CENTRED]
BY_NAME = {tiny.name: tiny for tiny in TINY}
ONE_EACH = list({tiny.config.model_type: tiny for tiny in reversed(TINY)}.values())[::-1]  # a model of each family
# GPUs refuse these.
ON_CPUS = [*RECURRENT, *DELTA_NETS, *GATED, *GEMMA4, *MINISTRAL3, *LAGUNA, *MUSE_GLIMMER, *LLAMA4, *OLMO_HYBRID]
ON_CPUS += [*CENTRED, BY_NAME["granite_swa"]]
DENSE = [tiny for tiny in TINY if not tiny.has_experts and tiny not in ON_CPUS]
ONE_EACH_DENSE = [tiny for tiny in ONE_EACH if tiny in DENSE and tiny not in ROWS]


def _text_of_muse_glimmer(config: hf.MuseGlimmerTextConfig) -> Any:
    """Return the text model with its head. In transformers, it is a part of the multimodal model, slow to import."""

    class TextOfMuseGlimmer(hf.MuseGlimmerTextModel):
        def __init__(self) -> None:
            super().__init__(config)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

        @property
        def base_model(self) -> Any:
            return super().forward

        def forward(self, token_ids: torch.Tensor) -> Any:
            cap, scale = self.config.final_logit_softcapping, self.config.output_multiplier
            logits = self.lm_head(super().forward(token_ids).last_hidden_state) * scale
            return SimpleNamespace(logits=cap * torch.tanh(logits / cap))

        def save_pretrained(self, folder: Path) -> None:
            self.config.save_pretrained(folder)
            tensors = {name if "lm_head" in name else f"model.{name}": each for name, each in self.state_dict().items()}
            save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")

    return TextOfMuseGlimmer()


def _divide_taps(config: hf.OlmoHybridConfig, path: Path) -> None:
    """Divide the taps as in published files, by q, k and v. transformers writes three equal parts."""
    tensors, keys = load_file(path), config.linear_num_key_heads * config.linear_key_head_dim
    for at in sorted({name.partition("q_conv1d")[0] for name in tensors if "q_conv1d" in name}):
        names = [f"{at}{which}_conv1d.weight" for which in "qkv"]
        whole = torch.cat([tensors[name] for name in names])
        parts = whole.split([keys, keys, len(whole) - 2 * keys])
        tensors |= {name: part.contiguous() for name, part in zip(names, parts, strict=True)}
    save_file(tensors, path, {"format": "pt"})


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a folder in one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def make_tiny(tiny: Tiny, folder: Path) -> Any:
    """Make a `transformers` model with random float32 weights and norms, save it to the folder, and return it."""
    torch.manual_seed(0)
    if isinstance(tiny.config, hf.MuseGlimmerTextConfig):
        tiny.config._attn_implementation = "eager"
        model: Any = _text_of_muse_glimmer(tiny.config).float().eval()
    else:
        model = hf.AutoModelForCausalLM.from_config(tiny.config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            parameter.add_(torch.randn_like(parameter) * spread if parameter.dim() == 1 else 0)
            if parameter.dim() > 1:
                parameter.normal_(std=spread)
        for name, parameter in model.named_parameters():
            if name.endswith("gate_up_proj_bias"):
                parameter.normal_(std=6)  # so that gpt-oss clamps
        for name, buffer in model.named_buffers():
            if name.endswith(".act_fn.beta"):
                buffer.uniform_(0.3, 1.3)
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(std=0.3)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.3, 1.3)
    model.save_pretrained(folder)
    if tiny.config.model_type == "gemma4_text" and not tiny.config.hidden_size_per_layer_input:
        model.config.output_hidden_states = True  # otherwise transformers 5.24 fails without such embeddings
    if tiny.config.model_type == "olmo_hybrid":
        _divide_taps(tiny.config, folder / "model.safetensors")
    if tiny.config.model_type == "llama4_text":
        model.base_model_prefix = "model"  # transformers has the name in the multimodal model
    return model
