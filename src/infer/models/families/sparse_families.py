"""Families whose layers have experts, as rows of the table."""

from dataclasses import replace

from infer.compute.operands.architecture import Norms
from infer.models.families import heads, ropes
from infer.models.families import layer_kinds as kinds
from infer.models.families.experts import (
    NUM_SHARED,
    SHARED_SIZE,
    ExpertRules,
    is_sparse_after_the_first,
    is_sparse_as_listed,
    is_sparse_in_ernie,
    is_sparse_in_qwen,
)
from infer.models.families.family import ATTENTION_BIAS, Family, usual_defaults

_QWEN = ExpertRules(shared=SHARED_SIZE, has_shared_gate=True)

# Experts are chosen by a corrected sigmoid, and the shared expert has no gate.
_OF_CORRECTED_SCORES = Family(
    usual_defaults(2048),
    reads=ATTENTION_BIAS,
    refuses={"n_group": 1, "topk_group": 1},
    qk_norm="head",
    experts=ExpertRules("sigmoid", floor=1e-20, is_scaled=True, has_correction=True, shared=NUM_SHARED),
    is_sparse=is_sparse_after_the_first,
)

_GLM4_MOE = replace(
    _OF_CORRECTED_SCORES,
    defaults=usual_defaults(131_072, eps=1e-5, num_key_value_heads=8, num_experts_per_tok=8, moe_intermediate_size=1408)
    | {"num_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "partial_rotary_factor": 0.5},
    fixed={"attention_output_bias": False},
    reads=frozenset({"attention_bias"}),
    renamed={"n_routed_experts": "num_experts"},
    qk_norm_setting="use_qk_norm",
)

_GRANITE_MOE = Family(
    usual_defaults(2048, num_experts_per_tok=2, attention_multiplier=1.0),
    reads=ATTENTION_BIAS | {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"},
    renamed={"shared_intermediate_size": SHARED_SIZE},
    experts=ExpertRules("softmax_of_chosen", is_normalized=False, size="intermediate_size", shared=SHARED_SIZE),
)

_OLMOE = Family(
    usual_defaults(4096, eps=1e-5, num_experts_per_tok=8),
    reads=ATTENTION_BIAS,
    refuses={"clip_qkv": None},
    qk_norm="all",
    experts=ExpertRules(size="intermediate_size"),
)

SPARSE: dict[str, Family] = {
    "qwen3_moe": Family(
        usual_defaults(32_768, num_key_value_heads=4, num_experts_per_tok=8, moe_intermediate_size=768)
        | {"head_dim": 128},
        reads=ATTENTION_BIAS,
        refuses={"use_sliding_window": False},
        qk_norm="head",
        experts=_QWEN,
        is_sparse=is_sparse_in_qwen,
    ),
    "mellum": Family(
        usual_defaults(131_072, num_key_value_heads=4, num_experts_per_tok=8, moe_intermediate_size=896)
        | {"head_dim": 128, "sliding_window": 1024, "norm_topk_prob": True, "partial_rotary_factor": 1.0},
        fixed={"first_k_dense_replace": 0},
        reads=ATTENTION_BIAS,
        layer_kinds=kinds.full_unless_listed,
        rope_settings=ropes.rope_by_kind(500_000.0, 10_000.0),
        qk_norm="head",
        experts=_QWEN,
        is_sparse=is_sparse_as_listed,
    ),
    "laguna": Family(
        usual_defaults(131_072, num_key_value_heads=8, num_experts_per_tok=8, moe_intermediate_size=512)
        | {SHARED_SIZE: 512, "head_dim": 128, "sliding_window": 512, "partial_rotary_factor": None},
        fixed={"norm_topk_prob": True, "first_k_dense_replace": 1},
        reads=ATTENTION_BIAS | {"num_attention_heads_per_layer"},
        renamed={"moe_routed_scaling_factor": "routed_scaling_factor"},
        refuses={"moe_apply_router_weight_on_input": False, "moe_router_logit_softcapping": 0.0},
        layer_kinds=kinds.full_unless_listed,
        rope_settings=ropes.laguna_rope,
        qk_norm="head",
        experts=ExpertRules("sigmoid", is_scaled=True, has_correction=True, shared=SHARED_SIZE),
        is_sparse=is_sparse_as_listed,
        gates=heads.laguna_gates,
    ),
    "qwen2_moe": Family(
        usual_defaults(32_768, num_key_value_heads=16, num_experts_per_tok=4, moe_intermediate_size=1408)
        | {SHARED_SIZE: 5632},
        fixed={"attention_bias": True, "attention_output_bias": False},
        refuses={"use_sliding_window": False},
        experts=_QWEN,
        is_sparse=is_sparse_in_qwen,
    ),
    "mixtral": Family(
        usual_defaults(131_072, eps=1e-5, num_key_value_heads=8, num_experts_per_tok=2),
        layer_kinds=kinds.all_windowed,
        rope_settings=ropes.theta_rope(1_000_000.0),
        experts=ExpertRules(is_normalized=True, size="intermediate_size"),
    ),
    "olmoe": _OLMOE,
    "flex_olmo": replace(
        _OLMOE,
        defaults=usual_defaults(4096, num_experts_per_tok=5, num_experts=7),
        rope_settings=ropes.theta_rope(500_000.0),
        norms=Norms(before=False, after=True),
    ),
    "glm4_moe": _GLM4_MOE,
    "solar_open": replace(
        _GLM4_MOE,
        defaults={**_GLM4_MOE.defaults, "moe_intermediate_size": 1280, "head_dim": 128, "partial_rotary_factor": 1.0},
        rope_settings=ropes.theta_rope(1_000_000.0),
        qk_norm=None,
        qk_norm_setting=None,
        is_sparse=lambda config, index: True,
    ),
    "sarvam_moe": replace(
        _GLM4_MOE,
        defaults=usual_defaults(131_072, num_key_value_heads=4, num_experts_per_tok=6, moe_intermediate_size=1024)
        | {"num_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
        | {"head_dim": 64, "use_qk_norm": True, "partial_rotary_factor": 1.0},
        renamed={**_GLM4_MOE.renamed, "num_shared_experts": NUM_SHARED, "use_qkv_bias": "attention_bias"},
        rope_settings=ropes.theta_rope(8_000_000.0),
    ),
    "hy_v3": replace(
        _OF_CORRECTED_SCORES,
        defaults=usual_defaults(131_072, eps=1e-5, num_key_value_heads=8, head_dim=128, num_experts_per_tok=8)
        | {"n_shared_experts": 1, "moe_intermediate_size": 1536, "routed_scaling_factor": 2.826},
        fixed={"norm_topk_prob": True},
        renamed={"router_scaling_factor": "routed_scaling_factor", "num_shared_experts": NUM_SHARED},
        refuses={"mlp_bias": False, "n_group": 1, "topk_group": 1},
        rope_settings=ropes.theta_rope(11_158_840.0),
        is_sparse=is_sparse_as_listed,
    ),
    "flint": Family(
        usual_defaults(262_144, num_key_value_heads=4, head_dim=128, sliding_window=513, num_experts_per_tok=6)
        | {"moe_intermediate_size": 512, SHARED_SIZE: 1024}
        | {"norm_topk_prob": True, "mlp_only_layers": [0, 1]},
        reads=ATTENTION_BIAS,
        layer_kinds=kinds.flint_kinds,
        rotated_layers=kinds.rotated_where(kinds.flint_kinds),
        qk_norm="head",
        experts=ExpertRules("sigmoid", shared=SHARED_SIZE),
        is_sparse=is_sparse_in_qwen,
        has_sinks=True,
    ),
    "kolibri1": Family(
        usual_defaults(262_144, num_key_value_heads=4, head_dim=128, sliding_window=513, num_experts_per_tok=6)
        | {"moe_intermediate_size": 512, SHARED_SIZE: 512},
        layer_kinds=kinds.all_windowed_but_every(5),
        rotated_layers=kinds.rotated_where(kinds.all_windowed_but_every(5)),
        norms=Norms(after=True),
        qk_norm="head",
        experts=ExpertRules("sigmoid_of_chosen", has_correction=True, shared=SHARED_SIZE),
    ),
    "dots1": replace(
        _OF_CORRECTED_SCORES,
        defaults=usual_defaults(2048, num_key_value_heads=32, sliding_window=4096, max_window_layers=62)
        | {"moe_intermediate_size": 1408, "first_k_dense_replace": 0, "n_shared_experts": 1},
        fixed={"use_sliding_window": True},
        renamed={"n_routed_experts": "num_experts"},
        layer_kinds=kinds.windowed_from_a_layer_on,
    ),
    "minimax_m2": Family(
        usual_defaults(196_608, num_key_value_heads=8, head_dim=128, num_experts_per_tok=8, partial_rotary_factor=1.0),
        rope_settings=ropes.minimax_rope,
        qk_norm="all",
        experts=ExpertRules("sigmoid", is_normalized=True, size="intermediate_size", has_correction=True),
    ),
    "afmoe": replace(
        _OF_CORRECTED_SCORES,
        defaults=usual_defaults(16_384, eps=1e-5, head_dim=128, num_experts_per_tok=6, moe_intermediate_size=1408)
        | {"num_experts": 64, "n_shared_experts": 2, "sliding_window": 1024},
        fixed={"norm_topk_prob": True},
        renamed={"global_attn_every_n_layers": "sliding_window_pattern", "num_shared_experts": NUM_SHARED}
        | {"route_scale": "routed_scaling_factor", "num_dense_layers": "first_k_dense_replace"},
        layer_kinds=kinds.all_windowed_but_every(4),
        rotated_layers=kinds.rotated_where_listed_as_windowed,
        scales_embedding="mup_enabled",
        norms=Norms(after=True),
        gates=heads.sigmoid_without_bias,
    ),
    "exaone_moe": replace(
        _OF_CORRECTED_SCORES,
        defaults=usual_defaults(2048, eps=1e-5, num_key_value_heads=32, sliding_window=4096, num_experts_per_tok=8)
        | {"num_experts": 64, "moe_intermediate_size": 1024, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
        | {"n_shared_experts": 1},
        reads=frozenset(),
        renamed={"num_shared_experts": NUM_SHARED},
        layer_kinds=kinds.exaone4_kinds,
        rotated_layers=kinds.rotated_where_windowed,
        is_sparse=is_sparse_as_listed,
    ),
    "ernie4_5_moe": Family(
        usual_defaults(131_072, eps=1e-5, num_key_value_heads=4, tie_word_embeddings=True)
        | {"moe_intermediate_size": 1536, "num_experts_per_tok": 6, "num_experts": 64, "n_shared_experts": 2}
        | {"interleave_moe_layer_step": 1},
        renamed={"moe_k": "num_experts_per_tok", "moe_num_experts": "num_experts"}
        | {"moe_num_shared_experts": NUM_SHARED, "moe_layer_start_index": "first_k_dense_replace"}
        | {"moe_layer_interval": "interleave_moe_layer_step"},
        refuses={"use_bias": False},
        rope_settings=ropes.theta_rope(500_000.0),
        experts=ExpertRules(is_normalized=True, has_correction=True, shared=NUM_SHARED),
        is_sparse=is_sparse_in_ernie,
    ),
    "gpt_oss": Family(
        usual_defaults(131_072, eps=1e-5, num_key_value_heads=8, num_experts_per_tok=4, head_dim=64)
        | {"sliding_window": 128, "attention_bias": True},
        reads=ATTENTION_BIAS,
        layer_kinds=kinds.all_windowed_but_every(2),
        rope_settings=ropes.gpt_oss_rope,
        refuses={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        experts=ExpertRules(
            "softmax_of_chosen",
            is_normalized=False,
            size="intermediate_size",
            has_bias=True,
            activation="clamped_swiglu",
        ),
        has_sinks=True,
    ),
    "granitemoe": _GRANITE_MOE,
    "granitemoe_swa": replace(
        _GRANITE_MOE,
        defaults={**_GRANITE_MOE.defaults, "sliding_window": 128},
        layer_kinds=kinds.windowed_but_every_fourth_from_the_first,
        rotated_layers=kinds.rotated_unless_listed_without_theta,
        rope_settings=ropes.granite_swa_rope,
        has_sinks=True,
    ),
    "granitemoeshared": _GRANITE_MOE,
}
