"""The sampling values that a model brings, in the names of SamplingParams."""

import warnings
from collections.abc import Mapping
from typing import Any

from infer.checkpoint import Checkpoint
from infer.checkpoint.config import SAMPLING_KEYS
from infer.checkpoint.find import packaged_model
from infer.errors import InvalidRequestError
from infer.sampling.defaults import SamplingDefaults
from infer.sampling_params import SamplingParams

_SAMPLING_NAMES = tuple(SAMPLING_KEYS.values())


def defaults_of(checkpoint: Checkpoint) -> SamplingDefaults:
    """What the files of a model say and, of a packaged one, its card. A bad value is ignored with a warning."""
    packaged = packaged_model(checkpoint.path)
    stored = sampling_defaults(checkpoint.generation_config)
    return SamplingDefaults(_valid(stored, checkpoint), None if packaged is None else packaged.sampling)


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's own generation config asks for: only keys that it has, as they stand there."""
    given = {name: generation_config[name] for name in _SAMPLING_NAMES if generation_config.get(name) is not None}
    if generation_config.get("do_sample") is False:
        given = {name: value for name, value in given.items() if name.startswith("repetition")} | {"temperature": 0.0}
    if given.get("top_k") in (0, -1):
        del given["top_k"]
    if given.get("repetition_window") == -1:
        given["repetition_window"] = None
    return given


def _valid(stored: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """Without those that break a rule of SamplingParams: each is named with its file."""
    valid = {}
    for name, value in stored.items():
        try:
            SamplingParams(**{name: value})
        except InvalidRequestError as error:
            warnings.warn(f"{_place(checkpoint, name)}: {error}: ignored", stacklevel=3)
        else:
            valid[name] = value
    return valid


def _place(checkpoint: Checkpoint, name: str) -> str:
    if checkpoint.path.is_dir():
        return f"{checkpoint.path.name}/generation_config.json"
    key = next(key for key, ours in SAMPLING_KEYS.items() if ours == name)
    return f"{checkpoint.path.name}, general.sampling.{key}"
