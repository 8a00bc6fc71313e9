"""Poolings, dense layers and labels after the states of a network → GGUF's keys and tensors."""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infer.errors import UnsupportedModelError
from infer.files import Checkpoint
from infer.files.gguf.gguf_writer import Value
from infer.files.gguf.quantised_file import SourceTensor
from infer.files.heads.classifier_files import ClassifierFiles, classifier_from_gguf
from infer.files.heads.head_files import DenseFiles, HeadFiles
from infer.files.heads.pooling import POOLING_BY_NUMBER, EmbeddingFiles
from infer.files.heads.reranker_files import RERANK_PROMPT, RerankerFiles
from infer.files.tensors.lazy_weights import LazyWeights
from infer.files.tensors.tensor_info import TensorInfo
from infer.models.gguf_export.tensors import as_floats, reordered, rows_of, source_tensor
from infer.text.tokenizer.tokenizer_files import read_folder

_RANK = 4  # llama.cpp's enum llama_pooling_type
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
    plan = HeadPlan({}, [])
    if checkpoint.embedding is not None:
        plan = _embedding(path, checkpoint.embedding)
    if checkpoint.classifier is not None:
        plan = _classifier(path, name, checkpoint.classifier, eps)
        if reranker is not None:
            plan.values["pooling_type"] = _RANK
    elif reranker is not None:
        plan = _answers(checkpoint, reranker)
    return plan


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
    values: dict[str, Value] = {"classifier.output_labels": list(_ANSWERS), "pooling_type": _RANK}
    prompt = RERANK_PROMPT if files.has_usual_prompt else None
    return HeadPlan(values, [source_tensor("cls.output.weight", rows.shape, rows)], prompt)


def _embedding(path: Path, files: EmbeddingFiles) -> HeadPlan:
    number = _NUMBERS.get(files.pooling)
    lacking = f"the pooling {files.pooling}" if number is None else None
    if any(not isinstance(step, DenseFiles) or step.bias is not None for step in files.head) or len(files.head) > 2:
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
    dense = [step for step in files.head if isinstance(step, DenseFiles)]
    tensors = _tensors(files.head, ("cls", "cls.output")[-len(dense) :])
    values: dict[str, Value] = {"classifier.output_labels": list(files.labels)}
    if files.pooling in ("mean", "cls"):
        values["classifier.pooling_type"] = _NUMBERS[files.pooling]
    file = dense[0].weight.file
    infos = {each.name: TensorInfo(file, each.name, each.type, each.shape, 0, 0) for each in tensors}
    metadata: dict[str, Any] = {f"{name}.{key}": each for key, each in values.items()}
    metadata |= {"general.architecture": name, f"{name}.attention.layer_norm_epsilon": eps}
    again = classifier_from_gguf(path, metadata, infos)
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
        step if isinstance(step, str) else "dense" if isinstance(step, DenseFiles) else f"a norm with eps {step.eps:g}"
        for step in head
    ]


def _tensors(head: HeadFiles, names: tuple[str, ...]) -> list[SourceTensor]:
    """Return the tensors of the head's layers. Dense layers get these names, and a norm has its own."""
    remaining, infos = list(names), dict[str, TensorInfo]()
    for step in head:
        if isinstance(step, str):
            continue
        module = remaining.pop(0) if isinstance(step, DenseFiles) else "cls.norm"
        infos[f"{module}.weight"] = step.weight
        if step.bias is not None:
            infos[f"{module}.bias"] = step.bias
    weights = LazyWeights(infos)
    return [source_tensor(each, weights[each].shape, rows_of(weights[each])) for each in infos]
