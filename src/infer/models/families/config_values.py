"""Checked values from a config. A ModelError names the setting, the rule and the value."""

from collections.abc import Callable, Mapping
from typing import Any

from infer.errors import ModelError, UnsupportedModelError

Config = Mapping[str, Any]

_SMALLEST, _LARGEST = 1e-32, 1e32  # derived values then fit a float32, too; GGUF files write 1e30 for no rotation


def count(config: Config, name: str, *, default: int | None = None, maximum: int = 2**31) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= maximum:
        raise ModelError(f"config: {name} must be a whole number from 1 to {maximum}, got {value!r:.60}")
    return value


def optional_count(config: Config, name: str) -> int | None:
    return None if config.get(name) is None else count(config, name)


def positive(config: Config, name: str, default: float | None = None) -> float:
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ModelError(f"config: {name} must be a number above 0, got {value!r:.60}")
    if not _SMALLEST <= value <= _LARGEST:
        raise ModelError(f"config: {name} must be from {_SMALLEST:g} to {_LARGEST:g}, got {value!r:.60}")
    return float(value)


def optional_positive(config: Config, name: str) -> float | None:
    return None if config.get(name) is None else positive(config, name)


def flag(config: Config, name: str) -> bool:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"config: {name} must be true or false, got {value!r:.60}")
    return bool(value)


def positives(config: Config, name: str, length: int) -> tuple[float, ...]:
    """Return a setting that lists `length` numbers above 0."""
    values = config.get(name)
    if not isinstance(values, list | tuple) or len(values) != length:
        found = f"{len(values)} values" if isinstance(values, list | tuple) else f"{values!r:.60}"
        raise ModelError(f"config: {name} must list {length} numbers, one for each pair that rotates, got {found}")
    return tuple(positive({name: value}, name) for value in values)


def layer_numbers(config: Config, name: str) -> list[int]:
    """Return a setting that lists the numbers of layers."""
    given = config.get(name)
    if not isinstance(given, list) or not all(type(each) is int for each in given):
        raise ModelError(f"config: {name} must list the numbers of layers, got {given!r:.60}")
    return given


def of_layers(
    config: Config, name: str, num_layers: int, rule: str, is_valid: Callable[[Any], bool] = lambda each: True
) -> list[Any] | None:
    """Return a setting that lists a valid value for each layer, or None without the setting. `rule` is for errors."""
    given = config.get(name)
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != num_layers or not all(map(is_valid, given)):
        raise ModelError(f"{name} must list {rule}, got {given!r:.80}")
    return given


def settings(config: Config, name: str) -> Config:
    """Return a setting that is itself a mapping, or {} if it is missing or null."""
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ModelError(f"config: {name} must be a mapping, got {value!r:.60}")
    return value or {}


def choice(config: Config, name: str, choices: Mapping[str, Any]) -> Any:
    value = config.get(name)
    if not isinstance(value, str) or value not in choices:
        raise UnsupportedModelError(f"{name} {value!r:.60} is not supported: supported are {', '.join(choices)}")
    return choices[value]
