"""`general.*` of a GGUF file: the model's name and size, and the sampling values that its files recommend."""

import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from infer.files.config import SAMPLING_KEYS
from infer.files.generation_config import sampling_defaults
from infer.files.gguf.gguf import TypedValue
from infer.models.gguf_export.tensors import ExportTensor
from infer.models.gguf_export.values import typed

_UNITS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3))
_SNAPSHOT = re.compile(r"models--[^/]+--([^/]+)")  # the folder of a model in the hub's cache


def general_values(
    path: Path, architecture: str, tensors: Sequence[ExportTensor], generation_config: Mapping[str, Any]
) -> dict[str, TypedValue]:
    """Return the keys. The name is the folder's, or the model's name in the hub's cache.

    Args:
        path: The folder.
        architecture: The architecture's name in GGUF.
        tensors: The tensors of the file.
        generation_config: The content of the folder's generation_config.json.
    """
    names = [match[1] for part in path.resolve().parts if (match := _SNAPSHOT.fullmatch(part))]
    values = {"general.architecture": typed(architecture), "general.type": typed("model")}
    values |= {"general.name": typed(names[-1] if names else path.resolve().name)}
    values |= {"general.size_label": typed(_size_label(tensors))}
    sampling = sampling_defaults(generation_config)
    for key, ours in SAMPLING_KEYS.items():
        if (value := sampling.get(ours)) is not None:
            counts = ours in ("top_k", "repetition_window")
            values[f"general.sampling.{key}"] = TypedValue("i32", value) if counts else typed(float(value))
    return values


def _size_label(tensors: Sequence[ExportTensor]) -> str:
    """Return the number of weights, such as `134M`; with experts, the number per expert, such as `8x7.2B`."""
    stacks = [tensor for tensor in tensors if "_exps." in tensor.name]
    num_experts = max((tensor.shape[0] for tensor in stacks), default=1)
    rest = sum(prod(tensor.shape) for tensor in tensors if "_exps." not in tensor.name)
    count = rest + sum(prod(tensor.shape[1:]) for tensor in stacks)
    unit, size = next(((unit, size) for unit, size in _UNITS if count > size), _UNITS[-1])
    digits = max(2 - len(str(round(count / size)).lstrip("0")), 0)
    return f"{num_experts}x" * bool(stacks) + f"{count / size:.{digits}f}{unit}"
