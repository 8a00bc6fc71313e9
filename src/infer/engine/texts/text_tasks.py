"""The calls about whole texts, each as one value: `embed`, `score_pairs`, `rerank`, `classify` and `prompt_logprobs`.

`LLM`, `AsyncLLM`, the rows of batch files and the commands make a task of their arguments, and run it alone or
`together` with others. A text's values have the same bits, whatever other texts are computed with it.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Generic, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from infer.engine.requests.answer import Check, Work
from infer.engine.requests.host import Host
from infer.engine.requests.prompt_batch import pairs_of
from infer.engine.requests.prompt_encoding import Prompt, is_conversation
from infer.engine.requests.text_heads import Classifier, Embedder, Reranker
from infer.engine.texts.text_ids import Computed, ReadText, TextIds, VectorOptions
from infer.engine.texts.text_states import read_pair, read_text, read_texts, values_of
from infer.engine.texts.token_trace import ids_to_score, score_prompt
from infer.errors import InvalidRequestError, TruncationWarning
from infer.files.heads.reranker_files import COPY_HINT
from infer.outputs import Classification, RankedDocument, TokenLogprob, ranked

TextPair = tuple[str, str]
TextOrPair = Prompt | list[str] | tuple[str, ...]  # a pair has two texts
Result = TypeVar("Result")
_Other = TypeVar("_Other")


@final
@dataclass(frozen=True)
class TextTask(Generic[Result]):
    """A call about texts, in three parts: preparing ids, computing values on the loop's thread, and making the result.

    `prepare` returns the ids of each text. Any thread may call it. It calls `check`, which may raise, before each text,
    and raises InvalidRequestError for a text that cannot be read. `work` computes one value per text, step by step, and
    `finish` returns the result. One `work` may compute the texts of tasks whose `group` is equal, unless it is None.
    """

    host: Host
    prepare: Callable[[Check], TextIds]
    work: Callable[[TextIds], Work[list[Any]]]
    finish: Callable[[list[Any]], Result]
    group: object = None

    def then(self, change: Callable[[Result], _Other]) -> "TextTask[_Other]":
        """Return a task whose result is `change(result)`."""
        return TextTask(self.host, self.prepare, self.work, lambda values: change(self.finish(values)), self.group)

    def run(self) -> Result:
        """Return the result. The caller's caller is warned if texts were cut."""
        texts = self.prepare(lambda: None)
        _warn_if_cut(texts)
        (result,) = self.host.loop.call(together([(self, texts)])).get()
        return result

    async def run_as_task(self) -> Result:
        """Return the result, as `run` does, for an event loop."""
        computed = await self.compute()
        _warn_if_cut(computed.texts)
        result: Result = computed.found
        return result

    async def compute(self) -> Computed:
        """Return the result with its texts, for an event loop. It warns of nothing."""
        texts = await self.host.loop.prepare(self.prepare)
        (result,) = await self.host.loop.call_as_task(together([(self, texts)]))
        return Computed(result, texts)


def _warn_if_cut(texts: TextIds) -> None:
    """Warn the caller of `LLM` or `AsyncLLM` about texts that were cut."""
    if texts.warning:
        warnings.warn(texts.warning, TruncationWarning, stacklevel=4)


def together(asked: Sequence[tuple[TextTask[Result], TextIds]]) -> Work[list[Result]]:
    """Return the results of tasks of one group, with their prepared texts. It is work for the loop, step by step."""
    (first, ids), *_ = asked
    values = yield from first.work(ids._replace(texts=[text for _, ids in asked for text in ids.texts]))
    ends = accumulate(len(ids.texts) for _, ids in asked)
    return [task.finish(values[end - len(ids.texts) : end]) for (task, ids), end in zip(asked, ends, strict=True)]


