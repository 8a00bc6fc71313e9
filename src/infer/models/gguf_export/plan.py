"""A folder of safetensors → the metadata and the tensors of a GGUF file of the same model.

Metadata contain few settings, and llama.cpp has constants of each architecture for the others. So the planned metadata
are read like a file's, and any difference from the source is refused by its name.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infer.compute.operands.architecture import Architecture, Layer
from infer.compute.operands.mixers import Attention, GatedDeltaNet
from infer.errors import ModelError, UnsupportedModelError
from infer.files import Checkpoint
from infer.files.config import SAMPLING_KEYS, config_from_gguf
from infer.files.generation_config import sampling_defaults
from infer.files.gguf.forms import architecture_in_gguf, form_of
from infer.files.gguf.gguf import GGUFFile, TypedValue
from infer.files.gguf.gguf_writer import Value, typed
from infer.files.gguf.quantised_file import SourceTensor
from infer.files.heads.sentence_modules import ARE_POOLED_KEY, DEFAULT_KEY, NAMES_KEY, TEXTS_KEY
from infer.files.tensors.lazy_weights import LazyWeights
from infer.files.tensors.tensor_info import TensorInfo
from infer.models.families import make_architecture
from infer.models.gguf_export.heads import head_plan
from infer.models.gguf_export.network_values import network_values
from infer.models.gguf_export.tensors import export_tensors
from infer.models.gguf_export.tokenizer_values import tokenizer_values
from infer.models.tensors import check_tensors
from infer.system.open_file import OpenFile

_UNITS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3))
_SNAPSHOT = re.compile(r"models--[^/]+--([^/]+)")  # the folder of a model in the hub's cache


class ExportPlan(NamedTuple):
    """The content of a GGUF file: its key-values and its tensors, in their order."""

    values: dict[str, TypedValue]
    tensors: list[SourceTensor]


def export_plan(checkpoint: Checkpoint) -> ExportPlan:
    """Return the content of a GGUF file of the model in a folder.

    Raises:
        UnsupportedModelError: GGUF has no form for the network or the tokenizer. The error names the missing part.
        ModelError: The config and the tensors disagree, or reading them fails.
    """
    network, path = network_plan(checkpoint), checkpoint.path
    name = str(network.values["general.architecture"].value)
    tokenizer = tokenizer_values(path, name, int(checkpoint.config["vocab_size"]))
    values = network.values | {key: typed(value) for key, value in tokenizer.items()}
    return ExportPlan(values, network.tensors)


def network_plan(checkpoint: Checkpoint) -> ExportPlan:
    """Return the same content without a tokenizer."""
    config, path = checkpoint.config, checkpoint.path
    architecture, name = make_architecture(config), architecture_in_gguf(config)
    if name is None:
        raise UnsupportedModelError(f"{path.name}: GGUF has no architecture for model_type {config['model_type']!r}")
    check_tensors(architecture, checkpoint.tensors)
    own, factors = network_values(form_of(name), config, architecture)
    tensors = export_tensors(path, name, architecture, LazyWeights(checkpoint.tensors), factors)
    values = _general_values(path, name, tensors, checkpoint.generation_config)
    head = head_plan(checkpoint, name, architecture.norm_eps)
    others = _prompt_values(checkpoint)
    if (
        architecture.reads_whole_texts and architecture.text_inputs is not None and name != "modern-bert"
    ):  # otherwise llama.cpp opens no such encoder
        others["tokenizer.ggml.token_type_count"] = max(architecture.text_inputs.num_types, 1)
    values |= {key: typed(value) for key, value in others.items()}
    values |= {f"{name}.{key}": typed(value) for key, value in (own | head.values).items()}
    if head.prompt is not None:
        values["tokenizer.chat_template.rerank"] = typed(head.prompt)
    check_round_trip(path, architecture, values, tensors, factors, checkpoint.files[0])
    return ExportPlan(values, tensors + head.tensors)


def _prompt_values(checkpoint: Checkpoint) -> dict[str, Value]:
    """Return the keys, or none for a model without prompts."""
    prompts = checkpoint.prompts
    if not prompts.by_name:
        return {}
    values: dict[str, Value] = {NAMES_KEY: list(prompts.by_name), TEXTS_KEY: list(prompts.by_name.values())}
    if prompts.default is not None:
        values[DEFAULT_KEY] = prompts.default
    if checkpoint.embedding is not None and checkpoint.embedding.skips_prompt:
        values[ARE_POOLED_KEY] = False
    return values


def _general_values(
    path: Path, architecture: str, tensors: Sequence[SourceTensor], generation_config: Mapping[str, Any]
) -> dict[str, TypedValue]:
    """Return `general.*`: the model's name and size, and the sampling values that its files recommend.

    The name is the folder's, or the model's name in the hub's cache.
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


def _size_label(tensors: Sequence[SourceTensor]) -> str:
    """Return the number of weights, such as `134M`; with experts, the number per expert, such as `8x7.2B`."""
    stacks = [tensor for tensor in tensors if "_exps." in tensor.name]
    num_experts = max((tensor.shape[0] for tensor in stacks), default=1)
    rest = sum(prod(tensor.shape) for tensor in tensors if "_exps." not in tensor.name)
    count = rest + sum(prod(tensor.shape[1:]) for tensor in stacks)
    unit, size = next(((unit, size) for unit, size in _UNITS if count > size), _UNITS[-1])
    digits = max(2 - len(str(round(count / size)).lstrip("0")), 0)
    return f"{num_experts}x" * bool(stacks) + f"{count / size:.{digits}f}{unit}"


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
