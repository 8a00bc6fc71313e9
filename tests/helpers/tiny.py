"""Tiny random models of every family, made by `transformers`: the oracle for the forward pass."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    LagunaConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    MellumConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    MuseGlimmerTextConfig,
    MuseGlimmerTextModel,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OlmoHybridConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
)

_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _yarn(**others: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64} | others


def _longrope(pairs: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": pairs / 8,
        "short_factor": [1.0 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [1.5 + 2.0 * pair for pair in range(pairs)],
    }


@dataclass(frozen=True)
class Tiny:
    """A configuration of a family. It differs from the defaults in one interesting setting."""

    name: str
    config: PretrainedConfig

    @property
    def has_experts(self) -> bool:
        return hasattr(self.config, "num_experts_per_tok")


TINY = [
    Tiny("llama", LlamaConfig(num_hidden_layers=3, **_SIZES)),
    Tiny("llama_one_kv_head", LlamaConfig(num_hidden_layers=2, **_SIZES | {"num_key_value_heads": 1})),
    Tiny("llama_tied", LlamaConfig(num_hidden_layers=2, tie_word_embeddings=True, **_SIZES)),
    Tiny("llama_wide_heads", LlamaConfig(num_hidden_layers=2, head_dim=32, rms_norm_eps=1e-5, **_SIZES)),
    Tiny("llama3_rope", LlamaConfig(num_hidden_layers=2, rope_parameters=_LLAMA3_ROPE, **_SIZES)),
    Tiny(
        "llama_linear_rope",
        LlamaConfig(
            num_hidden_layers=2,
            rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
            **_SIZES,
        ),
    ),
    Tiny("qwen3", Qwen3Config(num_hidden_layers=3, head_dim=32, **_SIZES)),
    Tiny("qwen3_tied", Qwen3Config(num_hidden_layers=2, head_dim=16, tie_word_embeddings=True, **_SIZES)),
    Tiny("gemma3", Gemma3TextConfig(num_hidden_layers=7, head_dim=32, sliding_window=8, **_SIZES)),
    Tiny(
        "gemma3_scaled",
        Gemma3TextConfig(
            num_hidden_layers=6,
            head_dim=16,
            sliding_window=16,
            query_pre_attn_scalar=48,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
            **_SIZES,
        ),
    ),
    Tiny(
        "gemma3_capped",
        Gemma3TextConfig(
            num_hidden_layers=3,
            head_dim=16,
            sliding_window=8,
            sliding_window_pattern=3,
            final_logit_softcapping=2.0,
            attention_bias=True,
            tie_word_embeddings=False,
            hidden_activation="gelu",
            **_SIZES,
        ),
    ),
    Tiny("llama_biases", LlamaConfig(num_hidden_layers=2, attention_bias=True, mlp_bias=True, **_SIZES)),
    Tiny(
        "llama_odd_sizes",
        LlamaConfig(
            num_hidden_layers=2,
            head_dim=12,
            mlp_bias=True,
            hidden_act="gelu",
            **_SIZES
            | {
                "intermediate_size": 50,
                "vocab_size": 99,
                "hidden_size": 60,
                "num_attention_heads": 5,
                "num_key_value_heads": 5,
            },
        ),
    ),
    Tiny("llama_relu", LlamaConfig(num_hidden_layers=2, hidden_act="relu", **_SIZES)),
    Tiny("llama_relu2", LlamaConfig(num_hidden_layers=2, hidden_act="relu2", **_SIZES)),
    Tiny("llama_quick_gelu", LlamaConfig(num_hidden_layers=2, hidden_act="quick_gelu", **_SIZES)),
    Tiny("llama_yarn", LlamaConfig(num_hidden_layers=2, rope_parameters=_yarn(), **_SIZES)),
    Tiny(
        "llama_yarn_mscale",
        LlamaConfig(
            num_hidden_layers=2,
            rope_parameters=_yarn(mscale=0.7, mscale_all_dim=1.3, truncate=False, beta_fast=8.0, beta_slow=0.5),
            **_SIZES,
        ),
    ),
    Tiny("mistral", MistralConfig(num_hidden_layers=2, sliding_window=16, **_SIZES)),
    Tiny("mistral_full", MistralConfig(num_hidden_layers=2, sliding_window=None, head_dim=32, **_SIZES)),
    Tiny("qwen2", Qwen2Config(num_hidden_layers=2, **_SIZES)),
    Tiny(
        "qwen2_yarn",
        Qwen2Config(
            num_hidden_layers=2, tie_word_embeddings=True, rope_parameters=_yarn(attention_factor=1.2), **_SIZES
        ),
    ),
    Tiny(
        "qwen2_windows",
        Qwen2Config(num_hidden_layers=4, use_sliding_window=True, sliding_window=8, max_window_layers=2, **_SIZES),
    ),
    Tiny(
        "qwen3_windows",
        Qwen3Config(
            num_hidden_layers=3,
            head_dim=32,
            use_sliding_window=True,
            sliding_window=8,
            max_window_layers=1,
            attention_bias=True,
            **_SIZES,
        ),
    ),
    Tiny(
        "gemma2",
        Gemma2Config(
            num_hidden_layers=4,
            head_dim=32,
            sliding_window=8,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=1.5,
            final_logit_softcapping=2.0,
            **_SIZES,
        ),
    ),
    Tiny(
        "gemma2_uncapped",
        Gemma2Config(
            num_hidden_layers=2,
            head_dim=16,
            sliding_window=8,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            attention_bias=True,
            tie_word_embeddings=False,
            **_SIZES,
        ),
    ),
    Tiny("phi3", Phi3Config(num_hidden_layers=2, sliding_window=16, **_SIZES)),
    Tiny(
        "phi3_partial",
        Phi3Config(
            num_hidden_layers=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
            **_SIZES,
        ),
    ),
    Tiny("smollm3", SmolLM3Config(num_hidden_layers=5, attention_bias=True, mlp_bias=True, **_SIZES)),
    Tiny(
        "smollm3_windows",
        SmolLM3Config(
            num_hidden_layers=4,
            use_sliding_window=True,
            sliding_window=8,
            no_rope_layers=[1, 0, 0, 1],
            tie_word_embeddings=False,
            **_SIZES,
        ),
    ),
    Tiny("olmo2", Olmo2Config(num_hidden_layers=3, **_SIZES)),
    Tiny("olmo2_biases", Olmo2Config(num_hidden_layers=2, attention_bias=True, **_SIZES | {"num_key_value_heads": 4})),
    Tiny("olmo3", Olmo3Config(num_hidden_layers=4, sliding_window=8, **_SIZES)),
    Tiny(
        "olmo3_yarn",
        Olmo3Config(
            num_hidden_layers=4,
            sliding_window=8,
            attention_bias=True,
            rope_parameters={
                "full_attention": _yarn(attention_factor=1.2),
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
            **_SIZES,
        ),
    ),
    Tiny("exaone4", Exaone4Config(num_hidden_layers=5, sliding_window=8, rope_parameters=_LLAMA3_ROPE, **_SIZES)),
    Tiny(
        "exaone4_full",
        Exaone4Config(
            num_hidden_layers=2,
            sliding_window=None,
            layer_types=["full_attention"] * 2,
            tie_word_embeddings=True,
            **_SIZES,
        ),
    ),
    Tiny("seed_oss", SeedOssConfig(num_hidden_layers=2, head_dim=32, **_SIZES)),
    Tiny(
        "seed_oss_biases",
        SeedOssConfig(num_hidden_layers=2, head_dim=16, attention_out_bias=True, mlp_bias=True, **_SIZES),
    ),
    Tiny(
        "granite",
        GraniteConfig(
            num_hidden_layers=3,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.05,
            logits_scaling=8.0,
            rms_norm_eps=1e-2,
            **_SIZES,
        ),
    ),
    Tiny(
        "granite_biases",
        GraniteConfig(num_hidden_layers=2, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, **_SIZES),
    ),
    Tiny(
        "qwen3_moe",
        Qwen3MoeConfig(
            num_hidden_layers=2, head_dim=32, num_experts=20, num_experts_per_tok=3, moe_intermediate_size=64,
            norm_topk_prob=True, **_SIZES,
        ),
    ),
    Tiny(
        "qwen3_moe_mixed",
        Qwen3MoeConfig(
            num_hidden_layers=3, head_dim=32, num_experts=8, num_experts_per_tok=1, moe_intermediate_size=80,
            mlp_only_layers=[1], **_SIZES,
        ),
    ),
    Tiny(
        "qwen2_moe",
        Qwen2MoeConfig(
            num_hidden_layers=2, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=64,
            shared_expert_intermediate_size=64, **_SIZES,
        ),
    ),
    Tiny(
        "glm4_moe",
        Glm4MoeConfig(
            num_hidden_layers=3, head_dim=32, n_routed_experts=10, num_experts_per_tok=3, moe_intermediate_size=64,
            n_shared_experts=2, routed_scaling_factor=1.8, use_qk_norm=True, attention_bias=True, **_SIZES,
        ),
    ),
    Tiny(
        "glm4_moe_plain",
        Glm4MoeConfig(
            num_hidden_layers=2, head_dim=16, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=64,
            norm_topk_prob=False, first_k_dense_replace=0, **_SIZES,
        ),
    ),
    Tiny("mixtral", MixtralConfig(num_hidden_layers=2, num_local_experts=4, sliding_window=16, **_SIZES)),
    Tiny("olmoe", OlmoeConfig(num_hidden_layers=2, num_experts=8, num_experts_per_tok=4, **_SIZES)),
    Tiny(
        "gpt_oss",
        GptOssConfig(
            num_hidden_layers=4, head_dim=32, num_local_experts=6, num_experts_per_tok=2, sliding_window=8,
            rope_parameters=_yarn(truncate=False), **_SIZES,
        ),
    ),
    Tiny(
        "gpt_oss_plain",
        GptOssConfig(
            num_hidden_layers=2, head_dim=16, num_local_experts=3, num_experts_per_tok=3, attention_bias=False,
            layer_types=["full_attention"] * 2, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            **_SIZES,
        ),
    ),
    Tiny(
        "granitemoe",
        GraniteMoeConfig(
            num_hidden_layers=2, num_local_experts=5, num_experts_per_tok=2, embedding_multiplier=12.0,
            residual_multiplier=0.22, attention_multiplier=0.05, logits_scaling=8.0, rms_norm_eps=1e-2, **_SIZES,
        ),
    ),
]  # fmt: skip

_DELTA_NETS = _SIZES | {"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 6}
_DELTA_NETS |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
_DELTA_NETS_MOE = _DELTA_NETS | {"num_experts": 6, "num_experts_per_tok": 2}
_DELTA_NETS_MOE |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 32}

DELTA_NETS = [
    Tiny("qwen3_5", Qwen3_5TextConfig(num_hidden_layers=4, **_DELTA_NETS)),
    Tiny(
        "qwen3_5_uneven",
        Qwen3_5TextConfig(
            num_hidden_layers=3, layer_types=["full_attention", "linear_attention", "linear_attention"],
            tie_word_embeddings=True, attention_bias=True, rms_norm_eps=1e-3,
            **_DELTA_NETS
            | {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3}
            | {"linear_key_head_dim": 32, "linear_value_head_dim": 48},
        ),
    ),
    Tiny("qwen3_5_moe", Qwen3_5MoeTextConfig(num_hidden_layers=4, **_DELTA_NETS_MOE)),
    Tiny("qwen3_next", Qwen3NextConfig(num_hidden_layers=4, **_DELTA_NETS_MOE)),
    Tiny(
        "qwen3_next_mixed",
        Qwen3NextConfig(
            num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"],
            mlp_only_layers=[0], norm_topk_prob=False, **_DELTA_NETS_MOE | {"linear_value_head_dim": 32},
        ),
    ),
]  # fmt: skip

OLMO_HYBRID = [
    Tiny(
        "olmo_hybrid",
        OlmoHybridConfig(
            num_hidden_layers=5, rope_parameters={"rope_type": "default", "rope_theta": None}, linear_key_head_dim=16,
            **_SIZES,
        ),
    ),
    Tiny(
        "olmo_hybrid_rotated",
        OlmoHybridConfig(
            num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=16, linear_value_head_dim=48,
            linear_allow_neg_eigval=False, attention_bias=True, tie_word_embeddings=True, linear_conv_kernel_dim=3,
            rope_parameters={"rope_type": "default", "rope_theta": 5_000.0}, **_SIZES,
        ),
    ),
]  # fmt: skip

# Attention of these families has output gates and partial rotation.
GATED = [
    Tiny(
        "qwen3_5_gates",
        Qwen3_5TextConfig(
            num_hidden_layers=2, layer_types=["full_attention"] * 2, attention_bias=True,
            **_DELTA_NETS | {"head_dim": 256},
        ),
    ),
    Tiny(
        "qwen3_next_gates",
        Qwen3NextConfig(num_hidden_layers=2, layer_types=["full_attention"] * 2, **_DELTA_NETS_MOE),
    ),
]  # fmt: skip

RECURRENT = [
    Tiny(
        "lfm2",
        Lfm2Config(
            num_hidden_layers=4, full_attn_idxs=[1, 3], block_multiple_of=32, block_ffn_dim_multiplier=1.3, **_SIZES
        ),
    ),
    Tiny(
        "lfm2_biases",
        Lfm2Config(
            num_hidden_layers=3, layer_types=["conv", "conv", "full_attention"], conv_bias=True, conv_L_cache=4,
            block_auto_adjust_ff_dim=False, tie_word_embeddings=False, norm_eps=1e-3, **_SIZES,
        ),
    ),
    Tiny(
        "lfm2_moe",
        Lfm2MoeConfig(
            num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2, num_dense_layers=1, num_experts=6,
            num_experts_per_tok=2, moe_intermediate_size=64, **_SIZES,
        ),
    ),
    Tiny(
        "lfm2_moe_plain",
        Lfm2MoeConfig(
            num_hidden_layers=2, layer_types=["full_attention", "conv"], num_dense_layers=0, num_experts=5,
            num_experts_per_tok=3, moe_intermediate_size=64, use_expert_bias=False, norm_topk_prob=False,
            routed_scaling_factor=1.8, **_SIZES,
        ),
    ),
]  # fmt: skip

_GEMMA4: dict[str, Any] = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 9, "final_logit_softcapping": 30.0}
_GEMMA4 |= {"hidden_size_per_layer_input": 0}
GEMMA4 = [
    Tiny(
        "gemma4",
        Gemma4TextConfig(
            num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, attention_k_eq_v=True,
            num_global_key_value_heads=1, **_SIZES | _GEMMA4,
        ),
    ),
    Tiny(
        "gemma4_unified",
        Gemma4UnifiedTextConfig(
            num_hidden_layers=3, layer_types=["sliding_attention", "full_attention", "full_attention"],
            attention_k_eq_v=True, num_global_key_value_heads=1, head_dim=16, global_head_dim=32, sliding_window=9,
            **_SIZES,
        ),
    ),
    Tiny(
        "gemma4_per_layer",
        Gemma4TextConfig(
            num_hidden_layers=5, layer_types=["sliding_attention", "full_attention"] * 2 + ["full_attention"],
            num_kv_shared_layers=2, use_double_wide_mlp=True, vocab_size_per_layer_input=96,
            **_SIZES | _GEMMA4 | {"hidden_size_per_layer_input": 24},
        ),
    ),
    Tiny(
        "gemma4_moe",
        Gemma4TextConfig(
            num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, attention_k_eq_v=True,
            num_global_key_value_heads=1, enable_moe_block=True, num_experts=6, top_k_experts=2,
            moe_intermediate_size=48, **_SIZES | _GEMMA4,
        ),
    ),
    Tiny(
        "gemma4_shared",
        Gemma4TextConfig(
            num_hidden_layers=7, layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2
            + ["full_attention"], num_kv_shared_layers=4, use_double_wide_mlp=True, **_SIZES | _GEMMA4,
        ),
    ),
]  # fmt: skip

_MELLUM: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "head_dim": 32}
MELLUM = [
    Tiny(
        "mellum",
        MellumConfig(
            num_hidden_layers=4, sliding_window=9, **_SIZES | _MELLUM,
            layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
            rope_parameters={
                "full_attention": _yarn(),
                "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
            },
        ),
    ),
    Tiny(
        "mellum_mixed",
        MellumConfig(
            num_hidden_layers=3, attention_bias=True, norm_topk_prob=False, tie_word_embeddings=True,
            mlp_layer_types=["sparse", "dense", "sparse"], **_SIZES | _MELLUM,
        ),
    ),
]  # fmt: skip

_MINISTRAL3 = _yarn(mscale=1.0, mscale_all_dim=1.0, beta_fast=32.0, beta_slow=1.0)
MINISTRAL3 = [
    Tiny(
        "ministral3",
        Ministral3Config(
            num_hidden_layers=3, head_dim=32, **_SIZES,
            rope_parameters=_MINISTRAL3 | {"original_max_position_embeddings": 16, "factor": 16.0}
            | {"llama_4_scaling_beta": 0.3},
        ),
    ),
    Tiny(
        "ministral3_windows",
        Ministral3Config(
            num_hidden_layers=2, head_dim=16, sliding_window=9, tie_word_embeddings=True, **_SIZES,
            rope_parameters=_MINISTRAL3 | {"llama_4_scaling_beta": 0.5},
        ),
    ),
]  # fmt: skip

_LAGUNA: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "head_dim": 32}
_LAGUNA |= {"shared_expert_intermediate_size": 96}
LAGUNA = [
    Tiny(
        "laguna",
        LagunaConfig(
            num_hidden_layers=4, sliding_window=9, moe_routed_scaling_factor=2.5, **_SIZES | _LAGUNA,
            layer_types=["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"],
            num_attention_heads_per_layer=[4, 6, 6, 6],
            rope_parameters={
                "full_attention": _yarn(partial_rotary_factor=0.5),
                "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0, "partial_rotary_factor": 1.0},
            },
        ),
    ),
    Tiny(
        "laguna_elements",
        LagunaConfig(
            num_hidden_layers=3, gating="per-element", attention_bias=False, tie_word_embeddings=True,
            mlp_layer_types=["dense", "dense", "sparse"], **_SIZES | _LAGUNA,
        ),
    ),
]  # fmt: skip

MUSE_GLIMMER = [
    Tiny(
        "muse_glimmer",
        MuseGlimmerTextConfig(
            num_hidden_layers=5, head_dim=32, sliding_window=9, output_multiplier=0.7, qk_scale_factor=1.5,
            post_norm_eps=1e-3, **_SIZES,
        ),
    ),
    Tiny(
        "muse_glimmer_listed",
        MuseGlimmerTextConfig(
            num_hidden_layers=2, head_dim=16, layer_types=["full_attention", "sliding_attention"], sliding_window=7,
            layer_rope_theta=[10_000.0, 0], final_logit_softcapping=3.0, **_SIZES,
        ),
    ),
]  # fmt: skip

_LLAMA4 = _SIZES | {"head_dim": 32, "num_local_experts": 6, "intermediate_size_mlp": 128}
LLAMA4 = [
    Tiny("llama4", Llama4TextConfig(num_hidden_layers=5, rope_parameters=_LLAMA3_ROPE, **_LLAMA4)),
    Tiny(
        "llama4_chunks",
        Llama4TextConfig(
            num_hidden_layers=4, attention_chunk_size=23, floor_scale=16, attn_scale=0.5, interleave_moe_layer_step=2,
            no_rope_layers=[1, 0, 1, 1], **_LLAMA4,
        ),
    ),
    Tiny(
        "llama4_plain",
        Llama4TextConfig(
            num_hidden_layers=3, use_qk_norm=False, attn_temperature_tuning=False, attention_chunk_size=None,
            moe_layers=[0, 1], num_experts_per_tok=2, attention_bias=True, tie_word_embeddings=True,
            **_LLAMA4 | {"head_dim": 16},
        ),
    ),
]  # fmt: skip

LONGROPE = Tiny(
    "phi3_longrope",
    Phi3Config(
        num_hidden_layers=2,
        tie_word_embeddings=True,
        original_max_position_embeddings=64,
        rope_parameters=_longrope(6),
        **_SIZES,
    ),
)
TINY += [*RECURRENT, *DELTA_NETS, *GATED, *GEMMA4, *MELLUM, *MINISTRAL3, *LAGUNA, *MUSE_GLIMMER, *LLAMA4, *OLMO_HYBRID]
ONE_EACH = list({tiny.config.model_type: tiny for tiny in reversed(TINY)}.values())[::-1]  # a model of each family
ON_CPUS = [
    *RECURRENT,
    *DELTA_NETS,
    *GATED,
    *GEMMA4,
    *MINISTRAL3,
    *LAGUNA,
    *MUSE_GLIMMER,
    *LLAMA4,
    *OLMO_HYBRID,
]  # GPUs refuse these
DENSE = [tiny for tiny in TINY if not tiny.has_experts and tiny not in ON_CPUS]
ONE_EACH_DENSE = [tiny for tiny in ONE_EACH if tiny in DENSE]


class TextOfMuseGlimmer(MuseGlimmerTextModel):
    """The text model with its head. In transformers, it is a part of the multimodal model."""

    def __init__(self, config: MuseGlimmerTextConfig) -> None:
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


def _divide_taps(config: OlmoHybridConfig, path: Path) -> None:
    """Divide the taps as in published files, by q, k and v. transformers writes three equal parts."""
    tensors, keys = load_file(path), config.linear_num_key_heads * config.linear_key_head_dim
    for at in sorted({name.partition("q_conv1d")[0] for name in tensors if "q_conv1d" in name}):
        names = [f"{at}{which}_conv1d.weight" for which in "qkv"]
        whole = torch.cat([tensors[name] for name in names])
        parts = whole.split([keys, keys, len(whole) - 2 * keys])
        tensors |= {name: part.contiguous() for name, part in zip(names, parts, strict=True)}
    save_file(tensors, path, {"format": "pt"})


def make_tiny(tiny: Tiny, folder: Path) -> Any:
    """Make a `transformers` model with random float32 weights and norms, save it to the folder, and return it."""
    torch.manual_seed(0)
    if isinstance(tiny.config, MuseGlimmerTextConfig):
        tiny.config._attn_implementation = "eager"
        model: Any = TextOfMuseGlimmer(tiny.config).float().eval()
    else:
        model = AutoModelForCausalLM.from_config(tiny.config, attn_implementation="eager").float().eval()
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
