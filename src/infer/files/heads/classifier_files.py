"""Classifiers in a model's files: the layers that compute logits from a pooled state, and the names of labels."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from infer.errors import ModelFormatError, UnsupportedModelError
from infer.files.gguf.forms import form_of, form_of_family
from infer.files.gguf.gguf_values import shortest
from infer.files.heads.pooling import ActivationName, HeadFiles, LayerFiles, StepFiles, take_layer
from infer.files.tensors.tensor_info import TensorInfo
from infer.outputs import Pooling

Scale = Literal["softmax", "sigmoid", "raw"]

_SCALE_BY_PROBLEM: dict[str | None, Scale] = {
    None: "softmax",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "raw",
}
_OF_TOKENS = "ForTokenClassification"
# The function of sentence-transformers' cross-encoders that computes a score from a logit.
_SCALE_BY_CLASS: dict[object, Scale] = {
    "torch.nn.modules.linear.Identity": "raw",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}
_LAYER, _GGUF_LAYERS = "score", ("cls", "cls.output")
_OF_TEXTS = "ForSequenceClassification"
_POOLINGS: dict[object, Pooling] = {"cls": "cls", "mean": "mean"}
_POOLING_BY_NUMBER: dict[object, Pooling] = {1: "mean", 2: "cls"}  # llama.cpp's enum llama_pooling_type
_ACTIVATIONS: dict[object, ActivationName] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
_MODERN_BERT_EPS = 1e-5


@final
@dataclass(frozen=True)
class ClassifierFiles:
    """The layers from a pooled state to one logit per label.

    `scale` is the function that computes the values of a text: probabilities that add up to 1, a separate probability
    of each label, or the logits. If the last state is pooled, a text must not end with the token `pad_id`.
    """

    head: HeadFiles
    labels: tuple[str, ...]
    scale: Scale = "softmax"
    pooling: Pooling = "last"
    pad_id: int | None = None

    @property
    def reads_pairs(self) -> bool:
        """True for the head of an encoder, whose last token is like the others."""
        return self.pooling != "last"


def classifier_from_folder(
    folder: Path, config: Mapping[str, Any], tensors: MutableMapping[str, TensorInfo]
) -> ClassifierFiles | None:
    """Return the classifier of a folder, or None. Its tensors are removed from `tensors`.

    Raises UnsupportedModelError for labels of tokens, and ModelFormatError for labels that do not fit the weight.
    """
    take = take_encoder_head if form_of_family(config).is_encoder else _take_decoder_head
    if (found := take(folder, config, tensors)) is None:
        return None
    head, pooling = found
    path, given = folder / "config.json", config.get("id2label")
    labels = _labels(path, "id2label", _in_order(path, given) if given else None, head[-1])
    problem, pad_id = config.get("problem_type"), config.get("pad_token_id")
    if not (problem is None or isinstance(problem, str)) or problem not in _SCALE_BY_PROBLEM:
        known = ", ".join(name for name in _SCALE_BY_PROBLEM if name)
        raise ModelFormatError(path, "problem_type", f"expected one of {known}, got {problem!r:.60}")
    scale = _scale(problem, labels, _SCALE_BY_CLASS.get(_activation_of(config)))
    return ClassifierFiles(head, labels, scale, pooling, pad_id if type(pad_id) is int else None)


def _take_decoder_head(
    folder: Path, config: Mapping[str, Any], tensors: MutableMapping[str, TensorInfo]
) -> tuple[HeadFiles, Pooling] | None:
    if f"{_LAYER}.weight" not in tensors:
        return None
    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        if str(name).endswith(_OF_TOKENS):
            raise UnsupportedModelError(f"{folder.name}: {name!s:.80} labels tokens: supported are labels of texts")
    return (take_layer(tensors, _LAYER),), "last"


def _activation_of(config: Mapping[str, Any]) -> object:
    """Return the name of the class in a cross-encoder's config, or None."""
    own, older = config.get("sentence_transformers"), config.get("sbert_ce_default_activation_function")
    found = own.get("activation_fn", older) if isinstance(own, dict) else older
    return found if isinstance(found, str) else None


def classifier_from_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: MutableMapping[str, TensorInfo]
) -> ClassifierFiles | None:
    """Return the classifier of a GGUF file, or None. Its tensors are removed from `tensors`."""
    if (found := _take_gguf_head(path, metadata, tensors)) is None:
        return None
    head, pooling = found
    key = f"{metadata['general.architecture']}.classifier.output_labels"
    labels = _labels(path, key, metadata.get(key), head[-1])
    return ClassifierFiles(head, labels, _scale(None, labels), pooling)


def _in_order(path: Path, given: object) -> list[Any]:
    """Return the names of labels, ordered by the numbers that are the keys of `id2label`."""
    if not isinstance(given, dict) or set(given) != {str(index) for index in range(len(given))}:
        raise ModelFormatError(path, "id2label", f"expected a name for each number from 0, got {given!r:.80}")
    return [given[str(index)] for index in range(len(given))]


