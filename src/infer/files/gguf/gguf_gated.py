"""Settings of Laguna and Muse-Glimmer in GGUF's metadata, under the names of Hugging Face's config."""

from collections.abc import Mapping
from typing import Any

from infer.errors import UnsupportedModelError
from infer.files.gguf.gguf_values import GGUFValues, rotated_share

_PERIOD = 4  # layers, a constant of llama.cpp: the first layer of each period has no window
_SIGMOID = 2  # a value of `expert_gating_func`


def laguna_settings(values: GGUFValues, config: Mapping[str, Any]) -> dict[str, Any]:
    num_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    found: dict[str, Any] = {
        "layer_types": _laguna_kinds(values, config),
        "gating": _gating(values, config["num_attention_heads"]),
        "moe_routed_scaling_factor": values.real("expert_weights_scale", default=1.0),
    }
    num_dense = values.get("leading_dense_block_count", 0)
    if type(num_dense) is not int or not 0 <= num_dense <= num_layers:
        values.fail("leading_dense_block_count", f"expected an integer from 0 to {num_layers}, got {num_dense!r:.60}")
    found["mlp_layer_types"] = ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense)
    if isinstance(heads := values.get("attention.head_count"), list):
        found["num_attention_heads_per_layer"] = heads
    for key, only in (("expert_gating_func", _SIGMOID), ("expert_weights_norm", True)):
        if values.get(key, only) != only:
            name = values.file.path.name
            raise UnsupportedModelError(f"{name}: {key} {values.get(key)!r:.60} is not supported for laguna: {only}")
    partial = config.get("partial_rotary_factor", 1.0)
    ropes = {"full_attention": {"rope_theta": config["rope_theta"], "partial_rotary_factor": partial}}
    if "sliding_attention" in found["layer_types"]:
        theta = values.real("rope.freq_base_swa", default=config["rope_theta"])
        share = rotated_share(values.count("rope.dimension_count_swa"), head_dim)
        ropes["sliding_attention"] = {"rope_theta": theta, "partial_rotary_factor": share}
    return found | {"rope_parameters": ropes}


def _laguna_kinds(values: GGUFValues, config: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer. A pattern that is a number is a period, which begins with full attention."""
    num_layers, period = config["num_hidden_layers"], values.get("attention.sliding_window_pattern", _PERIOD)
    if config["sliding_window"] is None:
        return ["full_attention"] * num_layers
    if isinstance(period, list):
        return list(config["layer_types"])
    return ["sliding_attention" if index % period else "full_attention" for index in range(num_layers)]


def _gating(values: GGUFValues, num_heads: int) -> str:
    """Return the unit that has one gate, found from the number of gates in the first layer."""
    gate = values.file.tensors.get("blk.0.attn_gate.weight")
    return "per-head" if gate is not None and gate.shape[:1] == (num_heads,) else "per-element"


def muse_glimmer_settings(values: GGUFValues, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a file: the norms of q and k have weights, which include the scale of queries."""
    theta, kinds = values.real("rope.freq_base_swa", default=config["rope_theta"]), config["layer_types"]
    return {
        "qk_norm_has_weights": True,
        "qk_scale_factor": 1.0,
        "output_multiplier": values.real("logit_scale"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "rope_theta": theta,
        "layer_rope_theta": [theta if kind == "sliding_attention" else 0.0 for kind in kinds],
    }