def embed(
    host: Host, texts: Sequence[Prompt], options: VectorOptions, num_documents: int | None = None
) -> TextTask[Float[Tensor, "texts size"]]:
    """Return the task of `LLM.embed`: one float32 vector per text.

    After pooling, the vectors pass the layers in the model's files. Then they are cut to `dimensions` and normalised.
    For errors, the first `num_documents` texts are documents, and the others are their queries. Raises
    InvalidRequestError for an option that cannot be served.
    """
    heads, tokenizer = host.facts.heads, host.tokenizer
    embedder = heads.embedder or Embedder(host.model.architecture.hidden_size)
    files = embedder.files
    options.check(embedder.size)
    host.check_has_states()
    before, num_first = heads.prompts.text_of(options.prompt_name), 0
    name, num_kept = "text" if num_documents is None else "document", options.dimensions or files.dimensions
    if before and files.skips_prompt:  # but not a special token at the prompt's end, like sentence-transformers
        ids = tokenizer.encode(before)
        num_first = len(ids[:-1] if ids and ids[-1] in tokenizer.special_token_ids else ids)

    def read(text: Prompt) -> ReadText:
        if isinstance(text, str):
            whole = read_text(host, before + text, truncate=options.truncate)
            return whole._replace(num_skipped=num_first if num_first < len(whole.ids) else 0)
        if options.prompt_name is not None:
            raise InvalidRequestError("prompt_name needs texts, got ids or messages: leave it out")
        return read_text(host, text, truncate=options.truncate)

    def finish(values: list[Tensor]) -> Float[Tensor, "texts size"]:
        vectors = (torch.stack(values) if values else torch.zeros(0, embedder.size))[:, :num_kept]
        is_normalized = files.normalizes if options.normalize is None else options.normalize
        return (torch.nn.functional.normalize(vectors) if is_normalized else vectors).float()

    return TextTask(
        host,
        lambda check: read_texts(host, (text for text, _ in pairs_of(texts, None)), read, check, name, num_documents),
        partial(values_of, host, options.pooling or files.pooling, embedder.head.of),
        finish,
        (embed, options.pooling),
    )


def score_pairs(
    host: Host,
    pairs: Sequence[TextPair],
    instruction: str | None = None,
    *,
    truncate: bool = False,
    may_compare: bool = False,
    is_raw: bool = False,
) -> TextTask[list[float]]:
    """Return the task that scores queries with documents: by a reranker, or by the cosine of their vectors.

    A model that is not a reranker compares vectors if its files were made for embeddings, or with `may_compare`. If
    `is_raw`, a reranker's score is its logit. Raises InvalidRequestError for a model of neither kind, and for an
    instruction that the model's prompt cannot have.
    """
    heads = host.facts.heads
    if heads.reranker is None and (heads.embedder or may_compare):
        _check_no_instruction(instruction, "this model compares vectors, without a prompt")
        texts = [*(second for _, second in pairs), *dict.fromkeys(first for first, _ in pairs)]
        vectors = embed(host, texts, VectorOptions(normalize=True, truncate=truncate), len(pairs))
        return vectors.then(partial(_cosines, pairs))
    reranker = reranker_of(host)
    host.check_has_states()
    _check_text("instruction", instruction if instruction is not None else "")
    if not reranker.takes_instruction:
        _check_no_instruction(instruction, "this model's prompt has none")

    def read(pair: TextPair) -> ReadText:
        encode = partial(reranker.encode, host.tokenizer, instruction)
        return read_pair(host, encode, *pair, truncate=truncate, argument="query")

    # A decoder reads the common beginning of a query's pairs once, so pairs of other queries are not among them.
    beginning = (instruction, pairs[0][0]) if len(pairs) > 1 and not host.reads_whole_texts else ()
    return TextTask(
        host,
        lambda check: read_texts(host, _checked(pairs), read, check, "document"),
        partial(values_of, host, reranker.pooling, reranker.logit if is_raw else reranker.score),
        list,
        (score_pairs, is_raw, *beginning),
    )


def reranker_of(host: Host) -> Reranker:
    """Return the reranker of a model. Raises InvalidRequestError if the model is not a reranker."""
    if (reranker := host.facts.heads.reranker) is None:
        raise InvalidRequestError(
            "this model is not a reranker and was not made for embeddings, as far as its files say: load a reranker, "
            f"or {COPY_HINT}"
        )
    return reranker


def _checked(pairs: Sequence[TextPair]) -> Iterator[TextPair]:
    """Yield the pairs. Raises InvalidRequestError at one that has a value other than a text."""
    for index, (query, document) in enumerate(pairs):
        _check_text("query", query)
        _check_text("document", document, f" {index}")
        yield query, document


def _check_text(name: str, value: object, where: str = "") -> None:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name}{where} must be a text, got {type(value).__name__}", param=name)


def _check_no_instruction(instruction: str | None, reason: str) -> None:
    if instruction is not None:
        raise InvalidRequestError(f"instruction must be left out: {reason}", param="instruction")


