"""The calls about whole texts: `Embed`, `ScorePairs`, `Rerank`, `Classify` and `ScorePrompt`, each as one value.

`LLM`, `AsyncLLM`, the routes, the rows of batch files and the commands make a task of their arguments, and run it with
one of the functions below. A text's values have the same bits, whatever other texts are computed with it.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, Generic, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from infer.engine.requests.host import Host
from infer.engine.requests.loop_messages import Work
from infer.engine.requests.prompt_encoding import Prompt, is_conversation, pairs_of
from infer.engine.requests.text_heads import Classifier, Embedder, Reranker
from infer.engine.texts.text_ids import Computed, ReadText, TextIds, VectorOptions
from infer.engine.texts.text_reading import Check, read_pair, read_text, read_texts
from infer.engine.texts.text_states import values_of
from infer.engine.texts.token_trace import ids_to_score, score_prompt
from infer.errors import InvalidRequestError, TruncationWarning
from infer.outputs import Classification, RankedDocument, TokenLogprob, ranked

TextPair = tuple[str, str]
TextOrPair = Prompt | list[str] | tuple[str, ...]  # a pair has two texts
Result = TypeVar("Result")


class TextTask(ABC, Generic[Result]):
    """A call about texts: what the model reads, what the loop's thread computes, and what is made of it."""

    @abstractmethod
    def prepare(self, host: Host, check: Check) -> TextIds:
        """Return what the model reads. For any thread. `check` is called before each text, and may raise.

        Raises InvalidRequestError for an argument that breaks a rule, and ContextLengthError for a text that does not
        fit the context. If the task truncates, the text is cut at its end instead.
        """

    @abstractmethod
    def work(self, host: Host, texts: TextIds) -> Work[list[Any]]:
        """Return one value per text. It is work for the loop, step by step."""

    @abstractmethod
    def finish(self, host: Host, values: list[Any]) -> Result:
        """Return the result of a call from the values of its texts."""

    def group(self, host: Host) -> Hashable:
        """Return a key: one `work` may compute the texts of tasks with equal keys. None: only those of this task."""
        return None


def together(host: Host, asked: Sequence[tuple[TextTask[Result], TextIds]]) -> Work[list[Result]]:
    """Return the results of tasks of one group, with their prepared texts. It is work for the loop, step by step."""
    (first, ids), *_ = asked
    values = yield from first.work(host, ids._replace(texts=[text for _, ids in asked for text in ids.texts]))
    ends = accumulate(len(ids.texts) for _, ids in asked)
    return [task.finish(host, values[end - len(ids.texts) : end]) for (task, ids), end in zip(asked, ends, strict=True)]


def run(host: Host, task: TextTask[Result]) -> Result:
    """Return the result of a task. The caller's caller is warned if texts were cut."""
    texts = task.prepare(host, lambda: None)
    warn_if_cut(texts, stacklevel=4)
    (result,) = host.loop.call(together(host, [(task, texts)])).get()
    return result


async def compute(host: Host, task: TextTask[Any]) -> Computed:
    """Return the result of a task with its texts, for an event loop. It warns of nothing."""
    texts = await host.answers.prepare(partial(task.prepare, host))
    (result,) = await host.answers.call(together(host, [(task, texts)]))
    return Computed(result, texts)


def warn_if_cut(texts: TextIds, stacklevel: int) -> None:
    """Warn about texts that were cut. `stacklevel` is the parameter of the standard library."""
    if texts.warning:
        warnings.warn(texts.warning, TruncationWarning, stacklevel=stacklevel)


# Vectors


@final
@dataclass(frozen=True)
class Embed(TextTask[Float[Tensor, "texts size"]]):
    """One float32 vector per text: its pooled states after the layers of the model's head, cut and normalised."""

    texts: Sequence[Prompt]
    options: VectorOptions

    def prepare(self, host: Host, check: Check) -> TextIds:
        embedder, options, heads = embedder_of(host), self.options, host.settings.heads
        options.check(embedder.size)
        host.check_has_states()
        before = heads.prompts.text_of(options.prompt_name)
        num_first = _num_prompt_tokens(host, before) if embedder.skips_prompt else 0

        def read(text: Prompt) -> ReadText:
            if isinstance(text, str):
                found = read_text(host, before + text, truncate=options.truncate)
                return found._replace(num_skipped=num_first if num_first < len(found.ids) else 0)
            if options.prompt_name is not None:
                raise InvalidRequestError("prompt_name needs texts, got ids or messages: leave it out")
            return read_text(host, text, truncate=options.truncate)

        return read_texts(host, (text for text, _ in pairs_of(self.texts, None)), read, check)

    def work(self, host: Host, texts: TextIds) -> Work[list[Tensor]]:
        embedder = embedder_of(host)
        return values_of(host, texts, self.options.pooling or embedder.pooling, embedder.head.of)

    def finish(self, host: Host, values: list[Tensor]) -> Float[Tensor, "texts size"]:
        embedder, options = embedder_of(host), self.options
        vectors = torch.stack(values) if values else torch.zeros(0, embedder.size)
        vectors = vectors[:, : options.dimensions]
        is_normalized = embedder.normalizes if options.normalize is None else options.normalize
        return (torch.nn.functional.normalize(vectors) if is_normalized else vectors).float()

    def group(self, host: Host) -> Hashable:
        return Embed, self.options.pooling


