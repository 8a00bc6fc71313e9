"""Families whose layers have experts, as rows of the table."""

from dataclasses import replace

from infer.compute.operands.architecture import Norms
from infer.models.families.experts import (
    afmoe_experts,
    ernie_experts,
    every_layer_is_sparse,
    flint_experts,
    glm_experts,
    gpt_oss_experts,
    granite_experts,
    is_sparse_as_listed,
    is_sparse_in_ernie,
    is_sparse_in_exaone,
    is_sparse_in_glm,
    is_sparse_in_laguna,
    is_sparse_in_lfm2,
    is_sparse_in_qwen,
    kolibri_experts,
    laguna_experts,
    minimax_experts,
    mixtral_experts,
    olmoe_experts,
    qwen_experts,
)
from infer.models.families.family import ATTENTION_BIAS, QWEN_WINDOWS, Family, usual_defaults
from infer.models.families.heads import laguna_gates, laguna_heads, sigmoid_without_bias
from infer.models.families.layer_kinds import (
    all_windowed,
    all_windowed_but_every,
    exaone4_kinds,
    flint_kinds,
    full_unless_given,
    rotated_unless_listed_without_theta,
    rotated_where,
    rotated_where_listed_as_windowed,
    rotated_where_windowed,
    windowed_but_every_fourth_from_the_first,
    windowed_from_a_layer_on,
)
from infer.models.families.ropes import (
    gpt_oss_rope,
    granite_swa_rope,
    laguna_rope,
    minimax_rope,
    rope_by_kind,
    theta_rope,
)

