"""The table of families: one row of data for each, by its name in configs.

Defaults are those of Hugging Face's configuration classes, except for sizes, which a config must give.
"""

from dataclasses import replace
from typing import Any

from infer.compute.operands.architecture import Norms
from infer.models.families import heads, ropes
from infer.models.families import layer_kinds as kinds
from infer.models.families.centred_families import CENTRED
from infer.models.families.config_values import positive
from infer.models.families.experts import (
    NUM_SHARED,
    SHARED_SIZE,
    ExpertRules,
    is_sparse_after_the_first,
    is_sparse_in_llama4,
    is_sparse_in_qwen,
)
from infer.models.families.family import ATTENTION_BIAS, QWEN_WINDOWS, Family, usual_defaults
from infer.models.families.recurrent import gated_delta_net, olmo_hybrid_delta_net, short_conv
from infer.models.families.sparse_families import SPARSE
from infer.models.families.widths import ACTIVATIONS, lfm2_size, llama4_size

_GEMMA: dict[str, Any] = {"rms_norm_eps": 1e-6, "head_dim": 256, "tie_word_embeddings": True}
_GEMMA |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096}

_GEMMA3 = Family(
    # The published configs of multimodal models leave out most of their common values.
    defaults=_GEMMA
    | {"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
    | {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072},
    # attn_logit_softcapping is a setting that its code has but never uses.
    reads=ATTENTION_BIAS | {"query_pre_attn_scalar", "final_logit_softcapping", "use_bidirectional_attention"},
    layer_kinds=kinds.all_windowed_but_every(6),
    rope_settings=ropes.gemma3_rope,
    activation_name="hidden_activation",
    scales_embedding=True,
    norms=Norms(after=True),
    qk_norm="head",
)

_GEMMA4 = replace(
    _GEMMA3,
    defaults={**_GEMMA3.defaults, "num_hidden_layers": 30, "vocab_size": 262_144, "sliding_window": 512}
    | {"global_head_dim": 512, "hidden_size_per_layer_input": 256, "partial_rotary_factor": 1.0},
    fixed={"query_pre_attn_scalar": 1.0},
    renamed={"top_k_experts": "num_experts_per_tok"},
    reads=ATTENTION_BIAS
    | {"final_logit_softcapping", "attention_k_eq_v"}
    | {"hidden_size_per_layer_input", "num_kv_shared_layers"},
    experts=ExpertRules(is_normalized=True, shared="intermediate_size", has_norms=True, setting="enable_moe_block"),
    layer_kinds=kinds.gemma4_kinds,
    of_kind=heads.gemma4_of_kind,
    rope_settings=ropes.gemma4_rope,
    has_v_norm=True,
    has_scale=True,
)

_GEMMA4_UNIFIED = replace(
    _GEMMA4,
    defaults={**_GEMMA4.defaults, "sliding_window": 1024, "max_position_embeddings": 262_144}
    | {"hidden_size_per_layer_input": None, "enable_moe_block": False},
)

_MUSE_GLIMMER = Family(
    usual_defaults(131_072, eps=1e-5, head_dim=128, num_key_value_heads=2, sliding_window=2048)
    | {"hidden_activation": "silu", "final_logit_softcapping": 20.0, "qk_scale_factor": 3.87}
    | {"output_multiplier": 0.19611613513818404, "post_norm_eps": 1e-8},
    reads=frozenset({"attention_bias", "final_logit_softcapping", "output_multiplier"}),
    layer_kinds=kinds.windowed_but_every_nth_from_the_end,
    rotated_layers=kinds.rotated_with_a_theta,
    activation_name="hidden_activation",
    has_embedding_norm=True,
    norms=lambda config: Norms(after=True, eps_after=positive(config, "post_norm_eps")),
    qk_norm="head_unweighted",
    of_kind=heads.muse_of_kind,
    gates=heads.sigmoid_without_bias,
)

_LLAMA4 = Family(
    usual_defaults(131_072, eps=1e-5, head_dim=128, num_key_value_heads=8, num_experts_per_tok=1)
    | {"attention_chunk_size": 8192, "use_qk_norm": True}
    | {"attn_temperature_tuning": True, "attn_scale": 0.1, "floor_scale": 8192},
    fixed={NUM_SHARED: 1},
    reads=ATTENTION_BIAS,
    layer_kinds=kinds.chunked_where_rotated,
    rotated_layers=kinds.llama4_rotated,
    rope_settings=ropes.llama4_rope,
    dense_size=llama4_size,
    experts=ExpertRules(
        "sigmoid_of_chosen",
        is_normalized=False,
        weighs_inputs=True,
        size="intermediate_size",
        shared=NUM_SHARED,
    ),
    is_sparse=is_sparse_in_llama4,
    qk_norm="head_unweighted",
    qk_norm_setting="use_qk_norm",
    of_kind=heads.llama4_of_kind,
    query_scale=heads.llama4_scale,
)

_LFM2 = Family(
    usual_defaults(128_000, eps=1e-5, num_key_value_heads=8, tie_word_embeddings=True, conv_L_cache=3),
    fixed={"hidden_act": "silu"},
    renamed={"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"},
    refuses={"sliding_window": None},
    layer_kinds=kinds.convolutions_but_listed,
    recurrent={kinds.CONVOLUTION: short_conv},
    rope_settings=ropes.theta_rope(1_000_000.0),
    qk_norm="head",
)

_DELTA_NETS = usual_defaults(32_768, head_dim=256, partial_rotary_factor=0.25) | {"linear_conv_kernel_dim": 4}
_DELTA_NETS |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
_DELTA_NETS |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
_QWEN35 = Family(
    _DELTA_NETS | {"num_key_value_heads": 4},
    reads=ATTENTION_BIAS,
    layer_kinds=kinds.linear_but_every_nth,
    recurrent={kinds.LINEAR: gated_delta_net},
    qk_norm="head",
    gates=heads.sigmoid_of_elements,
)
_QWEN35_MOE = replace(
    _QWEN35,
    defaults=_DELTA_NETS
    | {"num_key_value_heads": 2, "num_experts_per_tok": 8}
    | {"moe_intermediate_size": 512, SHARED_SIZE: 512},
    fixed={"norm_topk_prob": True},
    experts=ExpertRules(shared=SHARED_SIZE, has_shared_gate=True),
)

_LLAMA = Family(usual_defaults(2048), reads=ATTENTION_BIAS | {"mlp_bias"})

_GEMMA2 = Family(
    _GEMMA
    | {"num_key_value_heads": 4, "max_position_embeddings": 8192}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    reads=ATTENTION_BIAS | {"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"},
    layer_kinds=kinds.all_windowed_but_every(2),
    activation_name="hidden_activation",
    scales_embedding=True,
    norms=Norms(after=True),
)

_GLM4 = Family(
    usual_defaults(131_072, eps=1.5625e-7, num_key_value_heads=2, head_dim=128)
    | {"partial_rotary_factor": 0.5, "attention_bias": True},
    fixed={"attention_output_bias": False},
    reads=frozenset({"attention_bias"}),
    norms=Norms(after=True),
)


_OLMO2 = Family(
    usual_defaults(2048, eps=1e-5),
    reads=ATTENTION_BIAS,
    norms=Norms(before=False, after=True),
    qk_norm="all",
)

_HUNYUAN = Family(
    usual_defaults(2048, eps=1e-5), reads=ATTENTION_BIAS, rope_settings=ropes.hunyuan_rope, qk_norm="head_after"
)

_GRANITE = Family(
    usual_defaults(2048, attention_multiplier=1.0),
    reads=ATTENTION_BIAS
    | {"mlp_bias", "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"},
)

FAMILIES: dict[str, Family] = {
    **SPARSE,
    **CENTRED,
    "llama": _LLAMA,
    "llama_bidirec": replace(_LLAMA, fixed={"is_causal": False}),
    "internlm3": replace(
        _LLAMA,
        defaults=usual_defaults(32_768, eps=1e-5, num_key_value_heads=2, head_dim=128),
        renamed={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    ),
    "iquestcoder": replace(_LLAMA, defaults=usual_defaults(131_072, eps=1e-5, num_key_value_heads=8, head_dim=128)),
    "exaone": replace(
        _LLAMA,
        defaults=usual_defaults(4096, eps=1e-5, num_key_value_heads=8),
        renamed={"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps"}
        | {"activation_function": "hidden_act"},
        rope_settings=ropes.theta_rope(500_000.0),
    ),
    "cwm": Family(
        usual_defaults(131_072, eps=1e-5, num_key_value_heads=8, head_dim=128, sliding_window=8192),
        reads=frozenset({"mlp_bias"}),
        layer_kinds=kinds.windowed_but_every_fourth_from_the_first,
        rope_settings=ropes.cwm_rope,
    ),
    "mistral": Family(
        usual_defaults(131_072, num_key_value_heads=8, sliding_window=4096), layer_kinds=kinds.all_windowed
    ),
    "ministral": Family(
        usual_defaults(131_072, num_key_value_heads=8, sliding_window=4096), layer_kinds=kinds.windowed_unless_listed
    ),
    "ministral3": Family(
        usual_defaults(262_144, eps=1e-5, num_key_value_heads=8, head_dim=128),
        layer_kinds=kinds.all_windowed,
        rope_settings=ropes.ministral3_rope,
        query_scale=ropes.ministral3_scale,
    ),
    "qwen2": Family(
        usual_defaults(32_768, **QWEN_WINDOWS),
        fixed={"attention_bias": True, "attention_output_bias": False},
        layer_kinds=kinds.windowed_from_a_layer_on,
    ),
    "qwen3": Family(
        usual_defaults(32_768, head_dim=128, **QWEN_WINDOWS),
        reads=ATTENTION_BIAS,
        layer_kinds=kinds.windowed_from_a_layer_on,
        qk_norm="head",
    ),
    "gemma": Family(
        usual_defaults(8192, head_dim=256, num_key_value_heads=16, tie_word_embeddings=True)
        | {"hidden_act": "gelu_pytorch_tanh"},
        reads=ATTENTION_BIAS,
        activations={**ACTIVATIONS, "gelu": "gelu_tanh"},  # the first configs say "gelu"
        scales_embedding=True,
    ),
    "gemma2": _GEMMA2,
    "vaultgemma": replace(_GEMMA2, norms=Norms()),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "gemma4_text": _GEMMA4,
    "gemma4": _GEMMA4,
    "gemma4_unified_text": _GEMMA4_UNIFIED,
    "gemma4_unified": _GEMMA4_UNIFIED,
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "muse_glimmer": _MUSE_GLIMMER,
    "muse_glimmer_text": _MUSE_GLIMMER,
    "phi3": Family(
        usual_defaults(4096, eps=1e-5, original_max_position_embeddings=4096, partial_rotary_factor=1.0),
        layer_kinds=kinds.all_windowed,
        rope_settings=ropes.phi3_rope,
    ),
    "smollm3": Family(
        usual_defaults(32_768, num_key_value_heads=4, tie_word_embeddings=True),
        reads=ATTENTION_BIAS | {"mlp_bias"},
        layer_kinds=kinds.windowed_where_not_rotated,
        rotated_layers=kinds.rotated_but_every_nth,
        rope_settings=ropes.theta_rope(2_000_000.0),
    ),
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2,
        defaults={**_OLMO2.defaults, "sliding_window": 4096},
        layer_kinds=kinds.all_windowed_but_every(4),
        rope_settings=ropes.olmo3_rope,
    ),
    "olmo_hybrid": replace(
        _OLMO2,
        defaults=usual_defaults(65_536, linear_conv_kernel_dim=4, linear_allow_neg_eigval=True),
        layer_kinds=kinds.linear_but_every_fourth_or_the_last,
        recurrent={kinds.LINEAR: olmo_hybrid_delta_net},
        rotated_layers=kinds.rotated_unless_theta_is_null,
        norms_by_kind={kinds.LINEAR: Norms()},
    ),
    "exaone4": Family(
        usual_defaults(2048, eps=1e-5, num_key_value_heads=32, sliding_window=4096),
        layer_kinds=kinds.exaone4_kinds,
        rotated_layers=kinds.rotated_where_windowed,
        norms=Norms(before=False, after=True),
        qk_norm="head",
    ),
    "arcee": replace(_LLAMA, defaults=usual_defaults(4096, eps=1e-5, hidden_act="relu2"), is_gated=False),
    "apertus": Family(
        usual_defaults(65_536, eps=1e-5, hidden_act="xielu"),
        reads=ATTENTION_BIAS,
        rope_settings=ropes.apertus_rope,
        activations={**ACTIVATIONS, "xielu": "xielu"},
        is_gated=False,
        qk_norm="head",
    ),
    "nanochat": Family(
        usual_defaults(2048, hidden_act="relu2", final_logit_softcapping=15.0),
        reads=ATTENTION_BIAS | {"final_logit_softcapping"},
        rope_settings=ropes.nanochat_rope,
        is_gated=False,
        has_embedding_norm=True,
        norms=Norms(have_weight=False),
        qk_norm="head_unweighted",  # after the rotation, which keeps the length of a head
    ),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": replace(
        _HUNYUAN,
        defaults={**_HUNYUAN.defaults, "num_experts": 1, "num_experts_per_tok": 1},
        fixed={NUM_SHARED: 1},
        renamed={"moe_topk": "num_experts_per_tok"},
        experts=ExpertRules(is_normalized=True, size="intermediate_size", shared=NUM_SHARED),
    ),
    "granite": _GRANITE,
    "hyperclovax": replace(
        _GRANITE,
        defaults=usual_defaults(2048),
        reads=_GRANITE.reads - {"logits_scaling"} | {"output_multiplier"},
        renamed={"logits_scaling": "output_multiplier"},
        norms=lambda config: Norms(after=True, eps_after=positive(config, "rms_norm_eps")),
        refuses={"use_post_norm": True},
    ),
    "granite_swa": replace(
        _GRANITE,
        defaults={**_GRANITE.defaults, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "sliding_window": 128}
        | {"num_key_value_heads": 4, "max_position_embeddings": 8192},
        layer_kinds=kinds.windowed_but_every_fourth_from_the_first,
        rotated_layers=kinds.rotated_unless_listed_without_theta,
        rope_settings=ropes.granite_swa_rope,
        has_sinks=True,
    ),
    "seed_oss": Family(
        usual_defaults(524_288, num_key_value_heads=8, head_dim=128)
        | {"attention_bias": True, "attention_output_bias": False},
        reads=ATTENTION_BIAS | {"mlp_bias"},
        renamed={"attention_out_bias": "attention_output_bias"},
    ),
    "glm": replace(_GLM4, norms=Norms()),
    "glm4": _GLM4,
    "ernie4_5": Family(
        usual_defaults(131_072, eps=1e-5, num_key_value_heads=2, head_dim=128, tie_word_embeddings=True),
        reads=ATTENTION_BIAS | {"mlp_bias"},
        renamed={"use_bias": ("attention_bias", "mlp_bias")},
        rope_settings=ropes.theta_rope(500_000.0),
    ),
    "helium": Family(
        usual_defaults(4096, eps=1e-8, num_key_value_heads=20, head_dim=128),
        fixed={"attention_output_bias": False},
        reads=frozenset({"attention_bias", "mlp_bias"}),
        rope_settings=ropes.theta_rope(100_000.0),
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
        | {"num_experts_per_tok": 4, "moe_intermediate_size": 1792, "first_k_dense_replace": 2}
        | {"use_expert_bias": True, "norm_topk_prob": True},
        renamed={**_LFM2.renamed, "num_dense_layers": "first_k_dense_replace"},
        experts=ExpertRules("sigmoid", floor=1e-6, is_scaled=True, has_correction="use_expert_bias"),
        is_sparse=is_sparse_after_the_first,
    ),
    "lfm3": replace(
        _LFM2,
        defaults={**_LFM2.defaults, "num_key_value_heads": 4, "head_dim": 128, "conv_L_cache": 7}
        | {"sliding_window": 256, "partial_rotary_factor": 1.0},
        reads=ATTENTION_BIAS,
        layer_kinds=kinds.lfm3_kinds,
        rope_settings=ropes.lfm3_rope,
        norms=Norms(after=True),
        gates=heads.sigmoid_of_heads,
        refuses={"use_sandwich_norm": True, "use_attention_gate": True},
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
