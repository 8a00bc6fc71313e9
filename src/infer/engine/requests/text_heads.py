"""The facts that a model's files define, and its heads for whole texts: how to make vectors, scores and labels."""

import math
import re
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self, final

import torch
from jaxtyping import Float
from torch import Tensor

from infer.compute.operands.architecture import Architecture
from infer.compute.sampling.keywords import SamplingDefaults
from infer.errors import ModelError
from infer.files import Checkpoint
from infer.files.heads.classifier_files import Scale
from infer.files.heads.pooling import EmbeddingFiles, check_head
from infer.files.heads.reranker_files import COPY, RERANK_INSTRUCTION, RERANK_PROMPT, RerankerFiles, Row, head_of
from infer.files.heads.sentence_modules import TextPrompts
from infer.files.tensors.lazy_weights import read_row
from infer.files.tensors.tensor_info import TensorInfo
from infer.model_settings import RerankerName
from infer.models.pooled_head import DenseLayer, Head, load_head
from infer.outputs import Pooling
from infer.text.tokenizer import Tokenizer
from infer.text.tokenizer.tokenizers_library import EncodedPair

_INSTRUCTION, _QUERY, _DOCUMENT = (f"{{{{ messages[{index}].content }}}}" for index in range(3))
_ROLES = [re.compile(f"[\"']{role}[\"']") for role in ("query", "document")]


@final
@dataclass(frozen=True, eq=False)
class Embedder:
    """The steps from a text's states to a vector of `size` values: `files` has the pooling, `head` the layers after."""

    size: int
    files: EmbeddingFiles = field(default_factory=partial(EmbeddingFiles, "mean"))
    head: Head = field(default_factory=Head)


@final
@dataclass(frozen=True, eq=False)
class Classifier:
    """A head with one logit per label, and the function that computes the values of a text from these logits.

    If the last state is pooled, a text must not end with the token `pad_id`.
    """

    head: Head
    labels: tuple[str, ...]
    scale: Scale
    pooling: Pooling = "last"
    pad_id: int | None = None

    def values(self, state: Float[Tensor, "hidden"]) -> list[float]:
        """Return the value of each label from a float64 state."""
        logits = self.head.of(state)
        match self.scale:
            case "softmax":
                logits = logits.softmax(-1)
            case "sigmoid":
                logits = logits.sigmoid()
        values: list[float] = logits.tolist()
        return values


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

    def logit(self, state: Float[Tensor, "hidden"]) -> float:
        """Return the logit of the document's relevance from a float64 state."""
        yes, *no = self.head.of(state).tolist()
        logit: float = yes - sum(no)
        return logit

    def score(self, state: Float[Tensor, "hidden"]) -> float:
        """Return the probability that the document is relevant, or its logit, from a float64 state."""
        logit = self.logit(state)
        if self.scale == "raw":
            return logit
        return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))


@final
@dataclass(frozen=True, eq=False)
class TextHeads:
    """The heads that a model's files have. Each is None if the model was not made for it."""

    embedder: Embedder | None = None
    prompts: TextPrompts = field(default_factory=TextPrompts)
    reranker: Reranker | None = None
    classifier: Classifier | None = None

    def of_network(self, architecture: Architecture) -> Self:
        """Return the heads of the loaded network: an encoder without labels makes vectors, even if no file says how."""
        if self.embedder or self.classifier or not architecture.reads_whole_texts:
            return self
        return replace(self, embedder=Embedder(architecture.hidden_size))


@final
@dataclass(frozen=True)
class ModelFacts:
    """The part of a model that its files define, beside its network.

    `weights` is the fingerprint of the weights in their number formats.
    """

    tokenizer: Tokenizer
    weights: str
    sampling_defaults: SamplingDefaults
    heads: TextHeads
    kernels: str  # kind of the kernels that compute the network
    modified_ns: tuple[int, ...]  # times of the files, which distinguish weights of the same name for prefixes on disk


def make_text_heads(checkpoint: Checkpoint, tokenizer: Tokenizer, reranker: RerankerName) -> TextHeads:
    """Return the heads of a model, with their weights. Raises ModelError for files that do not fit each other."""
    size = _state_size(checkpoint)
    embedder = classifier = None
    if (files := checkpoint.embedding) is not None:
        embedder = Embedder(check_head(files.head, size), files, load_head(files.head))
    if (found := checkpoint.classifier) is not None:
        check_head(found.head, size)
        classifier = Classifier(load_head(found.head), found.labels, found.scale, found.pooling, found.pad_id)
    return TextHeads(embedder, checkpoint.prompts, make_reranker(checkpoint, tokenizer, reranker), classifier)


def _state_size(checkpoint: Checkpoint) -> int:
    """Return the size of a state: the embedding's, or the config's if the files have it under another name."""
    embedding, given = checkpoint.tensors.get("model.embed_tokens.weight"), checkpoint.config.get("hidden_size")
    if embedding is not None and embedding.shape:
        return embedding.shape[-1]
    return given if type(given) is int else 0  # the loader refuses such files


def make_reranker(checkpoint: Checkpoint, tokenizer: Tokenizer, name: RerankerName) -> Reranker | None:
    """Return the reranker of a model, or None. The `name` of copies makes one without files that define one.

    Raises ModelError if the tokenizer does not have the answers as tokens.
    """
    files = checkpoint.reranker
    if files is None:
        answers = head_of(checkpoint.tensors)
        if name == "auto" or answers is None or checkpoint.classifier is not None:
            return None
        files = RerankerFiles(answers)
    if files.reads_pairs or not files.tensor:
        classifier = checkpoint.classifier
        assert classifier is not None
        head = load_head(classifier.head)
        if files.reads_pairs:
            return Reranker(head, None, None, False, True, classifier.pooling, classifier.scale)
    else:
        head = _head_of_answers(files.tensor, files, tokenizer)
    own = tokenizer.chat_template or ""
    if files.prompt is not None:
        template, takes_instruction = _template_of(files.prompt)
        return Reranker(head, template, RERANK_INSTRUCTION if takes_instruction else None, takes_instruction)
    if name == "auto" and all(role.search(own) for role in _ROLES):
        return Reranker(head, None, checkpoint.prompts.text_of(None) or None)
    if name == COPY or files.has_usual_prompt:
        return Reranker(head, _template_of(RERANK_PROMPT)[0], RERANK_INSTRUCTION)
    return None  # no file defines how the model reads a pair


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
    text = text.replace(RERANK_INSTRUCTION, _INSTRUCTION)
    return (text[:-1] + "{{ '\\n' }}" if text.endswith("\n") else text), _INSTRUCTION in text
