"""Config → the rope settings of each family, under the usual names. `rope_scaling` makes a rope from them."""

from collections.abc import Callable
from typing import Any

from infer.compute.operands.mixers import QueryScale
from infer.errors import ModelError, UnsupportedModelError
from infer.models.families.config_values import Config, count, positive, settings
from infer.models.families.layer_kinds import FULL
from infer.models.families.widths import head_dim_of

RopeSettings = Callable[[Config, str], Config]  # (config, kind of layer) → the rope settings of these layers

_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_GPT_OSS: dict[str, Any] = _YARN | {"original_max_position_embeddings": 4096}
_CWM: dict[str, Any] = {"rope_type": "llama3", "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
_CWM |= {"original_max_position_embeddings": 8192}
_MINISTRAL3: dict[str, Any] = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16_384}
_MINISTRAL3 |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
_APERTUS: dict[str, Any] = _CWM | {"factor": 8.0}
_KEEP_LENGTHS = ("default", "linear", "dynamic", "llama3")  # kinds of scaling that keep the length of a head


def theta_rope(theta: float, scaling: Config | None = None) -> RopeSettings:
    """Return a reader of the usual rope settings with this default theta, and with this default scaling.

    A config has `rope_scaling` next to `rope_theta`, or `rope_parameters`, which is flat or has one entry per kind of
    layer.
    """

    def read(config: Config, kind: str) -> Config:
        if config.get("rope_scaling") is None and config.get("rope_parameters") is None:
            config = {**config, "rope_scaling": scaling}
        found = settings(config, "rope_scaling") or settings(config, "rope_parameters")
        if kind in found:
            found = settings(found, kind)
        elif any(name.endswith("_attention") for name in found):
            found = {}
        given = {name: value for name, value in found.items() if value is not None}
        return {"rope_theta": positive(config, "rope_theta", theta), **given}

    return read


usual_rope = theta_rope(10_000.0)
cwm_rope = theta_rope(1_000_000.0, _CWM)
apertus_rope = theta_rope(12_000_000.0, _APERTUS)
gpt_oss_rope = theta_rope(150_000.0, _GPT_OSS)
ministral3_rope = theta_rope(1_000_000.0, _MINISTRAL3)


def _checked_kind(found: Config, config: Config, known: tuple[str, ...]) -> str:
    """Return the kind of scaling. Raises UnsupportedModelError for a kind that the family's code does not know."""
    name = found.get("rope_type", found.get("type", "default"))
    if name not in known:
        raise UnsupportedModelError(
            f"rope_type {name!r:.60} is not supported for {config['model_type']}: use {' or '.join(known)}"
        )
    return str(name)


def minimax_rope(config: Config, kind: str) -> Config:
    """Return MiniMax M2's rope settings, in which `rotary_dim` elements of a head rotate."""
    found = theta_rope(5_000_000.0)(config, kind)
    if config.get("rotary_dim") is None:
        return found
    return {"partial_rotary_factor": count(config, "rotary_dim") / head_dim_of(config), **found}


def hunyuan_rope(config: Config, kind: str) -> Config:
    """Return Hunyuan's rope settings: `alpha` increases theta. Its norms need a rotation that keeps lengths."""
    found = usual_rope(config, kind)
    if _checked_kind(found, config, _KEEP_LENGTHS) == "dynamic" and found.get("alpha"):
        dim = head_dim_of(config)
        return {"rope_theta": positive(found, "rope_theta") * positive(found, "alpha") ** (dim / (dim - 2))}
    return found


def granite_swa_rope(config: Config, kind: str) -> Config:
    """Return Granite's rope settings with the one theta of `layer_rope_theta`, if that lists any."""
    given = config.get("layer_rope_theta")
    thetas = {each for each in given if each} if isinstance(given, list) else set()
    if len(thetas) > 1:
        raise UnsupportedModelError(f"layer_rope_theta={given!r:.60} is not supported: it may have zeros and one theta")
    return {**usual_rope(config, kind), **({"rope_theta": thetas.pop()} if thetas else {})}


