"""The sampling values in a model's files, under the names of SamplingParams."""

import warnings
from collections.abc import Mapping
from typing import Any

from infer.compute.sampling.keywords import SamplingDefaults
from infer.errors import InvalidRequestError
from infer.files import Checkpoint
from infer.files.config import SAMPLING_KEYS
from infer.files.hub.find import packaged_model
from infer.sampling_params import SamplingParams, without_zeros

_SAMPLING_NAMES = tuple(SAMPLING_KEYS.values())


def defaults_of(checkpoint: Checkpoint) -> SamplingDefaults:
    """Return the sampling values of a model's files and, for a packaged model, of its card.

    An invalid value is ignored with a warning.
    """
    packaged = packaged_model(checkpoint.path)
    stored = sampling_defaults(checkpoint.generation_config)
    return SamplingDefaults(_valid(stored, checkpoint), None if packaged is None else packaged.sampling)


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling values in a model's generation config.

    Values that mean off are converted. `do_sample: false` becomes `temperature` 0.
    """
    given = {name: generation_config[name] for name in _SAMPLING_NAMES if generation_config.get(name) is not None}
    if generation_config.get("do_sample") is False:
        given = {name: value for name, value in given.items() if name.startswith("repetition")} | {"temperature": 0.0}
    if given.get("top_k") in (0, -1):
        del given["top_k"]
    if given.get("repetition_window") == -1:
        given["repetition_window"] = None
    return without_zeros(given)


def _valid(stored: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    """Return only the values that SamplingParams accepts.

    Each other value is ignored with a warning that names its file.
    """
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
