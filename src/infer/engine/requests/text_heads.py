"""The heads of a model for whole texts: how its files define vectors, scores and labels."""

from dataclasses import dataclass, field, replace
from typing import Self, final

from infer.compute.operands.architecture import Architecture
from infer.engine.requests.reranker import Reranker, make_reranker
from infer.files import Checkpoint
from infer.files.heads.classifier_files import Scale
from infer.files.heads.head_files import check_head
from infer.files.heads.text_prompts import TextPrompts
from infer.model_settings import RerankerName
from infer.models.pooled_head import Head, load_head
from infer.outputs import Pooling
from infer.text.tokenizer import Tokenizer


@final
@dataclass(frozen=True, eq=False)
class Embedder:
    """How states become a vector of `size` values.

    If `normalizes`, vectors have length 1. If `skips_prompt`, the tokens of a prompt are not pooled.
    """

    size: int
    pooling: Pooling = "mean"
    head: Head = field(default_factory=Head)
    normalizes: bool = True
    skips_prompt: bool = False


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


def make_text_heads(checkpoint: Checkpoint, tokenizer: Tokenizer, reranker: RerankerName) -> TextHeads:
    """Return the heads of a model, with their weights. Raises ModelError for files that do not fit each other."""
    size = _state_size(checkpoint)
    embedder = classifier = None
    if (files := checkpoint.embedding) is not None:
        outputs = check_head(files.head, size)
        embedder = Embedder(outputs, files.pooling, load_head(files.head), files.normalizes, files.skips_prompt)
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
