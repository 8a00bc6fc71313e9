"""Check that a file will be read as the network from which it was made.

Metadata contain few settings, and llama.cpp has constants of each architecture for the others. So the planned metadata
are read like a file's, and any difference from the source is refused by its name.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from infer.compute.operands.architecture import Architecture, Layer
from infer.compute.operands.mixers import Attention, GatedDeltaNet
from infer.errors import ModelError, UnsupportedModelError
from infer.files.config import config_from_gguf
from infer.files.gguf.gguf import GGUFFile, TypedValue
from infer.files.gguf.quantised_file import SourceTensor
from infer.files.tensors.tensor_info import TensorInfo
from infer.models.families import make_architecture
from infer.system.open_file import OpenFile

_TOLERANCE = 1e-6  # relative, of float32
_NO_ROTATION = 1e29  # a frequency with a larger factor does not rotate


@dataclass(frozen=True)
class _PlannedFile(GGUFFile):
    """A file that is not written yet."""

    factors: Mapping[str, Sequence[float]] | None = None

    def floats(self, name: str, count: int) -> list[float]:
        assert self.factors is not None
        return [float(np.float32(factor)) for factor in self.factors[name]]


def check_round_trip(
    path: Path,
    architecture: Architecture,
    values: Mapping[str, TypedValue],
    tensors: Sequence[SourceTensor],
    factors: Mapping[str, Sequence[float]],
    file: OpenFile,
) -> None:
    """Raise UnsupportedModelError if the network that these metadata describe differs from the source's.

    Args:
        path: The source, for the error.
        architecture: The network of the source.
        values: The planned metadata.
        tensors: The planned tensors.
        factors: Vectors among the tensors from which the reader makes a rope.
        file: Any open file of the source.
    """
    infos = {each.name: TensorInfo(file, each.name, each.type, each.shape, 0, 0) for each in tensors}
    metadata = {key: value.value for key, value in values.items()}
    planned = _PlannedFile(path, metadata, infos, (file,), factors=factors)
    name = metadata["general.architecture"]
    try:
        again = make_architecture(config_from_gguf(planned))
    except ModelError as error:
        raise UnsupportedModelError(
            f"{path.name}: a GGUF file of {name} cannot describe the network: {error}"
        ) from error
    found = _difference(_comparable(architecture), _comparable(again), "")
    if found is not None:
        place, own, read = found
        raise UnsupportedModelError(
            f"{path.name}: a GGUF file of {name} cannot say that {place} is {own!r:.60}: "
            f"it would be read as {read!r:.60}"
        )


def _comparable(architecture: Architecture) -> Architecture:
    """Return the network without the fields that describe how a file stores a layer."""
    return replace(architecture, family="", layers=tuple(map(_comparable_layer, architecture.layers)))


def _comparable_layer(layer: Layer) -> Layer:
    mixer = layer.mixer
    if isinstance(mixer, GatedDeltaNet):
        mixer = replace(mixer, is_decay_log=False, are_heads_tiled=False)
    if isinstance(mixer, Attention) and mixer.qk_norm is not None and layer.norms.eps_after is not None:
        mixer = replace(mixer, qk_norm="head", scale=1.0)  # Muse-Glimmer's scale is in the weights of its norms
    return replace(layer, mixer=mixer)


def _difference(own: Any, read: Any, place: str) -> tuple[str, Any, Any] | None:
    """Return the place of the first difference, and the two values there."""
    if is_dataclass(own) and type(own) is type(read):
        names = [field.name for field in fields(own)]
        pairs = [(f"{place}.{name}".lstrip("."), getattr(own, name), getattr(read, name)) for name in names]
    elif isinstance(own, tuple) and isinstance(read, tuple) and len(own) == len(read):
        pairs = [(f"{place}[{index}]", own[index], read[index]) for index in range(len(own))]
    elif isinstance(own, float) and isinstance(read, float):
        both_stand = min(own, read) > _NO_ROTATION
        return None if both_stand or math.isclose(own, read, rel_tol=_TOLERANCE) else (place, own, read)
    else:
        return None if own == read else (place, own, read)
    differences = (_difference(left, right, inner) for inner, left, right in pairs)
    return next((found for found in differences if found is not None), None)
