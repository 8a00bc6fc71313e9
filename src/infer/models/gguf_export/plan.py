"""A folder of safetensors → the metadata and the tensors of a GGUF file of the same model.

Metadata contain few settings, and llama.cpp has constants of each architecture for the others. So the planned metadata
are read like a file's, and any difference from the source is refused by its name.
"""

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
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
from infer.files.gguf.keys import DRAFTING_LAYERS
from infer.files.gguf.quantised_file import QuantisableModel, SourceTensor
from infer.files.heads.classifier_files import ClassifierFiles, classifier_from_gguf
from infer.files.heads.pooling import POOLING_BY_NUMBER, EmbeddingFiles, HeadFiles, LayerFiles
from infer.files.heads.reranker_files import RANK, RERANK_PROMPT, RerankerFiles
from infer.files.heads.sentence_modules import ARE_POOLED_KEY, DEFAULT_KEY, NAMES_KEY, TEXTS_KEY
from infer.files.tensors.lazy_weights import LazyWeights
from infer.files.tensors.tensor_info import TensorInfo
from infer.files.tensors.tensor_names import DRAFTING_NORM, LAST_NORM
from infer.models.draft_plan import head_of
from infer.models.families import make_architecture
from infer.models.gguf_export.network_values import network_values
from infer.models.gguf_export.tensors import as_floats, export_tensors, reordered, rows_of, source_tensor
from infer.models.gguf_export.tokenizer_values import tokenizer_values
from infer.models.tensors import check_tensors
from infer.system.open_file import OpenFile
from infer.text.tokenizer.tokenizer_files import read_folder

_NUMBERS = {pooling: number for number, pooling in POOLING_BY_NUMBER.items()}
_ANSWERS = ["yes", "no"]  # llama.cpp's labels for the rows of a reranker's head


class HeadPlan(NamedTuple):
    values: dict[str, Value]  # keys under the architecture's name
    tensors: list[SourceTensor]
    prompt: str | None = None  # the prompt of a reranker, with {query} and {document}


def head_plan(checkpoint: Checkpoint, name: str, eps: float) -> HeadPlan:
    """Return the keys and tensors of the head. There are none for a model that only generates.

    Args:
        checkpoint: The folder.
        name: The architecture's name in GGUF.
        eps: The eps of the network's norms, which a head's norm also has.

    Raises:
        UnsupportedModelError: GGUF has no form for the head. The error names the missing part.
    """
    path, reranker = checkpoint.path, checkpoint.reranker
    plan = HeadPlan({}, []) if checkpoint.embedding is None else _embedding(path, checkpoint.embedding)
    if checkpoint.classifier is None:
        return plan if reranker is None else _answers(checkpoint, reranker)
    plan = _classifier(path, name, checkpoint.classifier, eps)
    return plan if reranker is None else plan._replace(values=plan.values | {"pooling_type": RANK})


def _answers(checkpoint: Checkpoint, files: RerankerFiles) -> HeadPlan:
    """Return the head of a reranker that compares two tokens: their rows of the head for logits."""
    path = checkpoint.path
    if files.no is None or files.tensor is None:
        raise UnsupportedModelError(f"{path.name}: GGUF has no form for a reranker that does not compare two tokens")
    backend = read_folder(path).backend
    ids = [row if isinstance(row, int) else backend.token_to_id(row) for row in (files.yes, files.no)]
    if any(row is None or row >= files.tensor.shape[0] for row in ids):
        raise UnsupportedModelError(f"{path.name}: the head has no rows for the tokens {files.yes!r} and {files.no!r}")
    head = rows_of(LazyWeights({"head": files.tensor})["head"])
    rows = as_floats(reordered(head, np.array(ids, np.int64)))
    values: dict[str, Value] = {"classifier.output_labels": list(_ANSWERS), "pooling_type": RANK}
    prompt = RERANK_PROMPT if files.has_usual_prompt else None
    return HeadPlan(values, [source_tensor("cls.output.weight", rows.shape, rows)], prompt)


def _embedding(path: Path, files: EmbeddingFiles) -> HeadPlan:
    number = _NUMBERS.get(files.pooling)
    lacking = f"the pooling {files.pooling}" if number is None else None
    if any(isinstance(step, str) or step.bias is not None for step in files.head) or len(files.head) > 2:
        lacking = "the layers after the pooling: it has two matrices without a bias"
    if lacking is not None or number is None:
        raise UnsupportedModelError(f"{path.name}: GGUF has no form for {lacking}")
    if not files.normalizes:
        warnings.warn(f"{path.name}: vectors of a GGUF file have length 1, unlike those of the folder", stacklevel=4)
    if files.dimensions is not None:
        problem = f"GGUF has no key for truncate_dim: pass dimensions={files.dimensions} for vectors as of the folder"
        warnings.warn(f"{path.name}: {problem}", stacklevel=4)
    tensors = _tensors(files.head, ("dense_2", "dense_3"))
    sizes = {f"{each.name.removesuffix('.weight')}_feat_{side}": each.shape[axis]
             for each in tensors for side, axis in (("in", 1), ("out", 0))}  # fmt: skip
    return HeadPlan({"pooling_type": number, **sizes}, tensors)


