"""What kind of value each setting of a config.json has: checked before a family reads them.

Ranges are the families' business. A setting that is null counts as absent, and one that is not named here may be
anything: nobody reads it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from infer.errors import ModelFormatError


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_list_of_flags(value: Any) -> bool:
    return isinstance(value, list) and all(flag in (0, 1) for flag in value)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_rope(value: Any) -> bool:
    """Numbers, names and lists of numbers; or such an object for each type of layer."""
    if not isinstance(value, dict):
        return False
    inner = [value[name] for name in _LAYER_TYPES if name in value]
    others = [setting for name, setting in value.items() if name not in _LAYER_TYPES]
    others += [setting for settings in inner if isinstance(settings, dict) for setting in settings.values()]
    return all(map(_is_object, inner)) and all(map(_is_rope_setting, others))


def _is_rope_setting(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_number, value))
    return value is None or isinstance(value, str | int | float)


_LAYER_TYPES = ("full_attention", "sliding_attention")
_Check = Callable[[Any], bool]

_KINDS: dict[str, tuple[_Check, tuple[str, ...]]] = {
    "a name": (_is_text, ("model_type", "hidden_act", "hidden_activation", "mlp_activation", "torch_dtype", "dtype")),
    "true or false": (
        _is_flag,
        ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "use_bidirectional_attention"),
    ),
    "a list of names": (_is_list_of_texts, ("layer_types", "architectures")),
    "a list of flags": (_is_list_of_flags, ("no_rope_layers",)),
    "an object": (_is_object, ("text_config", "quantization_config", "auto_map")),
    "an object of rope settings": (_is_rope, ("rope_scaling", "rope_parameters")),
}


def check_settings(path: Path, config: Mapping[str, Any]) -> None:
    """ModelFormatError for a setting of the wrong kind."""
    for kind, (is_kind, names) in _KINDS.items():
        for name in names:
            if config.get(name) is not None and not is_kind(config[name]):
                raise ModelFormatError(path, name, f"expected {kind}, got {config[name]!r:.80}")
