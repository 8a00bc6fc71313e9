"""Heads of encoders that label texts: the layers after the first token's state, or after the mean of all states.

BERT has a dense layer, tanh and the labels' layer. RoBERTa has the same under other names. ELECTRA and DistilBERT have
GELU and ReLU instead of tanh, and ModernBERT has an activation and a norm in between.
"""

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from infer.errors import ModelFormatError, UnsupportedModelError
from infer.files.gguf.gguf_values import shortest
from infer.files.heads.head_files import ActivationName, HeadFiles, LayerNormFiles, take_dense, take_layer_norm
from infer.files.tensors.tensor_info import TensorInfo
from infer.outputs import Pooling

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
_GGUF_LAYERS = ("cls", "cls.output")


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
        _check_all(folder, tensors, "classifier.dense.weight")
        activation: ActivationName = "gelu" if kind == "electra" else "tanh"
        return (take_dense(tensors, "classifier.dense"), activation, take_dense(tensors, "classifier.out_proj")), "cls"
    labels = take_dense(tensors, "classifier")
    if kind != "modernbert":
        first, activation = ("pre_classifier", "relu") if kind == "distilbert" else ("pooler.dense", "tanh")
        _check_all(folder, tensors, f"{first}.weight")
        return (take_dense(tensors, first), activation, labels), "cls"
    _check_all(folder, tensors, "head.dense.weight", "head.norm.weight")
    path = folder / "config.json"
    pooling = _choice(path, "classifier_pooling", config.get("classifier_pooling", "cls"), _POOLINGS)
    activation = _choice(path, "classifier_activation", config.get("classifier_activation", "gelu"), _ACTIVATIONS)
    norm = take_layer_norm(tensors, "head.norm", _eps(path, "norm_eps", config.get("norm_eps", _MODERN_BERT_EPS)))
    return (take_dense(tensors, "head.dense"), activation, norm, labels), pooling


def take_gguf_encoder_head(
    path: Path, metadata: Mapping[str, Any], tensors: MutableMapping[str, TensorInfo]
) -> tuple[HeadFiles, Pooling] | None:
    """Return the same for a GGUF file.

    Raises UnsupportedModelError for a file without the head's first layer, which llama.cpp's converter leaves out of
    BERT's files. Without this layer, scores would differ from the model's.
    """
    found = [f"{name}.weight" in tensors for name in _GGUF_LAYERS]
    if not any(found):
        return None
    if not all(found):
        lacking = _GGUF_LAYERS[found.index(False)]
        raise UnsupportedModelError(
            f"{path.name}: the head of labels lacks the tensor {lacking}.weight, so its scores would be wrong: use "
            "the model's folder of safetensors"
        )
    first, labels = (take_dense(tensors, name) for name in _GGUF_LAYERS)
    architecture = str(metadata["general.architecture"])
    if architecture != "modern-bert":
        return (first, "tanh", labels), "cls"
    key = f"{architecture}.classifier.pooling_type"
    pooling = _choice(path, key, metadata.get(key, 1), _POOLING_BY_NUMBER)
    eps_key = f"{architecture}.attention.layer_norm_epsilon"
    eps = _eps(path, eps_key, shortest(metadata.get(eps_key, _MODERN_BERT_EPS)))
    norm: tuple[LayerNormFiles, ...] = ()
    if "cls.norm.weight" in tensors:
        norm = (take_layer_norm(tensors, "cls.norm", eps),)
    return (first, "gelu", *norm, labels), pooling


def _check_all(folder: Path, tensors: Mapping[str, TensorInfo], *names: str) -> None:
    for name in names:
        if name not in tensors:
            raise ModelFormatError(folder, f"tensor {name!r}", "is missing: the head of labels needs it")


def _choice(path: Path, key: str, given: object, known: Mapping[object, Any]) -> Any:
    if not isinstance(given, str | int) or given not in known:
        raise UnsupportedModelError(f"{path.name}: {key} {given!r:.60} is not supported: supported are {_names(known)}")
    return known[given]


def _names(known: Mapping[object, Any]) -> str:
    return ", ".join(map(str, known))


def _eps(path: Path, key: str, given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < 1:
        raise ModelFormatError(path, key, f"expected a number between 0 and 1, got {given!r:.60}")
    return float(given)
