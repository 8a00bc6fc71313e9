"""Rerankers that are decoders, as their files describe them: which rows, multiplied with the last state, give a score.

The probability that a document is relevant is sigmoid((t − f) · h). h is the last state, t the row of the head for the
answer "yes", f the row for "no". A classifier of one label has t only.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from infer.checkpoint.tensor_info import TensorInfo
from infer.errors import UnsupportedModelError
from infer.system.json_file import MAX_BYTES, inside, parse_json, read_json_file, read_whole

_QWEN3 = "qwen3-reranker"  # in the names of models whose files say nothing
_RANK = 4  # llama.cpp's enum llama_pooling_type
_CLASSIFIERS = ("score.weight", "cls.output.weight")  # of Hugging Face and of GGUF

Row = int | str  # its number, or the text of the token that has it


@final
@dataclass(frozen=True)
class RerankerFiles:
    """The rows `yes` and `no` of a tensor. `is_qwen3` is True for models that read Qwen3-Reranker's prompt.

    `prompt` is the prompt of a GGUF file, with `{query}` and `{document}`.
    """

    tensor: TensorInfo
    yes: Row = "yes"
    no: Row | None = "no"
    is_qwen3: bool = True
    prompt: str | None = None


def reranker_from_folder(
    folder: Path, config: Mapping[str, Any], tensors: MutableMapping[str, TensorInfo]
) -> RerankerFiles | None:
    """Return the reranker of a folder, or None. The tensor of a classifier is removed from `tensors`."""
    is_qwen3 = any(_QWEN3 in part.lower() for part in folder.resolve().parts[-4:])
    if (classifier := _take_classifier(folder, tensors)) is not None:
        if classifier.shape[0] != 1:
            problem = f"its classifier has {classifier.shape[0]} labels, supported is 1"
            raise UnsupportedModelError(f"{folder.name}: {problem}")
        return RerankerFiles(classifier, 0, None, is_qwen3)
    if (head := head_of(tensors)) is None:
        return None
    if (found := _logit_score(folder)) is not None:
        return RerankerFiles(head, *found, is_qwen3)
    return RerankerFiles(head) if is_qwen3 else None


def reranker_from_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: MutableMapping[str, TensorInfo]
) -> RerankerFiles | None:
    """Return the reranker of a GGUF file, or None. The tensor of a classifier is removed from `tensors`."""
    names = str(metadata.get("general.name", "")).replace(" ", "-"), *path.resolve().parts[-4:]
    is_qwen3 = any(_QWEN3 in name.lower() for name in names)
    classifier, head = _take_classifier(path, tensors), head_of(tensors)
    is_reranker = metadata.get(f"{metadata['general.architecture']}.pooling_type") == _RANK
    if not (is_reranker or is_qwen3) or head is None:
        return None
    prompt = metadata.get("tokenizer.chat_template.rerank")
    given = prompt if isinstance(prompt, str) else None
    if classifier is None:
        return RerankerFiles(head, prompt=given)
    return RerankerFiles(classifier, 0, 1 if classifier.shape[0] > 1 else None, is_qwen3, given)


def head_of(tensors: Mapping[str, TensorInfo]) -> TensorInfo | None:
    """Return the tensor of the head, which is the embedding if the two are tied."""
    return tensors.get("lm_head.weight", tensors.get("model.embed_tokens.weight"))


def _take_classifier(path: Path, tensors: MutableMapping[str, TensorInfo]) -> TensorInfo | None:
    for name in _CLASSIFIERS:
        if (found := tensors.get(name)) is None:
            continue
        del tensors[name]
        embedding = tensors.get("model.embed_tokens.weight")
        if len(found.shape) != 2 or not found.shape[0] or embedding is None or found.shape[1] != embedding.shape[-1]:
            raise UnsupportedModelError(f"{path.name}: the classifier {name} has the shape {tuple(found.shape)}")
        return found
    return None


def _logit_score(folder: Path) -> tuple[int, int | None] | None:
    """Return the ids of the tokens that sentence-transformers' module LogitScore compares, if the folder has one."""
    if not (path := folder / "modules.json").exists():
        return None
    modules = parse_json(path, b'{"modules": ' + read_whole(inside(folder, path.name), MAX_BYTES) + b"}")["modules"]
    for module in modules if isinstance(modules, list) else ():
        if isinstance(module, dict) and str(module.get("type")).endswith(".LogitScore"):
            config = read_json_file(inside(folder, f"{module.get('path')}/config.json"))
            yes, no = config.get("true_token_id"), config.get("false_token_id")
            if type(yes) is not int or not (no is None or type(no) is int):
                raise UnsupportedModelError(
                    f"{folder.name}: LogitScore must have ids as true_token_id and false_token_id, got {yes!r:.40} "
                    f"and {no!r:.40}"
                )
            return yes, no
    return None