def embedder_of(host: Host) -> Embedder:
    """Return how the model makes vectors. The default is the mean, if the model's files have no setting."""
    return host.settings.heads.embedder or Embedder(host.model.architecture.hidden_size)


def _num_prompt_tokens(host: Host, before: str) -> int:
    """Return the number of a prompt's tokens, without a special token at its end, like sentence-transformers."""
    ids = host.tokenizer.encode(before) if before else []
    return len(ids[:-1] if ids and ids[-1] in host.tokenizer.special_token_ids else ids)


# Scores


@final
@dataclass(frozen=True)
class ScorePairs(TextTask[list[float]]):
    """The score of each query and document: by a reranker, which reads both, or the cosine of their vectors.

    A model that is not a reranker compares vectors if its files were made for embeddings, or with `may_compare`.
    """

    pairs: Sequence[TextPair]
    instruction: str | None = None
    _: KW_ONLY
    truncate: bool = False
    may_compare: bool = False

    def prepare(self, host: Host, check: Check) -> TextIds:
        instruction = self.instruction
        if self._compares(host):
            if instruction is not None:
                message = "instruction must be left out: this model compares vectors, without a prompt"
                raise InvalidRequestError(message, param="instruction")
            return self._vectors.prepare(host, check)
        reranker = reranker_of(host)
        host.check_has_states()
        _check_text("instruction", instruction if instruction is not None else "")
        if instruction is not None and not reranker.takes_instruction:
            raise InvalidRequestError("instruction must be left out: this model's prompt has none", param="instruction")
        encode = partial(reranker.encode, host.tokenizer, instruction)

        def checked() -> Iterator[TextPair]:
            for index, (query, document) in enumerate(self.pairs):
                _check_text("query", query)
                _check_text("document", document, f" {index}")
                yield query, document

        def read(pair: TextPair) -> ReadText:
            return read_pair(host, encode, *pair, truncate=self.truncate)

        return read_texts(host, checked(), read, check, "document")

    def work(self, host: Host, texts: TextIds) -> Work[list[Any]]:
        if self._compares(host):
            return self._vectors.work(host, texts)
        reranker = reranker_of(host)
        return values_of(host, texts, reranker.pooling, reranker.score)

    def finish(self, host: Host, values: list[Any]) -> list[float]:
        return cosines(self.pairs, self._vectors.finish(host, values)) if self._compares(host) else values

    def group(self, host: Host) -> Hashable:
        """Return a key. A decoder reads the beginning of a query's pairs once, so it shares no step with others."""
        if self._compares(host) or host.reads_whole_texts or len(self.pairs) == 1:
            return ScorePairs
        return ScorePairs, self.instruction, frozenset(query for query, _ in self.pairs)

    def _compares(self, host: Host) -> bool:
        heads = host.settings.heads
        return heads.reranker is None and (heads.embedder is not None or self.may_compare)

    @cached_property
    def _vectors(self) -> Embed:
        return Embed(texts_of_pairs(self.pairs), VectorOptions(normalize=True, truncate=self.truncate))


@final
@dataclass(frozen=True)
class Rerank(TextTask[list[RankedDocument]]):
    """Documents by the scores of a query with them, the most relevant first."""

    query: str
    documents: Sequence[str]
    top_n: int | None = None
    instruction: str | None = None
    _: KW_ONLY
    truncate: bool = False
    may_compare: bool = False

    def prepare(self, host: Host, check: Check) -> TextIds:
        documents, top_n = self.documents, self.top_n
        if isinstance(documents, str) or not isinstance(documents, Sequence):
            message = f"documents must be a list of texts, got {type(documents).__name__}"
            raise InvalidRequestError(message, param="documents")
        if top_n is not None and (type(top_n) is not int or top_n < 1):
            raise InvalidRequestError(f"top_n must be a whole number of at least 1, got {top_n!r:.40}", param="top_n")
        return self.scores.prepare(host, check)

    def work(self, host: Host, texts: TextIds) -> Work[list[Any]]:
        return self.scores.work(host, texts)

    def finish(self, host: Host, values: list[Any]) -> list[RankedDocument]:
        return ranked(self.scores.finish(host, values), self.documents, self.top_n)

    def group(self, host: Host) -> Hashable:
        return self.scores.group(host)

    @cached_property
    def scores(self) -> ScorePairs:
        pairs = [(self.query, each) for each in self.documents]
        return ScorePairs(pairs, self.instruction, truncate=self.truncate, may_compare=self.may_compare)


def reranker_of(host: Host) -> Reranker:
    """Return the reranker of a model. Raises InvalidRequestError if the model is not a reranker."""
    if host.settings.heads.reranker is None:
        raise InvalidRequestError(
            "this model is not a reranker and was not made for embeddings, as far as its files say: load a reranker, "
            "or pass reranker='qwen3' for a copy of Qwen3-Reranker"
        )
    return host.settings.heads.reranker