def _cosines(pairs: Sequence[TextPair], vectors: Float[Tensor, "texts size"]) -> list[float]:
    """Return the cosine of each pair, from −1 to 1.

    `vectors`, of length 1, are those of the second text of each pair, then those of each different first text. Each sum
    is computed separately in float64, so a cosine's bits depend only on its own pair. Vectors are rounded, so the
    cosine of a text with itself may be slightly above 1.
    """
    wide = vectors.double()
    firsts = dict(zip(dict.fromkeys(first for first, _ in pairs), wide[len(pairs) :], strict=True))
    return [
        max(-1.0, min(1.0, float((firsts[first] * second).sum())))
        for (first, _), second in zip(pairs, wide, strict=False)
    ]


def rerank(
    host: Host,
    query: str,
    documents: Sequence[str],
    top_n: int | None = None,
    instruction: str | None = None,
    *,
    truncate: bool = False,
    is_raw: bool = False,
) -> TextTask[list[RankedDocument]]:
    """Return the task of `LLM.rerank`: documents by their scores. Raises InvalidRequestError, as `score_pairs` does."""
    if isinstance(documents, str) or not isinstance(documents, Sequence):
        problem = f"documents must be a list of texts, got {type(documents).__name__}"
        raise InvalidRequestError(problem, param="documents")
    if top_n is not None and (type(top_n) is not int or top_n < 1):
        raise InvalidRequestError(f"top_n must be a whole number of at least 1, got {top_n!r:.40}", param="top_n")
    pairs = [(query, each) for each in documents]
    scoring = score_pairs(host, pairs, instruction, truncate=truncate, is_raw=is_raw)
    return scoring.then(lambda scores: ranked(scores, documents, top_n))


def classify(host: Host, texts: Sequence[TextOrPair], *, truncate: bool = False) -> TextTask[list[list[float]]]:
    """Return the task that computes the value of each label per text or pair of texts, in the order of the labels.

    Raises InvalidRequestError if the model is not a classifier.
    """
    classifier = classifier_of(host)
    host.check_has_states()
    if isinstance(texts, str | bytes) or not isinstance(texts, Sequence):
        raise InvalidRequestError(f"texts must be a list of texts or pairs of texts, got {type(texts).__name__}")
    pad_id = classifier.pad_id if classifier.pooling == "last" else None

    def read(text: Any) -> ReadText:
        if not (isinstance(text, list | tuple) and any(isinstance(each, str) for each in text)):
            if is_conversation(text):
                problem = "a classifier reads a text, ids or a pair of texts, got messages: render them"
                raise InvalidRequestError(problem)
            return read_text(host, text, truncate=truncate)
        if len(text) != 2 or not all(isinstance(each, str) for each in text):
            other = next((type(each).__name__ for each in text if not isinstance(each, str)), len(text))
            raise InvalidRequestError(f"a pair must be two texts, got {other}")
        return read_pair(host, host.tokenizer.encode_pair, *text, truncate=truncate)

    return TextTask(
        host,
        lambda check: read_texts(host, texts, lambda text: read(text).without(pad_id), check),
        partial(values_of, host, classifier.pooling, classifier.values),
        list,
        classify,
    )


def classifier_of(host: Host) -> Classifier:
    """Return the classifier of a model. Raises InvalidRequestError if the model is not a classifier."""
    if (classifier := host.facts.heads.classifier) is None:
        raise InvalidRequestError(
            "this model is not a classifier: its files have no weight of labels, such as the score.weight of a "
            "Qwen3ForSequenceClassification or the classifier.weight of a BertForSequenceClassification. Load a "
            "classifier"
        )
    return classifier


def labels(host: Host, texts: Sequence[TextOrPair], *, truncate: bool = False) -> TextTask[list[Classification]]:
    """Return the task of `LLM.classify`: the labels of each text, the most probable first.

    If two are equal, the first label comes first. Raises InvalidRequestError, as `classify` does.
    """
    names = classifier_of(host).labels

    def sorted_labels(values: Sequence[float]) -> Classification:
        ordered = sorted(zip(names, values, strict=True), key=lambda pair: -pair[1])
        return Classification(*zip(*ordered, strict=True))

    return classify(host, texts, truncate=truncate).then(lambda values: [sorted_labels(each) for each in values])


def prompt_logprobs(host: Host, prompt: Prompt, *, num: int = 0) -> TextTask[list[TokenLogprob | None]]:
    """Return the task of `LLM.prompt_logprobs`: the log-probability of each token but the first."""

    def work(texts: TextIds) -> Work[list[list[TokenLogprob | None]]]:
        return [(yield from score_prompt(host, texts.texts[0].ids, num))]

    return TextTask(
        host,
        lambda check: TextIds([ReadText(ids_to_score(host, prompt, num))], host.requests.limits.max_seq_len),
        work,
        lambda values: values[0],
    )
