"""Settings of ropes, by the list of keys from which `files.config` reads them, and the tensors of factors."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from infer.compute.operands.architecture import Architecture
from infer.compute.operands.mixers import Rope
from infer.files.gguf.forms import SCALING_KEYS, GGUFForm
from infer.models.families import FAMILIES
from infer.models.families.config_values import Config
from infer.models.families.layer_kinds import FULL, SLIDING
from infer.models.gguf_export.network_values import values_of
from infer.models.gguf_export.values import Value

_ORIGINAL = "original_max_position_embeddings"
_NO_ROTATION = 1e30  # llama.cpp's factor for a pair that does not rotate
_MROPE_SECTIONS = [11, 11, 10, 0]  # usual sections, which llama.cpp requires of some architectures


class RopeValues(NamedTuple):
    settings: dict[str, Any]  # of ropes, as `KEYS` name them
    values: dict[str, Value]  # keys of scaling
    factors: dict[str, tuple[float, ...]]  # by tensor name


def rope_values(form: GGUFForm, config: Config, architecture: Architecture) -> RopeValues:
    """Return the settings of a decoder's ropes, and its tensors of factors.

    Args:
        form: The form of the architecture's files.
        config: The config as its family reads it.
        architecture: The network of this config.
    """
    wide = _rope(architecture, is_windowed=False)
    narrow = _rope(architecture, is_windowed=True)
    main = wide or narrow
    if main is None:
        return RopeValues({"rope_theta": None}, {}, {})
    given = FAMILIES[str(config["model_type"])].rope_settings(config, FULL if wide else SLIDING)
    sections = [*(given.get("mrope_section") or _MROPE_SECTIONS), 0, 0, 0, 0][:4]
    settings: dict[str, Any] = {"rope_theta": main.theta, "rotated_dim": main.dim, "mrope_section": sections}
    settings["rope_local_base_freq"] = None
    if narrow is not None and any(mixer.window is None for mixer in architecture.attention):
        settings |= {"rope_local_base_freq": narrow.theta, "windowed_rotated_dim": narrow.dim}
    kind = given.get("rope_type", given.get("type", "default"))
    return RopeValues(settings, _scaling(form, kind, given, config, main), _factors(kind, main))


def _scaling(form: GGUFForm, kind: str, given: Mapping[str, Any], config: Config, rope: Rope) -> dict[str, Value]:
    original = config.get(_ORIGINAL, given.get(_ORIGINAL, config["max_position_embeddings"]))
    if kind == "longrope":
        factor = rope.attention_factor if _factors(kind, rope) else None
        values = values_of(SCALING_KEYS, form, {_ORIGINAL: original, "attention_factor": factor})
        values.pop("rope.scaling.yarn_attn_factor", None)
        return values
    if kind not in ("linear", "yarn"):
        return {}
    factor = float(given.get("factor", config["max_position_embeddings"] / original))
    settings = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        is_scaled = "llama_4_scaling_beta" in given
        all_dim = given.get("mscale_all_dim") or None if is_scaled else None
        settings = {**given, **settings, _ORIGINAL: original, "mscale_all_dim": all_dim}
    values = values_of(SCALING_KEYS, form, settings)
    values.pop("rope.scaling.attn_factor", None)
    return values


def _factors(kind: str, rope: Rope) -> dict[str, tuple[float, ...]]:
    """Return the tensors of factors."""
    short, long = rope.frequency_factors, None if rope.long is None else rope.long.frequency_factors
    if kind == "longrope" and short and long:
        return {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    if kind in ("llama3", "proportional") and short is not None:
        turned = tuple(_NO_ROTATION if math.isinf(each) else each for each in short)
        return {"rope_freqs.weight": turned}
    return {}


def _rope(architecture: Architecture, *, is_windowed: bool) -> Rope | None:
    """Return the rope of the layers with windows, or of the other layers."""
    found = [mixer.rope for mixer in architecture.attention if (mixer.window is not None) == is_windowed]
    return next((rope for rope in found if rope is not None), None)
