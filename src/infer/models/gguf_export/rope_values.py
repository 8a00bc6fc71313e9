"""Rope settings of a config → GGUF's keys, and the vectors of factors that files have as tensors."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from infer.compute.operands.architecture import Architecture
from infer.compute.operands.mixers import Attention, Rope
from infer.models.families import FAMILIES
from infer.models.families.config_values import Config
from infer.models.families.layer_kinds import FULL, SLIDING
from infer.models.gguf_export.values import Value

_ORIGINAL = "original_max_position_embeddings"
_NO_ROTATION = 1e30  # llama.cpp's factor for a pair that does not rotate
_MROPE_SECTIONS = [11, 11, 10, 0]  # Qwen3.5's sections, which llama.cpp requires
_WITH_MROPE = frozenset({"qwen35", "qwen35moe"})
_YARN = {
    "attention_factor": "rope.scaling.yarn_attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "llama_4_scaling_beta": "attention.temperature_scale",
}


class RopeValues(NamedTuple):
    values: dict[str, Value]  # keys under the architecture's name
    factors: dict[str, tuple[float, ...]]  # by tensor name


def rope_values(name: str, config: Config, architecture: Architecture) -> RopeValues:
    """Return the keys of the ropes of a decoder, and its tensors of factors.

    Args:
        name: The architecture's name in GGUF.
        config: The config as its family reads it.
        architecture: The network of this config.
    """
    wide = _rope(architecture, is_windowed=False)
    narrow = _rope(architecture, is_windowed=True)
    main = wide or narrow
    if main is None:
        return RopeValues({}, {})
    family = FAMILIES[str(config["model_type"])]
    given = family.rope_settings(config, FULL if wide else SLIDING)
    found = RopeValues({"rope.freq_base": main.theta, "rope.dimension_count": main.dim}, {})
    if narrow is not None and any(_is_wide(mixer) for mixer in architecture.attention):
        found.values.update({"rope.freq_base_swa": narrow.theta, "rope.dimension_count_swa": narrow.dim})
    if name in _WITH_MROPE:
        sections = given.get("mrope_section") or _MROPE_SECTIONS
        found.values["rope.dimension_sections"] = [*sections, 0, 0, 0, 0][:4]
    _add_scaling(found, given, config, main)
    return found


def _add_scaling(found: RopeValues, given: Mapping[str, Any], config: Config, rope: Rope) -> None:
    values, kind = found.values, given.get("rope_type", given.get("type", "default"))
    original = config.get(_ORIGINAL, given.get(_ORIGINAL, config["max_position_embeddings"]))
    if kind in ("linear", "yarn"):
        factor = given.get("factor", config["max_position_embeddings"] / original)
        values |= {"rope.scaling.type": kind, "rope.scaling.factor": float(factor)}
    if kind in ("yarn", "longrope"):
        values["rope.scaling.original_context_length"] = original
    if kind == "yarn":
        values |= {key: float(given[own]) for own, key in _YARN.items() if given.get(own) is not None}
        if "llama_4_scaling_beta" in given and given.get("mscale_all_dim"):
            values["rope.scaling.yarn_log_multiplier"] = float(given["mscale_all_dim"])
    if kind == "longrope" and rope.long is not None and rope.long.frequency_factors and rope.frequency_factors:
        values["rope.scaling.attn_factor"] = rope.attention_factor
        found.factors["rope_factors_long.weight"] = rope.long.frequency_factors
        found.factors["rope_factors_short.weight"] = rope.frequency_factors
    if kind in ("llama3", "proportional") and rope.frequency_factors is not None:
        turned = tuple(_NO_ROTATION if math.isinf(each) else each for each in rope.frequency_factors)
        found.factors["rope_freqs.weight"] = turned


def _rope(architecture: Architecture, *, is_windowed: bool) -> Rope | None:
    """Return the rope of the layers with windows, or of the other layers."""
    found = [mixer.rope for mixer in architecture.attention if _is_wide(mixer) != is_windowed]
    return next((rope for rope in found if rope is not None), None)


def _is_wide(mixer: Attention) -> bool:
    return mixer.window is None