def ministral3_scale(config: Config) -> QueryScale | None:
    """Return the scale of queries, which is among Ministral 3's rope settings."""
    given = ministral3_rope(config, FULL)
    if not given.get("llama_4_scaling_beta"):
        return None
    original = count(given, "original_max_position_embeddings", default=count(config, "max_position_embeddings"))
    return QueryScale(positive(given, "llama_4_scaling_beta"), original)


def llama4_rope(config: Config, kind: str) -> Config:
    """Return Llama 4's rope settings. Its norms after the rotation need a rotation that keeps the length of a head."""
    found = theta_rope(500_000.0)(config, kind)
    _checked_kind(found, config, _KEEP_LENGTHS)
    return found


def phi3_rope(config: Config, kind: str) -> Config:
    """Return Phi-3's rope settings.

    Its code uses the name "longrope" for the "su" or "yarn" of older configs, and supports no other scaling.
    """
    found = usual_rope(config, kind)
    name = _checked_kind(found, config, ("default", "longrope", "su", "yarn"))
    return {**found, "rope_type": "default" if name == "default" else "longrope"}


def nanochat_rope(config: Config, kind: str) -> Config:
    """Return nanochat's rope settings: pairs rotate backwards. No scaling is known, and a length must not change."""
    given = usual_rope(config, kind)
    _checked_kind(given, config, ("default",))
    return {**given, "rope_type": "backwards"}


def rope_by_kind(
    full_theta: float,
    sliding_theta: float,
    *,
    usual: Config | None = None,
    sliding_name: str = "rope_local_base_freq",
    is_flat: bool = False,
) -> RopeSettings:
    """Return a reader of rope settings that a config has for each kind of layer, or not at all.

    A flat config, or a GGUF file, has one theta per kind. Its scaling is for layers with full attention.

    Args:
        full_theta: Default theta of layers with full attention.
        sliding_theta: Default theta of layers with windows.
        usual: Settings of layers with full attention, if the config has none for them.
        sliding_name: The flat setting with the theta of layers with windows.
        is_flat: `rope_parameters` without this kind of layer are ignored, not refused.
    """

    def read(config: Config, kind: str) -> Config:
        given = settings(config, "rope_parameters")
        if given and kind not in given and not is_flat:
            raise ModelError(f"config: rope_parameters must have {kind}, got {', '.join(map(str, given)):.80}")
        own = settings(given, kind)
        if kind == FULL:
            scaling = settings(config, "rope_scaling")
            return {"rope_theta": positive(config, "rope_theta", full_theta), **scaling, **(own or usual or {})}
        return {"rope_theta": positive(config, sliding_name, sliding_theta), **own}

    return read


def _rotating_whole_heads(read: RopeSettings) -> RopeSettings:
    """Return the reader for families whose code rotates whole heads, unless the rope is `proportional`."""

    def checked(config: Config, kind: str) -> Config:
        rope = read(config, kind)
        partial = rope.get("partial_rotary_factor", 1.0)
        if partial != 1 and rope.get("rope_type") != "proportional":
            raise UnsupportedModelError(f"partial_rotary_factor={partial!r:.60} needs the rope_type proportional")
        return rope

    return checked


_HALF_OF_A_HEAD = {"partial_rotary_factor": 0.5}
gemma3_rope = rope_by_kind(1_000_000.0, 10_000.0, is_flat=True)
gemma4_rope = _rotating_whole_heads(
    rope_by_kind(
        1_000_000.0, 10_000.0, usual={"rope_type": "proportional", "partial_rotary_factor": 0.25}, is_flat=True
    )
)
olmo3_rope = rope_by_kind(500_000.0, 500_000.0, sliding_name="rope_theta", is_flat=True)
lfm3_rope = _rotating_whole_heads(
    rope_by_kind(1_000_000.0, 10_000.0, usual={"rope_type": "proportional"} | _HALF_OF_A_HEAD)
)


def laguna_rope(config: Config, kind: str) -> Config:
    """Return Laguna's rope settings. By default, layers with full attention rotate half of a head."""
    usual = None if settings(config, "rope_parameters") or config.get("partial_rotary_factor") else _HALF_OF_A_HEAD
    return {"partial_rotary_factor": 1.0, **rope_by_kind(500_000.0, 10_000.0, usual=usual)(config, kind)}