def _labels(path: Path, key: str, given: object, layer: StepFiles) -> tuple[str, ...]:
    """Return the names of the labels of a head's last layer. The default is the names that `transformers` uses."""
    assert isinstance(layer, LayerFiles)
    count = layer.weight.shape[0] if len(layer.weight.shape) == 2 else 0
    if not count:
        layer.weight.fail(f"expected one row per label, got the shape {layer.weight.shape}")
    if given is None:
        return tuple(f"LABEL_{index}" for index in range(count))
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given) or len(given) != count:
        raise ModelFormatError(path, key, f"expected {count} names, one per row of the weight, got {given!r:.80}")
    return tuple(given)


def _scale(problem: str | None, labels: tuple[str, ...], of_score: Scale | None = None) -> Scale:
    """Return the scale of a problem. One label has a probability, as in a cross-encoder, except in a regression.

    `of_score` is the files' scale for the score of one label.
    """
    if len(labels) == 1 and problem != "regression":
        return of_score or "sigmoid"
    return _SCALE_BY_PROBLEM[problem]


def take_encoder_head(
    folder: Path, config: Mapping[str, Any], tensors: MutableMapping[str, TensorInfo]
) -> tuple[HeadFiles, Pooling] | None:
    """Return the steps from a pooled state to the logits of labels, and the pooling, or None without labels.

    Their tensors are removed from `tensors`. Raises UnsupportedModelError for labels of anything except texts.
    """
    is_roberta = "classifier.out_proj.weight" in tensors
    if not is_roberta and "classifier.weight" not in tensors:
        return None
    named, kind = config.get("architectures"), config.get("model_type")
    for name in named if isinstance(named, list) else ():
        if not str(name).endswith(_OF_TEXTS):
            raise UnsupportedModelError(f"{folder.name}: {name!s:.80} does not label texts: use a model {_OF_TEXTS}")
    if is_roberta:
        activation: ActivationName = "gelu" if kind == "electra" else "tanh"
        first = _needed(folder, tensors, "classifier.dense")
        return (first, activation, take_layer(tensors, "classifier.out_proj")), "cls"
    labels = take_layer(tensors, "classifier")
    if kind != "modernbert":
        name, activation = ("pre_classifier", "relu") if kind == "distilbert" else ("pooler.dense", "tanh")
        return (_needed(folder, tensors, name), activation, labels), "cls"
    first = _needed(folder, tensors, "head.dense")
    path = folder / "config.json"
    pooling = _choice(path, "classifier_pooling", config.get("classifier_pooling", "cls"), _POOLINGS)
    activation = _choice(path, "classifier_activation", config.get("classifier_activation", "gelu"), _ACTIVATIONS)
    eps = _eps(path, "norm_eps", config.get("norm_eps", _MODERN_BERT_EPS))
    norm = _needed(folder, tensors, "head.norm", eps)
    return (first, activation, norm, labels), pooling


def _take_gguf_head(
    path: Path, metadata: Mapping[str, Any], tensors: MutableMapping[str, TensorInfo]
) -> tuple[HeadFiles, Pooling] | None:
    """Return the same for a GGUF file, also of a decoder.

    Raises UnsupportedModelError for a file without the head's first layer, which llama.cpp's converter leaves out of
    BERT's files. Without this layer, scores would differ from the model's.
    """
    architecture = str(metadata["general.architecture"])
    is_encoder = form_of(architecture).is_encoder
    lacking = [name for name in _GGUF_LAYERS if f"{name}.weight" not in tensors]
    if is_encoder and len(lacking) == 1:
        raise UnsupportedModelError(
            f"{path.name}: the head of labels lacks the tensor {lacking[0]}.weight, so its scores would be wrong: use "
            "the model's folder of safetensors"
        )
    *first, labels = (take_layer(tensors, name) if name not in lacking else None for name in _GGUF_LAYERS)
    if labels is None:
        return None
    dense = [each for each in first if each is not None]
    if not is_encoder:
        return (*(step for each in dense for step in (each, "tanh")), labels), "last"
    if architecture != "modern-bert":
        return (*dense, "tanh", labels), "cls"
    key = f"{architecture}.classifier.pooling_type"
    pooling = _choice(path, key, metadata.get(key, 1), _POOLING_BY_NUMBER)
    eps_key = f"{architecture}.attention.layer_norm_epsilon"
    eps = _eps(path, eps_key, shortest(metadata.get(eps_key, _MODERN_BERT_EPS)))
    norm = [take_layer(tensors, "cls.norm", eps)] if "cls.norm.weight" in tensors else []
    return (*dense, "gelu", *norm, labels), pooling


def _needed(
    folder: Path, tensors: MutableMapping[str, TensorInfo], prefix: str, eps: float | None = None
) -> LayerFiles:
    """Remove the tensors of a layer, and return it. Raises ModelFormatError if the files do not have it."""
    if (name := f"{prefix}.weight") not in tensors:
        raise ModelFormatError(folder, f"tensor {name!r}", "is missing: the head of labels needs it")
    return take_layer(tensors, prefix, eps)


def _choice(path: Path, key: str, given: object, known: Mapping[object, Any]) -> Any:
    supported = ", ".join(map(str, known))
    if not isinstance(given, str | int) or given not in known:
        raise UnsupportedModelError(f"{path.name}: {key} {given!r:.60} is not supported: supported are {supported}")
    return known[given]


def _eps(path: Path, key: str, given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < 1:
        raise ModelFormatError(path, key, f"expected a number between 0 and 1, got {given!r:.60}")
    return float(given)