def _check_text(name: str, value: object, where: str = "") -> None:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name}{where} must be a text, got {type(value).__name__}", param=name)


def texts_of_pairs(pairs: Sequence[TextPair]) -> list[str]:
    """Return the texts to embed: the second text of each pair, then each different first text once."""
    return [*(second for _, second in pairs), *dict.fromkeys(first for first, _ in pairs)]


def cosines(pairs: Sequence[TextPair], vectors: Float[Tensor, "texts size"]) -> list[float]:
    """Return the cosine of each pair, from −1 to 1. `vectors` are those of `texts_of_pairs`, of length 1.

    Each sum is computed separately in float64, so a cosine's bits depend only on its own pair. Vectors are rounded, so
    the cosine of a text with itself may be slightly above 1.
    """
    firsts, wide = dict.fromkeys(first for first, _ in pairs), vectors.double()
    places = {first: len(pairs) + at for at, first in enumerate(firsts)}
    sums = (float((wide[places[first]] * wide[at]).sum()) for at, (first, _) in enumerate(pairs))
    return [max(-1.0, min(1.0, each)) for each in sums]


# Labels


@final
@dataclass(frozen=True)
class Classify(TextTask[list[list[float]]]):
    """The value of each label per text or pair of texts, in the order of the labels."""

    texts: Sequence[TextOrPair]
    _: KW_ONLY
    truncate: bool = False

    def prepare(self, host: Host, check: Check) -> TextIds:
        classifier, given = classifier_of(host), self.texts
        host.check_has_states()
        if isinstance(given, str | bytes) or not isinstance(given, Sequence):
            raise InvalidRequestError(f"texts must be a list of texts or pairs of texts, got {type(given).__name__}")
        texts = read_texts(host, given, partial(self._read, host), check)
        if classifier.pooling != "last":
            return texts
        return texts._replace(texts=[_without_padding(text, classifier.pad_id) for text in texts.texts])

    def _read(self, host: Host, text: Any) -> ReadText:
        if not (isinstance(text, list | tuple) and any(isinstance(each, str) for each in text)):
            if is_conversation(text):
                raise InvalidRequestError(
                    "a classifier reads a text, ids or a pair of texts, got messages: render them"
                )
            return read_text(host, text, truncate=self.truncate)
        if len(text) != 2 or not all(isinstance(each, str) for each in text):
            other = next((type(each).__name__ for each in text if not isinstance(each, str)), len(text))
            raise InvalidRequestError(f"a pair must be two texts, got {other}")
        return read_pair(host, host.tokenizer.encode_pair, *text, truncate=self.truncate)

    def work(self, host: Host, texts: TextIds) -> Work[list[list[float]]]:
        classifier = classifier_of(host)
        return values_of(host, texts, classifier.pooling, classifier.values)

    def finish(self, host: Host, values: list[list[float]]) -> list[list[float]]:
        return values

    def group(self, host: Host) -> Hashable:
        return Classify


def _without_padding(text: ReadText, pad_id: int | None) -> ReadText:
    """Return the text up to its last token that is not padding, but at least one, as `transformers` pools it."""
    ids, count = text.ids, len(text.ids)
    while count > 1 and ids[count - 1] == pad_id:
        count -= 1
    return text._replace(ids=ids[:count])


def classifier_of(host: Host) -> Classifier:
    """Return the classifier of a model. Raises InvalidRequestError if the model is not a classifier."""
    if (found := host.settings.heads.classifier) is None:
        raise InvalidRequestError(
            "this model is not a classifier: its files have no weight of labels, such as the score.weight of a "
            "Qwen3ForSequenceClassification or the classifier.weight of a BertForSequenceClassification. Load a "
            "classifier"
        )
    return found


def classifications(host: Host, values: list[list[float]]) -> list[Classification]:
    """Return the labels of each text, the most probable first. If two are equal, the first label comes first."""
    labels = classifier_of(host).labels
    orders = [sorted(range(len(labels)), key=lambda index: -each[index]) for each in values]
    return [
        Classification(tuple(labels[index] for index in order), tuple(each[index] for index in order))
        for order, each in zip(orders, values, strict=True)
    ]


# Prompts


@final
@dataclass(frozen=True)
class ScorePrompt(TextTask[list[TokenLogprob | None]]):
    """The log-probability of each token of a prompt, with the `num` likeliest tokens; None for the first token."""

    prompt: Prompt
    _: KW_ONLY
    num: int = 0

    def prepare(self, host: Host, check: Check) -> TextIds:
        ids = ids_to_score(host, self.prompt, self.num)
        return TextIds([ReadText(ids)], host.requests.limits.max_seq_len)

    def work(self, host: Host, texts: TextIds) -> Work[list[list[TokenLogprob | None]]]:
        return [(yield from score_prompt(host, texts.texts[0].ids, self.num))]

    def finish(self, host: Host, values: list[list[TokenLogprob | None]]) -> list[TokenLogprob | None]:
        return values[0]
