"""The sampling values that a model brings, in the names of SamplingParams."""

from collections.abc import Mapping
from typing import Any

_SAMPLING_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "repetition_window")


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's own generation config asks for: only keys that it has."""
    given = {name: generation_config[name] for name in _SAMPLING_NAMES if generation_config.get(name) is not None}
    if generation_config.get("do_sample") is False:
        given = {name: value for name, value in given.items() if name.startswith("repetition")} | {"temperature": 0.0}
    if given.get("top_k") in (0, -1):
        del given["top_k"]
    if given.get("repetition_window") == -1:
        given["repetition_window"] = None
    return given