def _classifier(path: Path, name: str, files: ClassifierFiles, eps: float) -> HeadPlan:
    dense = [step for step in files.head if isinstance(step, LayerFiles) and step.is_dense]
    tensors = _tensors(files.head, ("cls", "cls.output")[-len(dense) :])
    values: dict[str, Value] = {"classifier.output_labels": list(files.labels)}
    if files.pooling in ("mean", "cls"):
        values["classifier.pooling_type"] = _NUMBERS[files.pooling]
    metadata: dict[str, Any] = {f"{name}.{key}": each for key, each in values.items()}
    metadata |= {"general.architecture": name, f"{name}.attention.layer_norm_epsilon": eps}
    again = classifier_from_gguf(path, metadata, _headers(dense[0].weight.file, tensors))
    assert again is not None
    for what, own, read in (
        ("the layers", _kinds(files.head), _kinds(again.head)),
        ("the labels", files.labels, again.labels),
        ("the scale of values", files.scale, again.scale),
        ("the pooling", files.pooling, again.pooling),
    ):
        if own != read:
            raise UnsupportedModelError(
                f"{path.name}: a GGUF file of {name} cannot say that {what} of its classifier are {own!r:.80}: they "
                f"would be read as {read!r:.80}"
            )
    return HeadPlan(values, tensors)


def _kinds(head: HeadFiles) -> list[str]:
    """Return the steps in words."""
    return [
        step if isinstance(step, str) else "dense" if step.eps is None else f"a norm with eps {step.eps:g}"
        for step in head
    ]


def _tensors(head: HeadFiles, names: tuple[str, ...]) -> list[SourceTensor]:
    """Return the tensors of the head's layers. Dense layers get these names, and a norm has its own."""
    remaining, infos = list(names), dict[str, TensorInfo]()
    for step in head:
        if isinstance(step, str):
            continue
        module = remaining.pop(0) if step.is_dense else "cls.norm"
        infos[f"{module}.weight"] = step.weight
        if step.bias is not None:
            infos[f"{module}.bias"] = step.bias
    weights = LazyWeights(infos)
    return [source_tensor(each, weights[each].shape, rows_of(weights[each])) for each in infos]


_UNITS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3))
_SNAPSHOT = re.compile(r"models--[^/]+--([^/]+)")  # the folder of a model in the hub's cache


def export_plan(checkpoint: Checkpoint) -> QuantisableModel:
    """Return the key-values and the tensors of a GGUF file of the model in a folder, in their order.

    Raises:
        UnsupportedModelError: GGUF has no form for the network or the tokenizer. The error names the missing part.
        ModelError: The config and the tensors disagree, or reading them fails.
    """
    network, path = network_plan(checkpoint), checkpoint.path
    name = str(network.values["general.architecture"].value)
    tokenizer = tokenizer_values(path, name, int(checkpoint.config["vocab_size"]))
    values = {**network.values, **{key: typed(value) for key, value in tokenizer.items()}}
    return QuantisableModel(values, network.tensors)


def network_plan(checkpoint: Checkpoint) -> QuantisableModel:
    """Return the same content without a tokenizer."""
    config, path = checkpoint.config, checkpoint.path
    architecture, name = make_architecture(config), architecture_in_gguf(config)
    if name is None:
        raise UnsupportedModelError(f"{path.name}: GGUF has no architecture for model_type {config['model_type']!r}")
    check_tensors(architecture, checkpoint.tensors)
    drafting = _drafting_layer(checkpoint, architecture, name)
    own, factors = network_values(form_of(name), config, architecture, 1 if drafting else 0)
    tensors = export_tensors(path, name, architecture, LazyWeights(checkpoint.tensors), factors) + drafting
    arrays = form_of(name).arrays
    own |= {key: [float(each.read(0, 1)) for each in tensors if each.name.endswith(f".{key}")] for key in arrays}
    tensors = [each for each in tensors if not each.name.endswith(arrays)]
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
    file, metadata = checkpoint.files[0], {key: value.value for key, value in values.items()}
    planned = _PlannedFile(path, metadata, _headers(file, tensors), (file,), factors=factors)
    check_round_trip(architecture, planned)
    return QuantisableModel(values, tensors + head.tensors)


def _drafting_layer(checkpoint: Checkpoint, network: Architecture, name: str) -> list[SourceTensor]:
    """Return the tensors of the model's own head that drafts: a layer after the network's, as llama.cpp names it.

    Warns if the model has such a layer and a file of this architecture cannot have it.
    """
    if not checkpoint.drafting:
        return []
    head, path = head_of(checkpoint, network), checkpoint.path
    if head is None or DRAFTING_LAYERS not in form_of(name).keys:
        lacking = "infer does not know its form" if head is None else f"files of {name} have no such layer"
        warnings.warn(f"{path.name}: the layer that drafts tokens is left out, because {lacking}", stacklevel=4)
        return []
    architecture, tensors = head
    named = {each: info for each, info in tensors.items() if each in checkpoint.drafting}
    named[DRAFTING_NORM] = named.pop(LAST_NORM)
    first, own = "blk.0.", f"blk.{len(network.layers)}."
    layer = export_tensors(path, name, architecture, LazyWeights(named), {})
    return [replace(each, name=each.name.replace(first, own, 1)) for each in layer]


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
    """A file that is not written yet: the planned metadata and headers of tensors, with the path of the source.

    `factors` are the vectors among the tensors from which the reader makes a rope.
    """

    factors: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def floats(self, name: str, count: int) -> list[float]:
        return [float(np.float32(factor)) for factor in self.factors[name]]


def _headers(file: OpenFile, tensors: Sequence[SourceTensor]) -> dict[str, TensorInfo]:
    """Return the headers of tensors that are not written yet. `file` is any open file of the source."""
    return {each.name: TensorInfo(file, each.name, each.type, each.shape, 0, 0) for each in tensors}


def check_round_trip(architecture: Architecture, planned: _PlannedFile) -> None:
    """Raise UnsupportedModelError if the network of the planned file differs from the source's."""
    path, name = planned.path, planned.metadata["general.architecture"]
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
