"""Classifiers as their files describe them: the layers that make logits of a pooled state, and the names of labels."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from infer.checkpoint.head_files import DenseFiles, HeadFiles, StepFiles, dense_of
from infer.checkpoint.tensor_info import TensorInfo
from infer.errors import ModelFormatError, UnsupportedModelError

Scale = Literal["softmax", "sigmoid", "raw"]

_SCALE_BY_PROBLEM: dict[str | None, Scale] = {
    None: "softmax",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "raw",
}
_OF_TOKENS = "ForTokenClassification"
_LAYER, _GGUF_LAYERS = "score", ("cls", "cls.output")


@final
@dataclass(frozen=True)
class ClassifierFiles:
    """The layers from a state to one logit per label.

    `scale` is the function that makes the values of a text: probabilities that add up to 1, probabilities of each
    label by itself, or the logits. `pad_id` is the token that a text must not end with.
    """

    head: HeadFiles
    labels: tuple[str, ...]
    scale: Scale = "softmax"
    pad_id: int | None = None


def classifier_from_folder(
    folder: Path, config: Mapping[str, Any], tensors: MutableMapping[str, TensorInfo]
) -> ClassifierFiles | None:
    """Return the classifier of a folder, or None. Its tensors are removed from `tensors`.

    Raises UnsupportedModelError for labels of tokens, and ModelFormatError for labels that do not fit the weight.
    """
    if f"{_LAYER}.weight" not in tensors:
        return None
    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        if str(name).endswith(_OF_TOKENS):
            raise UnsupportedModelError(f"{folder.name}: {name!s:.80} labels tokens; supported are labels of texts")
    layer = _take(tensors, _LAYER)
    path, given = folder / "config.json", config.get("id2label")
    labels = _labels(path, "id2label", _in_order(path, given) if given else None, _num_labels(layer))
    problem, pad_id = config.get("problem_type"), config.get("pad_token_id")
    if not (problem is None or isinstance(problem, str)) or problem not in _SCALE_BY_PROBLEM:
        known = ", ".join(name for name in _SCALE_BY_PROBLEM if name)
        raise ModelFormatError(path, "problem_type", f"expected one of {known}, got {problem!r:.60}")
    return ClassifierFiles((layer,), labels, _scale(problem, labels), pad_id if type(pad_id) is int else None)


def classifier_from_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: MutableMapping[str, TensorInfo]
) -> ClassifierFiles | None:
    """Return the classifier of a GGUF file, or None. Its tensors are removed from `tensors`."""
    if f"{_GGUF_LAYERS[-1]}.weight" not in tensors:
        return None
    steps = list[StepFiles]()
    for name in _GGUF_LAYERS:
        if f"{name}.weight" in tensors:
            steps += ["tanh"] if steps else []
            steps.append(_take(tensors, name))
    last = steps[-1]
    assert isinstance(last, DenseFiles)
    key = f"{metadata['general.architecture']}.classifier.output_labels"
    labels = _labels(path, key, metadata.get(key), _num_labels(last))
    return ClassifierFiles(tuple(steps), labels, _scale(None, labels))


def _take(tensors: MutableMapping[str, TensorInfo], name: str) -> DenseFiles:
    """Remove a dense layer from the tensors, and return it."""
    layer = dense_of(tensors, name)
    for kind in ("weight", "bias"):
        tensors.pop(f"{name}.{kind}", None)
    return layer


def _num_labels(layer: DenseFiles) -> int:
    weight = layer.weight
    if len(weight.shape) != 2 or not weight.shape[0]:
        problem = f"expected one row per label, got the shape {weight.shape}"
        raise ModelFormatError(weight.path, f"tensor {weight.name!r:.80}", problem)
    return weight.shape[0]


def _in_order(path: Path, given: object) -> list[Any]:
    """Return the names of labels by their numbers, which are keys of `id2label`."""
    if not isinstance(given, dict) or set(given) != {str(index) for index in range(len(given))}:
        raise ModelFormatError(path, "id2label", f"expected a name for each number from 0, got {given!r:.80}")
    return [given[str(index)] for index in range(len(given))]


def _labels(path: Path, key: str, given: object, count: int) -> tuple[str, ...]:
    """Return the names of labels, those of `transformers` if the files have none."""
    if given is None:
        return tuple(f"LABEL_{index}" for index in range(count))
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given) or len(given) != count:
        raise ModelFormatError(path, key, f"expected {count} names, one per row of the weight, got {given!r:.80}")
    return tuple(given)


def _scale(problem: str | None, labels: tuple[str, ...]) -> Scale:
    """Return the scale of a problem. One label has a probability as of a cross-encoder, except in regression."""
    return "sigmoid" if len(labels) == 1 and problem != "regression" else _SCALE_BY_PROBLEM[problem]