_GLM4_MOE = Family(
    usual_defaults(131_072, eps=1e-5, num_key_value_heads=8, num_experts_per_tok=8, moe_intermediate_size=1408)
    | {"n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "partial_rotary_factor": 0.5},
    fixed={"attention_output_bias": False},
    reads=frozenset({"attention_bias"}),
    rotates_partly=True,
    qk_norm="head",
    qk_norm_setting="use_qk_norm",
    experts=glm_experts,
    is_sparse=is_sparse_in_glm,
)

_GRANITE_MOE = Family(
    usual_defaults(2048, num_experts_per_tok=2, attention_multiplier=1.0),
    reads=ATTENTION_BIAS | {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"},
    experts=granite_experts,
)

_OLMOE = Family(
    usual_defaults(4096, eps=1e-5, num_experts_per_tok=8),
    reads=ATTENTION_BIAS,
    qk_norm="all",
    experts=olmoe_experts,
)

SPARSE: dict[str, Family] = {
    "qwen3_moe": Family(
        usual_defaults(32_768, num_key_value_heads=4, num_experts_per_tok=8, moe_intermediate_size=768)
        | {"head_dim": 128, **QWEN_WINDOWS},
        reads=ATTENTION_BIAS,
        layer_kinds=windowed_from_a_layer_on,
        qk_norm="head",
        experts=qwen_experts,
        is_sparse=is_sparse_in_qwen,
    ),
    "mellum": Family(
        usual_defaults(131_072, num_key_value_heads=4, num_experts_per_tok=8, moe_intermediate_size=896)
        | {"head_dim": 128, "sliding_window": 1024, "norm_topk_prob": True},
        reads=ATTENTION_BIAS,
        layer_kinds=full_unless_given,
        rope_settings=rope_by_kind(500_000.0, 10_000.0),
        rotates_partly=True,
        qk_norm="head",
        experts=qwen_experts,
        is_sparse=is_sparse_as_listed,
    ),
    "laguna": Family(
        usual_defaults(131_072, num_key_value_heads=8, num_experts_per_tok=8, moe_intermediate_size=512)
        | {"shared_expert_intermediate_size": 512, "head_dim": 128, "sliding_window": 512},
        reads=ATTENTION_BIAS,
        layer_kinds=full_unless_given,
        rope_settings=laguna_rope,
        rotates_partly=True,
        qk_norm="head",
        experts=laguna_experts,
        is_sparse=is_sparse_in_laguna,
        has_gate=True,
        gates=laguna_gates,
        num_heads=laguna_heads,
    ),
    "qwen2_moe": Family(
        usual_defaults(32_768, num_key_value_heads=16, num_experts_per_tok=4, moe_intermediate_size=1408)
        | {"shared_expert_intermediate_size": 5632, **QWEN_WINDOWS},
        fixed={"attention_bias": True, "attention_output_bias": False},
        layer_kinds=windowed_from_a_layer_on,
        experts=qwen_experts,
        is_sparse=is_sparse_in_qwen,
    ),
    "mixtral": Family(
        usual_defaults(131_072, eps=1e-5, num_key_value_heads=8, num_experts_per_tok=2),
        layer_kinds=all_windowed,
        rope_settings=theta_rope(1_000_000.0),
        experts=mixtral_experts,
    ),
    "olmoe": _OLMOE,
    "flex_olmo": replace(
        _OLMOE,
        defaults=usual_defaults(4096, num_experts_per_tok=5, num_experts=7),
        rope_settings=theta_rope(500_000.0),
        norms=Norms(before=False, after=True),
    ),
    "glm4_moe": _GLM4_MOE,
    "solar_open": replace(
        _GLM4_MOE,
        defaults={**_GLM4_MOE.defaults, "moe_intermediate_size": 1280, "head_dim": 128, "partial_rotary_factor": 1.0},
        rope_settings=theta_rope(1_000_000.0),
        qk_norm=None,
        qk_norm_setting=None,
        is_sparse=every_layer_is_sparse,
    ),
    "sarvam_moe": replace(
        _GLM4_MOE,
        defaults=usual_defaults(131_072, num_key_value_heads=4, num_experts_per_tok=6, moe_intermediate_size=1024)
        | {"n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
        | {"head_dim": 64, "use_qk_norm": True},
        renamed={"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
        | {"use_qkv_bias": "attention_bias"},
        rope_settings=theta_rope(8_000_000.0),
    ),
    "hy_v3": Family(
        usual_defaults(131_072, eps=1e-5, num_key_value_heads=8, head_dim=128, num_experts_per_tok=8)
        | {"n_shared_experts": 1, "moe_intermediate_size": 1536, "routed_scaling_factor": 2.826},
        fixed={"norm_topk_prob": True},
        reads=ATTENTION_BIAS,
        renamed={"router_scaling_factor": "routed_scaling_factor", "num_shared_experts": "n_shared_experts"},
        refuses={"mlp_bias": False},
        rope_settings=theta_rope(11_158_840.0),
        qk_norm="head",
        experts=glm_experts,
        is_sparse=is_sparse_in_exaone,
    ),
    "flint": Family(
        usual_defaults(262_144, num_key_value_heads=4, head_dim=128, sliding_window=513, num_experts_per_tok=6)
        | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 1024}
        | {"norm_topk_prob": True, "mlp_only_layers": [0, 1]},
        reads=ATTENTION_BIAS,
        layer_kinds=flint_kinds,
        rotated_layers=rotated_where(flint_kinds),
        qk_norm="head",
        experts=flint_experts,
        is_sparse=is_sparse_in_qwen,
        has_sinks=True,
    ),
    "kolibri1": Family(
        usual_defaults(262_144, num_key_value_heads=4, head_dim=128, sliding_window=513, num_experts_per_tok=6)
        | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
        layer_kinds=all_windowed_but_every(5),
        rotated_layers=rotated_where(all_windowed_but_every(5)),
        norms=Norms(after=True),
        qk_norm="head",
        experts=kolibri_experts,
    ),
    "dots1": Family(
        usual_defaults(2048, num_key_value_heads=32, sliding_window=4096, max_window_layers=62)
        | {"moe_intermediate_size": 1408, "first_k_dense_replace": 0},
        fixed={"use_sliding_window": True},
        reads=ATTENTION_BIAS,
        layer_kinds=windowed_from_a_layer_on,
        qk_norm="head",
        experts=glm_experts,
        is_sparse=is_sparse_in_glm,
    ),
    "minimax_m2": Family(
        usual_defaults(196_608, num_key_value_heads=8, head_dim=128, num_experts_per_tok=8),
        rope_settings=minimax_rope,
        rotates_partly=True,
        qk_norm="all",
        experts=minimax_experts,
    ),
    "afmoe": Family(
        usual_defaults(16_384, eps=1e-5, head_dim=128, num_experts_per_tok=6, moe_intermediate_size=1408)
        | {"num_experts": 64, "num_shared_experts": 2, "num_dense_layers": 1, "sliding_window": 1024},
        reads=ATTENTION_BIAS,
        renamed={"global_attn_every_n_layers": "sliding_window_pattern"},
        layer_kinds=all_windowed_but_every(4),
        rotated_layers=rotated_where_listed_as_windowed,
        scales_embedding="mup_enabled",
        norms=Norms(after=True),
        qk_norm="head",
        experts=afmoe_experts,
        is_sparse=is_sparse_in_lfm2,
        has_gate=True,
        gates=sigmoid_without_bias,
    ),
    "exaone_moe": Family(
        usual_defaults(2048, eps=1e-5, num_key_value_heads=32, sliding_window=4096, num_experts_per_tok=8)
        | {"n_routed_experts": 64, "moe_intermediate_size": 1024, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        renamed={"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
        layer_kinds=exaone4_kinds,
        rotated_layers=rotated_where_windowed,
        qk_norm="head",
        experts=glm_experts,
        is_sparse=is_sparse_in_exaone,
    ),
    "ernie4_5_moe": Family(
        usual_defaults(131_072, eps=1e-5, num_key_value_heads=4, tie_word_embeddings=True)
        | {"moe_intermediate_size": 1536, "num_experts_per_tok": 6, "num_experts": 64, "moe_num_shared_experts": 2},
        renamed={"moe_k": "num_experts_per_tok", "moe_num_experts": "num_experts"},
        rope_settings=theta_rope(500_000.0),
        experts=ernie_experts,
        is_sparse=is_sparse_in_ernie,
    ),
    "gpt_oss": Family(
        usual_defaults(131_072, eps=1e-5, num_key_value_heads=8, num_experts_per_tok=4, head_dim=64)
        | {"sliding_window": 128, "attention_bias": True},
        reads=ATTENTION_BIAS,
        layer_kinds=all_windowed_but_every(2),
        rope_settings=gpt_oss_rope,
        experts=gpt_oss_experts,
        has_sinks=True,
    ),
    "granitemoe": _GRANITE_MOE,
    "granitemoe_swa": replace(
        _GRANITE_MOE,
        defaults={**_GRANITE_MOE.defaults, "sliding_window": 128},
        layer_kinds=windowed_but_every_fourth_from_the_first,
        rotated_layers=rotated_unless_listed_without_theta,
        rope_settings=granite_swa_rope,
        has_sinks=True,
    ),
    "granitemoeshared": _GRANITE_MOE,
}
