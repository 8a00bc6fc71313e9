"""A reranker: how a query and a document become ids together, and the head that computes a score from a state."""

import math
import re
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from infer.errors import ModelError
from infer.files import Checkpoint
from infer.files.heads.classifier_files import Scale
from infer.files.heads.reranker_files import QWEN3_INSTRUCTION, QWEN3_PROMPT, RerankerFiles, Row, head_of
from infer.files.tensors.lazy_weights import read_row
from infer.files.tensors.tensor_info import TensorInfo
from infer.model_settings import RerankerName
from infer.models.pooled_head import DenseLayer, Head, load_head
from infer.outputs import Pooling
from infer.text.tokenizer import Tokenizer
from infer.text.tokenizer.pairs import EncodedPair

_INSTRUCTION, _QUERY, _DOCUMENT = (f"{{{{ messages[{index}].content }}}}" for index in range(3))
_ROLES = [re.compile(f"[\"']{role}[\"']") for role in ("query", "document")]


@final
@dataclass(frozen=True, eq=False)
class Reranker:
    """How a model reads a query and a document, and the head that computes one logit, or one each for yes and no.

    If `template` is None, the model's own chat template is used, with messages of the roles query and document.
    `instruction` is used by calls that give none. With `reads_pairs`, the tokenizer's format for pairs replaces the
    template. If `scale` is "raw", the logit is the score.
    """

    head: Head
    template: str | None
    instruction: str | None
    takes_instruction: bool = True
    reads_pairs: bool = False
    pooling: Pooling = "last"
    scale: Scale = "sigmoid"

    def encode(self, tokenizer: Tokenizer, instruction: str | None, query: str, document: str) -> EncodedPair:
        """Return a query and a document as the model reads them. Raises InvalidRequestError."""
        if self.reads_pairs:
            return tokenizer.encode_pair(query, document)
        instruction = self.instruction if instruction is None else instruction
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        if instruction is not None or self.template is not None:
            messages.insert(0, {"role": "system", "content": instruction or ""})
        return EncodedPair.of_one(tokenizer.encode_chat(messages, chat_template=self.template))

    def score(self, state: Float[Tensor, "hidden"]) -> float:
        """Return the probability that the document is relevant, or its logit, from a float64 state."""
        yes, *no = self.head.of(state).tolist()
        logit: float = yes - sum(no)
        if self.scale == "raw":
            return logit
        return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))


def make_reranker(checkpoint: Checkpoint, tokenizer: Tokenizer, name: RerankerName) -> Reranker | None:
    """Return the reranker of a model, or None. `name` "qwen3" makes one even if the model's files do not define one.

    Raises ModelError if the tokenizer does not have the answers as tokens.
    """
    files = checkpoint.reranker
    if files is None:
        answers = head_of(checkpoint.tensors)
        if name == "auto" or answers is None or checkpoint.classifier is not None:
            return None
        files = RerankerFiles(answers)
    if files.reads_pairs:
        classifier = checkpoint.classifier
        assert classifier is not None
        pooling, scale = classifier.pooling, classifier.scale
        return Reranker(
            load_head(classifier.head),
            None,
            None,
            takes_instruction=False,
            reads_pairs=True,
            pooling=pooling,
            scale=scale,
        )
    head = _head_of_answers(files.tensor, files, tokenizer) if files.tensor else _head_of_classifier(checkpoint)
    own = tokenizer.chat_template or ""
    if files.prompt is not None:
        template, takes_instruction = _template_of(files.prompt)
        return Reranker(head, template, QWEN3_INSTRUCTION if takes_instruction else None, takes_instruction)
    if name == "auto" and all(role.search(own) for role in _ROLES):
        return Reranker(head, None, checkpoint.prompts.text_of(None) or None)
    if name == "qwen3" or files.is_qwen3:
        return Reranker(head, _template_of(QWEN3_PROMPT)[0], QWEN3_INSTRUCTION)
    return None  # no file defines how the model reads a pair


def _head_of_classifier(checkpoint: Checkpoint) -> Head:
    assert checkpoint.classifier is not None
    return load_head(checkpoint.classifier.head)


def _head_of_answers(tensor: TensorInfo, files: RerankerFiles, tokenizer: Tokenizer) -> Head:
    """Return a head with only the rows of the answers."""
    answers = [files.yes] if files.no is None else [files.yes, files.no]
    return Head((DenseLayer(torch.stack([_row_of(tensor, each, tokenizer) for each in answers])),))


def _row_of(tensor: TensorInfo, row: Row, tokenizer: Tokenizer) -> Float[Tensor, "hidden"]:
    if isinstance(row, str):
        ids = tokenizer.encode(row, add_special_tokens=False)
        if len(ids) != 1:
            raise ModelError(f"a reranker needs {row!r} as one token, but this tokenizer makes {len(ids)} tokens of it")
        row = ids[0]
    if row >= tensor.shape[0]:
        raise ModelError(f"the reranker's token {row} is not one of the {tensor.shape[0]} rows of the head")
    return read_row(tensor, row)


def _template_of(prompt: str) -> tuple[str, bool]:
    """Return llama.cpp's prompt as a chat template, and True if it has the instruction that a call may replace.

    The template ends with an expression, because Jinja drops a newline at its end.
    """
    text = prompt.replace("{query}", _QUERY).replace("{document}", _DOCUMENT)
    text = text.replace(QWEN3_INSTRUCTION, _INSTRUCTION)
    return (text[:-1] + "{{ '\\n' }}" if text.endswith("\n") else text), _INSTRUCTION in text
