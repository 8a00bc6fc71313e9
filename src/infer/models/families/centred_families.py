"""Families whose norms subtract the mean (LayerNorm), as rows of the table. Some attend in parallel to the MLP."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from infer.compute.operands.architecture import Norms, TextInputs
from infer.models.families import layer_kinds as kinds
from infer.models.families import ropes
from infer.models.families.config_values import Config, count, flag
from infer.models.families.family import ATTENTION_BIAS, GPT2_NAMES, Family, usual_defaults
from infer.models.families.widths import four_times_hidden


def _parallel_if_set(norms: Literal["one", "two"]) -> Callable[[Config], Norms]:
    """Return a reader of the norms of layers whose parts are parallel if `use_parallel_residual` is true."""
    usual = Norms(are_centred=True, have_bias=True)
    return lambda config: replace(usual, parallel=norms if flag(config, "use_parallel_residual") else None)


_PLAIN = Family(
    usual_defaults(8192, eps=1e-5, hidden_act="relu2", attention_bias=True, mlp_bias=True),
    reads=ATTENTION_BIAS | {"mlp_bias"},
    renamed={"layer_norm_eps": "rms_norm_eps"},
    is_gated=False,
    norms=Norms(are_centred=True, have_bias=True),
)

_COHERE = Family(
    usual_defaults(8192, eps=1e-5, tie_word_embeddings=True, output_multiplier=0.0625),
    reads=ATTENTION_BIAS | {"output_multiplier"},
    renamed={"layer_norm_eps": "rms_norm_eps", "logit_scale": "output_multiplier"},
    rope_settings=ropes.theta_rope(500_000.0),
    norms=Norms(are_centred=True, parallel="one"),
    refuses={"use_qk_norm": False},
)

CENTRED: dict[str, Family] = {
    "cohere": _COHERE,
    "cohere2": replace(
        _COHERE,
        defaults={**_COHERE.defaults, "sliding_window": 4096},
        layer_kinds=kinds.all_windowed_but_every(4),
        rotated_layers=kinds.rotated_where_listed_as_windowed,
        rope_settings=ropes.usual_rope,
    ),
    "phi": replace(
        _PLAIN,
        defaults=usual_defaults(2048, eps=1e-5, hidden_act="gelu_new", partial_rotary_factor=0.5),
        fixed={"attention_bias": True, "mlp_bias": True, "lm_head_bias": True},
        norms=Norms(are_centred=True, have_bias=True, parallel="one"),
        refuses={"qk_layernorm": False, "tie_word_embeddings": False},
    ),
    "starcoder2": replace(
        _PLAIN,
        defaults={**_PLAIN.defaults, "max_position_embeddings": 4096, "num_key_value_heads": 2}
        | {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        renamed={"norm_epsilon": "rms_norm_eps", "use_bias": ("attention_bias", "mlp_bias")},
        layer_kinds=kinds.all_windowed,
    ),
    "stablelm": Family(
        usual_defaults(4096, eps=1e-5, partial_rotary_factor=0.25),
        fixed={"attention_output_bias": False},
        reads=ATTENTION_BIAS,
        renamed={"layer_norm_eps": "rms_norm_eps", "use_qkv_bias": "attention_bias"},
        norms=_parallel_if_set("one"),
        qk_norm="head_centred",
        qk_norm_setting="qk_layernorm",
    ),
    "jais2": _PLAIN,
    "nemotron": replace(
        _PLAIN,
        defaults=usual_defaults(4096, eps=1e-5, hidden_act="relu2", partial_rotary_factor=0.5),
        renamed={"norm_eps": "rms_norm_eps"},
    ),
    "olmo": Family(
        usual_defaults(2048) | {"rms_norm_eps": 1e-5},
        fixed={"rms_norm_eps": 1e-5},
        reads=ATTENTION_BIAS,
        norms=Norms(are_centred=True, have_weight=False),
        refuses={"clip_qkv": None},
    ),
    "gpt2": replace(
        _PLAIN,
        defaults=usual_defaults(1024, eps=1e-5, hidden_act="gelu_new", tie_word_embeddings=True),
        fixed={"attention_bias": True, "mlp_bias": True, "num_key_value_heads": None},
        renamed=GPT2_NAMES,
        dense_size=four_times_hidden,
        text_inputs=lambda config: TextInputs(count(config, "max_position_embeddings"), has_norm=False),
        rotated_layers=kinds.none_rotated,
        refuses={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    ),
    "gpt_neox": replace(
        _PLAIN,
        defaults=usual_defaults(2048, eps=1e-5, hidden_act="gelu", attention_bias=True, partial_rotary_factor=0.25)
        | {"use_parallel_residual": True},
        fixed={"mlp_bias": True, "num_key_value_heads": None},
        renamed={**_PLAIN.renamed, "rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
        norms=_parallel_if_set("two"),
    ),
}
