"""Config → the rope settings of each family, under the usual names. `rope_scaling` makes a rope from them."""

from collections.abc import Callable
from typing import Any

from infer.compute.operands.mixers import QueryScale
from infer.errors import ModelError, UnsupportedModelError
from infer.models.families.config_values import Config, count, positive, settings
from infer.models.families.layer_kinds import FULL, SLIDING
from infer.models.families.rope_scaling import rope_settings
from infer.models.families.widths import head_dim_of

_GPT_OSS_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
_GPT_OSS_YARN |= {"original_max_position_embeddings": 4096}
_CWM_ROPE: dict[str, Any] = {"rope_type": "llama3", "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
_CWM_ROPE |= {"original_max_position_embeddings": 8192}
_LFM3_ROPES: dict[str, Any] = {FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5}, SLIDING: {}}
_LAGUNA_ROPE = {FULL: {"partial_rotary_factor": 0.5}, SLIDING: {"partial_rotary_factor": 1.0}}
_MINISTRAL3_YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16_384}
_MINISTRAL3_YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}


def usual_rope(config: Config, kind: str) -> Config:
    return rope_settings(config, kind, theta=10_000.0)


def theta_rope(theta: float) -> Callable[[Config, str], Config]:
    """Return a reader of the usual rope settings with another default theta."""

    def read(config: Config, kind: str) -> Config:
        return rope_settings(config, kind, theta=theta)

    return read


def minimax_rope(config: Config, kind: str) -> Config:
    """Return MiniMax M2's rope settings, in which `rotary_dim` elements of a head rotate."""
    found = rope_settings(config, kind, theta=5_000_000.0)
    if config.get("rotary_dim") is None:
        return found
    return {"partial_rotary_factor": count(config, "rotary_dim") / head_dim_of(config), **found}


def hunyuan_rope(config: Config, kind: str) -> Config:
    """Return Hunyuan's rope settings: `alpha` increases theta. Its norms need a rotation that keeps lengths."""
    found = usual_rope(config, kind)
    name = found.get("rope_type", found.get("type", "default"))
    if name == "dynamic" and found.get("alpha"):
        dim = head_dim_of(config)
        theta = positive(found, "rope_theta") * positive(found, "alpha") ** (dim / (dim - 2))
        return {"rope_theta": theta}
    if name not in ("default", "linear", "dynamic", "llama3"):
        raise UnsupportedModelError(f"rope_type {name!r:.60} is not supported for {config['model_type']}")
    return found


def granite_swa_rope(config: Config, kind: str) -> Config:
    """Return Granite's rope settings with the one theta of `layer_rope_theta`, if that lists any."""
    given = config.get("layer_rope_theta")
    thetas = {each for each in given if each} if isinstance(given, list) else set()
    if len(thetas) > 1:
        raise UnsupportedModelError(f"layer_rope_theta={given!r:.60} is not supported: it may have zeros and one theta")
    return {**usual_rope(config, kind), **({"rope_theta": thetas.pop()} if thetas else {})}


def _scaled_rope(theta: float, scaling: Config) -> Callable[[Config, str], Config]:
    """Return a reader of the usual rope settings. The default is the settings of the published models."""

    def read(config: Config, kind: str) -> Config:
        if config.get("rope_scaling") is None and config.get("rope_parameters") is None:
            config = {**config, "rope_scaling": scaling}
        return rope_settings(config, kind, theta=theta)

    return read


cwm_rope = _scaled_rope(1_000_000.0, _CWM_ROPE)
gpt_oss_rope = _scaled_rope(150_000.0, _GPT_OSS_YARN)
ministral3_rope = _scaled_rope(1_000_000.0, _MINISTRAL3_YARN)


def ministral3_scale(config: Config) -> QueryScale | None:
    """Return the scale of queries, which is among Ministral 3's rope settings."""
    given = ministral3_rope(config, FULL)
    if not given.get("llama_4_scaling_beta"):
        return None
    original = count(given, "original_max_position_embeddings", default=count(config, "max_position_embeddings"))
    return QueryScale(positive(given, "llama_4_scaling_beta"), original)


def llama4_rope(config: Config, kind: str) -> Config:
    """Return Llama 4's rope settings. Its norms after the rotation need a rotation that keeps the length of a head."""
    found = rope_settings(config, kind, theta=500_000.0)
    name = found.get("rope_type", found.get("type", "default"))
    if name not in ("default", "linear", "dynamic", "llama3"):
        raise UnsupportedModelError(f"rope_type {name!r:.60} is not supported for llama4: use default or llama3")
    return found


def phi3_rope(config: Config, kind: str) -> Config:
    """Return Phi-3's rope settings.

    Its code uses the name "longrope" for the "su" or "yarn" of older configs, and supports no other scaling.
    """
    found = {"type": "default", **rope_settings(config, kind, theta=10_000.0)}
    name = found.pop("rope_type", found["type"])
    if name not in ("default", "longrope", "su", "yarn"):
        raise UnsupportedModelError(f"rope_type {name!r:.60} is not supported for phi3: use default or longrope")
    return {**found, "rope_type": "default" if name == "default" else "longrope"}


def olmo3_rope(config: Config, kind: str) -> Config:
    """Return OLMo 3's rope settings. Flat settings are for layers with full attention; windows have no scaling."""
    nested = settings(settings(config, "rope_parameters"), kind)
    scaling = settings(config, "rope_scaling") if kind == FULL else {}
    return {"rope_theta": positive(config, "rope_theta", 500_000.0), **nested, **scaling}


def rope_by_kind(full_theta: float, sliding_theta: float) -> Callable[[Config, str], Config]:
    """Return a reader of rope settings that a config has for each kind of layer, or not at all.

    A GGUF file has one theta per kind. Its scaling is for layers with full attention.
    """

    def read(config: Config, kind: str) -> Config:
        given = settings(config, "rope_parameters")
        if given and kind not in given:
            raise ModelError(f"config: rope_parameters must have {kind}, got {', '.join(map(str, given)):.80}")
        if kind == FULL:
            scaling = settings(config, "rope_scaling")
            return {"rope_theta": positive(config, "rope_theta", full_theta), **scaling, **settings(given, kind)}
        return {"rope_theta": positive(config, "rope_local_base_freq", sliding_theta), **settings(given, kind)}

    return read


def nanochat_rope(config: Config, kind: str) -> Config:
    """Return nanochat's rope settings: pairs rotate backwards. No scaling is known, and a length must not change."""
    given = usual_rope(config, kind)
    name = given.get("rope_type", given.get("type", "default"))
    if name != "default":
        raise UnsupportedModelError(f"rope_type {name!r:.60} is not supported for nanochat: use default")
    return {**given, "rope_type": "backwards"}


def lfm3_rope(config: Config, kind: str) -> Config:
    """Return LFM3's rope settings. By default, layers with full attention rotate half of a head."""
    given = config if settings(config, "rope_parameters") else {**config, "rope_parameters": _LFM3_ROPES}
    return rope_by_kind(1_000_000.0, 10_000.0)(given, kind)


def laguna_rope(config: Config, kind: str) -> Config:
    """Return Laguna's rope settings. By default, layers with full attention rotate half of a head."""
    if not settings(config, "rope_parameters") and config.get("partial_rotary_factor") is None:
        config = {**config, "rope_parameters": _LAGUNA_ROPE}
    return {"partial_rotary_factor": 1.0, **rope_by_kind(500_000.0, 10_000.0)(config, kind)}
