"""A family as data: values that its configs leave out, settings that its code reads, and special rules for layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infer.compute.operands.architecture import Norms, TextInputs
from infer.compute.operands.feed_forwards import Activation
from infer.compute.operands.mixers import GateCurve, QKNorm, QueryScale, Recurrent
from infer.models.families.config_values import Config
from infer.models.families.experts import ExpertRules
from infer.models.families.layer_kinds import Kinds, all_full, all_rotated
from infer.models.families.ropes import usual_rope
from infer.models.families.widths import ACTIVATIONS, intermediate_size

# Settings that only some families' code reads, although every config may have them.
OPTIONAL = frozenset(
    {"attention_bias", "attention_output_bias", "mlp_bias", "attn_logit_softcapping", "final_logit_softcapping"}
    | {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "output_multiplier", "logits_scaling"}
    | {"query_pre_attn_scalar", "attention_k_eq_v", "num_kv_shared_layers", "num_attention_heads_per_layer"}
    | {"hidden_size_per_layer_input"}
)
# For these settings null is a value; for all others it means absent.
OFF_IF_NULL = frozenset(
    {"head_dim", "num_key_value_heads", "sliding_window", "attention_chunk_size", "rope_theta"}
    | {"attn_logit_softcapping", "final_logit_softcapping"}
    | {"block_ffn_dim_multiplier", "hidden_size_per_layer_input"}
)
ATTENTION_BIAS = frozenset({"attention_bias", "attention_output_bias"})
GPT2_NAMES = {"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
GPT2_NAMES |= {"n_inner": "intermediate_size", "n_positions": "max_position_embeddings"}
GPT2_NAMES |= {"layer_norm_epsilon": "rms_norm_eps", "activation_function": "hidden_act"}
QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_PRE_NORMS = Norms(before=True, after=False)


@dataclass(frozen=True)
class Family:
    # For settings that a config does not have, not even as null. A family without one for `partial_rotary_factor` does
    # not read it, although other engines read it for every family.
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)  # these replace the values of a config
    reads: frozenset[str] = frozenset()  # the optional settings that the code reads
    # Its names of settings → the usual names, one or several.
    renamed: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    refuses: Mapping[str, Any] = field(default_factory=dict)  # settings that must have this value, if they are given
    layer_kinds: Kinds = all_full
    # Kind → mixer; other kinds attend.
    recurrent: Mapping[str, Callable[[Config], Recurrent]] = field(default_factory=dict)
    rotated_layers: Callable[[Config, int], Sequence[bool]] = all_rotated
    rope_settings: Callable[[Config, str], Config] = usual_rope
    activation_name: str = "hidden_act"
    activations: Mapping[str, Activation] = field(default_factory=lambda: ACTIVATIONS)  # by their names in configs
    is_gated: bool = True  # its MLP
    dense_size: Callable[[Config], int] = intermediate_size
    scales_embedding: bool | str = False  # by the square root of hidden_size; a name: if this setting is true
    has_embedding_norm: bool = False
    text_inputs: Callable[[Config], TextInputs] | None = None
    is_encoder: bool = False
    norms: Norms | Callable[[Config], Norms] = _PRE_NORMS
    norms_by_kind: Mapping[str, Norms] = field(default_factory=dict)  # for kinds of layers with other norms
    experts: ExpertRules | None = None
    is_sparse: Callable[[Config, int], bool] = lambda config, index: True  # True if a layer has experts
    qk_norm: QKNorm | None = None
    # Changes the settings of attention for layers of a kind, which rotate or not.
    of_kind: Callable[[Config, str, bool], Config] = lambda config, kind, is_rotated: config
    has_v_norm: bool = False
    has_scale: bool = False  # of each layer
    qk_norm_setting: str | None = None  # the setting that decides if there are such norms
    query_scale: Callable[[Config], QueryScale | None] = lambda config: None
    has_sinks: bool = False
    # The curve of gates, and True for one gate per head. None: attention has no gates.
    gates: Callable[[Config], tuple[GateCurve, bool]] | None = None

    @property
    def renamed_pairs(self) -> list[tuple[str, str]]:
        """Its names of settings, each with a usual name."""
        pairs = ((own, (usual,) if isinstance(usual, str) else usual) for own, usual in self.renamed.items())
        return [(own, name) for own, usual in pairs for name in usual]


def usual_defaults(max_positions: int, *, eps: float = 1e-6, **others: Any) -> dict[str, Any]:
    """Return the defaults that nearly all families have, with others."""
    return {"max_position_embeddings": max_positions, "rms_norm_eps": eps, "hidden_act": "silu", **others}
