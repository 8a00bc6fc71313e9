"""The table of families: one row of data for each, by its name in configs.

Defaults are those of Hugging Face's configuration classes, except for sizes, which a config must give.
"""

from dataclasses import replace
from typing import Any

from infer.compute.operands.architecture import Norms
from infer.models.families.centred_families import CENTRED
from infer.models.families.experts import (
    gemma4_experts,
    hunyuan_experts,
    is_sparse_in_lfm2,
    is_sparse_in_llama4,
    is_sparse_in_qwen,
    lfm2_experts,
    llama4_experts,
    qwen_experts,
)
from infer.models.families.family import ATTENTION_BIAS, QWEN_WINDOWS, Family, usual_defaults
from infer.models.families.gemma import gemma3_rope, gemma4_of_kind, gemma4_per_layer_input, gemma4_rope
from infer.models.families.granite import GRANITE
from infer.models.families.heads import (
    llama4_of_kind,
    llama4_scale,
    muse_of_kind,
    sigmoid_of_heads,
    sigmoid_without_bias,
)
from infer.models.families.layer_kinds import (
    CONVOLUTION,
    LINEAR,
    all_windowed,
    all_windowed_but_every,
    chunked_where_rotated,
    convolutions_but_listed,
    exaone4_kinds,
    gemma4_kinds,
    last_share_keys,
    lfm3_kinds,
    linear_but_every_fourth_or_the_last,
    linear_but_every_nth,
    llama4_rotated,
    rotated_but_every_nth,
    rotated_unless_theta_is_null,
    rotated_where_windowed,
    rotated_with_a_theta,
    windowed_but_every_fourth_from_the_first,
    windowed_but_every_nth_from_the_end,
    windowed_from_a_layer_on,
    windowed_unless_listed,
    windowed_where_not_rotated,
)
from infer.models.families.recurrent import gated_delta_net, olmo_hybrid_delta_net, short_conv
from infer.models.families.ropes import (
    cwm_rope,
    hunyuan_rope,
    lfm3_rope,
    llama4_rope,
    ministral3_rope,
    ministral3_scale,
    nanochat_rope,
    olmo3_rope,
    phi3_rope,
    theta_rope,
)
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
    reads=ATTENTION_BIAS | {"final_logit_softcapping", "attention_k_eq_v"},
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

_MUSE_GLIMMER = Family(
    usual_defaults(131_072, eps=1e-5, head_dim=128, num_key_value_heads=2, sliding_window=2048)
    | {"hidden_activation": "silu", "final_logit_softcapping": 20.0, "qk_scale_factor": 3.87}
    | {"output_multiplier": 0.19611613513818404, "post_norm_eps": 1e-8},
    reads=frozenset({"attention_bias", "final_logit_softcapping", "output_multiplier"}),
    layer_kinds=windowed_but_every_nth_from_the_end,
    rotated_layers=rotated_with_a_theta,
    activation_name="hidden_activation",
    has_embedding_norm=True,
    norms=Norms(after=True),
    eps_after_setting="post_norm_eps",
    qk_norm="head_unweighted",
    of_kind=muse_of_kind,
    has_gate=True,
    gates=sigmoid_without_bias,
)

_LLAMA4 = Family(
    usual_defaults(131_072, eps=1e-5, head_dim=128, num_key_value_heads=8, num_experts_per_tok=1)
    | {"attention_chunk_size": 8192, "use_qk_norm": True}
    | {"attn_temperature_tuning": True, "attn_scale": 0.1, "floor_scale": 8192},
    reads=ATTENTION_BIAS,
    layer_kinds=chunked_where_rotated,
    rotated_layers=llama4_rotated,
    rope_settings=llama4_rope,
    dense_size=llama4_size,
    experts=llama4_experts,
    is_sparse=is_sparse_in_llama4,
    qk_norm="head_unweighted",
    qk_norm_setting="use_qk_norm",
    of_kind=llama4_of_kind,
    query_scale=llama4_scale,
)

_LFM2 = Family(
    usual_defaults(128_000, eps=1e-5, num_key_value_heads=8, tie_word_embeddings=True, conv_L_cache=3),
    fixed={"hidden_act": "silu"},
    renamed={"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"},
    layer_kinds=convolutions_but_listed,
    recurrent={CONVOLUTION: short_conv},
    rope_settings=theta_rope(1_000_000.0),
    qk_norm="head",
)

