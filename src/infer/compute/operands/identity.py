"""The identity of an architecture: a text of its values, under names that never change. Loads no torch.

Saved sessions, prefixes on disk and `system_fingerprint` digest this text. So a class or an attribute may be renamed,
moved or reordered, and a new attribute with its default changes no text. Only another value does.

If an attribute is renamed, its old name here gets the new attribute. A new attribute gets a name in `later`.
"""

from collections.abc import Mapping
from dataclasses import fields
from types import NoneType
from typing import Any, NamedTuple

from infer.compute.operands.architecture import Architecture, Layer, Norms, TextInputs
from infer.compute.operands.feed_forwards import Dense, Experts, PerLayerInput, Router
from infer.compute.operands.mixers import Attention, GatedDeltaNet, LongRope, QueryScale, Rope, ShortConv


class Names(NamedTuple):
    """The names of a class and of its attributes: each table maps a name to the attribute that has the value.

    A text always has the names in `first`, in this order, because saved files have them. Names in `later` follow if
    their values differ from the defaults.
    """

    kind: str
    first: Mapping[str, str]
    later: Mapping[str, str] = {}


def _same(names: str) -> dict[str, str]:
    """Return a table of names that are also the attributes."""
    return {name: name for name in names.split()}


_PLAIN = (NoneType, bool, int, float, str)  # their `repr` never changes
NAMES: dict[type, Names] = {
    Architecture: Names(
        "Architecture",
        _same("family vocab_size hidden_size layers norm_eps max_positions embedding_scale has_embedding_norm")
        | _same("logit_scale logit_softcap tied_embeddings text_inputs has_last_norm"),
        later=_same("text_limit has_head_bias has_state_input"),
    ),
    TextInputs: Names("TextInputs", _same("num_positions num_types"), later=_same("has_norm")),
    Layer: Names("Layer", _same("mixer feed_forward norms per_layer_input has_scale")),
    Norms: Names(
        "Norms",
        _same("before after of_sum eps_after are_centred have_bias skip_mixer"),
        later=_same("have_weight parallel"),
    ),
    Attention: Names(
        "Attention",
        _same("num_heads num_kv_heads head_dim rope scale window chunk softcap has_qkv_bias has_output_bias qk_norm")
        | _same("has_sinks has_gate gate_curve are_gates_of_heads has_v_norm are_values_keys shared_from query_scale")
        | _same("is_causal"),
    ),
    Rope: Names("Rope", _same("theta dim frequency_factors attention_factor long")),
    LongRope: Names("LongRope", _same("beyond frequency_factors growth")),
    QueryScale: Names("QueryScale", _same("growth period offset")),
    ShortConv: Names("ShortConv", _same("num_channels num_taps has_bias")),
    GatedDeltaNet: Names(
        "GatedDeltaNet",
        _same("num_key_heads num_value_heads key_dim value_dim num_taps is_decay_log are_heads_tiled are_parts_apart")
        | _same("beta_scale norm_eps"),
    ),
    Dense: Names("Dense", _same("intermediate_size activation has_bias is_gated")),
    Experts: Names(
        "Experts",
        _same("router intermediate_size activation has_bias shared_size has_shared_gate has_norms"),
    ),
    Router: Names(
        "Router",
        _same("num_experts num_chosen scores is_normalized floor scale has_bias has_correction has_expert_scales")
        | _same("weighs_inputs"),
    ),
    PerLayerInput: Names("PerLayerInput", _same("dim activation")),
}


def identity_of(value: Any) -> str:
    """Return the identity of an architecture, or of a value in it.

    Raises TypeError for a value whose text could change, such as an enum, a function or a class without names.
    """
    if type(value) is tuple:
        return f"({', '.join(map(identity_of, value))}{',' if len(value) == 1 else ''})"
    if type(value) in _PLAIN:
        return repr(value)
    if (names := NAMES.get(type(value))) is None:
        raise TypeError(f"a {type(value).__name__} has no identity: give it names in {__name__}")
    return f"{names.kind}({', '.join(_named_values(value, names))})"


def _named_values(part: Any, names: Names) -> list[str]:
    """Return `name=value` for each name whose value is written."""
    defaults = {field.name: field.default for field in fields(part)}
    written = dict(names.first)
    for name, attribute in names.later.items():
        if getattr(part, attribute) != defaults[attribute]:
            written[name] = attribute
    return [f"{name}={identity_of(getattr(part, attribute))}" for name, attribute in written.items()]