_DELTA_NETS = usual_defaults(32_768, head_dim=256, partial_rotary_factor=0.25) | {"linear_conv_kernel_dim": 4}
_DELTA_NETS |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
_DELTA_NETS |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
_QWEN35 = Family(
    _DELTA_NETS | {"num_key_value_heads": 4},
    reads=ATTENTION_BIAS,
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

_LLAMA = Family(usual_defaults(2048), reads=ATTENTION_BIAS | {"mlp_bias"})

_GEMMA2 = Family(
    _GEMMA
    | {"num_key_value_heads": 4, "max_position_embeddings": 8192}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    reads=ATTENTION_BIAS | {"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"},
    layer_kinds=all_windowed_but_every(2),
    activation_name="hidden_activation",
    scales_embedding=True,
    norms=Norms(after=True),
)

_GLM4 = Family(
    usual_defaults(131_072, eps=1.5625e-7, num_key_value_heads=2, head_dim=128)
    | {"partial_rotary_factor": 0.5, "attention_bias": True},
    fixed={"attention_output_bias": False},
    reads=frozenset({"attention_bias"}),
    rotates_partly=True,
    norms=Norms(after=True),
)


_HUNYUAN = Family(
    usual_defaults(2048, eps=1e-5), reads=ATTENTION_BIAS, rope_settings=hunyuan_rope, qk_norm="head_after"
)

FAMILIES: dict[str, Family] = {
    **SPARSE,
    **CENTRED,
    **GRANITE,
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
        rope_settings=theta_rope(500_000.0),
    ),
    "cwm": Family(
        usual_defaults(131_072, eps=1e-5, num_key_value_heads=8, head_dim=128, sliding_window=8192),
        reads=frozenset({"mlp_bias"}),
        layer_kinds=windowed_but_every_fourth_from_the_first,
        rope_settings=cwm_rope,
    ),
    "mistral": Family(usual_defaults(131_072, num_key_value_heads=8, sliding_window=4096), layer_kinds=all_windowed),
    "ministral": Family(
        usual_defaults(131_072, num_key_value_heads=8, sliding_window=4096), layer_kinds=windowed_unless_listed
    ),
    "ministral3": Family(
        usual_defaults(262_144, eps=1e-5, num_key_value_heads=8, head_dim=128),
        layer_kinds=all_windowed,
        rope_settings=ministral3_rope,
        query_scale=ministral3_scale,
    ),
    "qwen2": Family(
        usual_defaults(32_768, **QWEN_WINDOWS),
        fixed={"attention_bias": True, "attention_output_bias": False},
        layer_kinds=windowed_from_a_layer_on,
    ),
    "qwen3": Family(
        usual_defaults(32_768, head_dim=128, **QWEN_WINDOWS),
        reads=ATTENTION_BIAS,
        layer_kinds=windowed_from_a_layer_on,
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
        usual_defaults(4096, eps=1e-5, original_max_position_embeddings=4096),
        layer_kinds=all_windowed,
        rope_settings=phi3_rope,
        rotates_partly=True,
    ),
    "smollm3": Family(
        usual_defaults(32_768, num_key_value_heads=4, tie_word_embeddings=True),
        reads=ATTENTION_BIAS | {"mlp_bias"},
        layer_kinds=windowed_where_not_rotated,
        rotated_layers=rotated_but_every_nth,
        rope_settings=theta_rope(2_000_000.0),
    ),
    "olmo2": Family(
        usual_defaults(2048, eps=1e-5),
        reads=ATTENTION_BIAS,
        norms=Norms(before=False, after=True),
        qk_norm="all",
    ),
    "olmo3": Family(
        usual_defaults(2048, eps=1e-5, sliding_window=4096),
        reads=ATTENTION_BIAS,
        layer_kinds=all_windowed_but_every(4),
        rope_settings=olmo3_rope,
        norms=Norms(before=False, after=True),
        qk_norm="all",
    ),
    "olmo_hybrid": Family(
        usual_defaults(65_536, linear_conv_kernel_dim=4, linear_allow_neg_eigval=True),
        reads=ATTENTION_BIAS,
        layer_kinds=linear_but_every_fourth_or_the_last,
        recurrent={LINEAR: olmo_hybrid_delta_net},
        rotated_layers=rotated_unless_theta_is_null,
        norms=Norms(before=False, after=True),
        norms_by_kind={LINEAR: Norms()},
        qk_norm="all",
    ),
    "exaone4": Family(
        usual_defaults(2048, eps=1e-5, num_key_value_heads=32, sliding_window=4096),
        layer_kinds=exaone4_kinds,
        rotated_layers=rotated_where_windowed,
        norms=Norms(before=False, after=True),
        qk_norm="head",
    ),
    "arcee": replace(_LLAMA, defaults=usual_defaults(4096, eps=1e-5, hidden_act="relu2"), is_gated=False),
    "nanochat": Family(
        usual_defaults(2048, hidden_act="relu2", final_logit_softcapping=15.0),
        reads=ATTENTION_BIAS | {"final_logit_softcapping"},
        rope_settings=nanochat_rope,
        is_gated=False,
        has_embedding_norm=True,
        norms=Norms(have_weight=False),
        qk_norm="head_unweighted",  # after the rotation, which keeps the length of a head
    ),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": replace(
        _HUNYUAN, defaults={**_HUNYUAN.defaults, "num_experts": 1, "moe_topk": 1}, experts=hunyuan_experts
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
        rope_settings=theta_rope(500_000.0),
    ),
    "helium": Family(
        usual_defaults(4096, eps=1e-8, num_key_value_heads=20, head_dim=128),
        fixed={"attention_output_bias": False},
        reads=frozenset({"attention_bias", "mlp_bias"}),
        rope_settings=theta_rope(100_000.0),
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
    "lfm3": replace(
        _LFM2,
        defaults={**_LFM2.defaults, "num_key_value_heads": 4, "head_dim": 128, "conv_L_cache": 7}
        | {"sliding_window": 256},
        reads=ATTENTION_BIAS,
        layer_kinds=lfm3_kinds,
        rope_settings=lfm3_rope,
        rotates_partly=True,
        norms=Norms(after=True),
        has_gate=True,
        gates=sigmoid_of_heads,
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
