"""Classifiers: the labels of texts and of pairs of texts, from one state of each text or from the mean of its states.

The values of a text are computed like an embedding, so their bits depend only on the text.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from infer.engine.requests.host import Host
from infer.engine.requests.loop_messages import Work
from infer.engine.requests.prompt_encoding import Prompt, is_conversation
from infer.engine.requests.text_heads import Classifier
from infer.engine.step.request import check_prompt
from infer.engine.texts.embedding import ids_within, of_each, pool
from infer.engine.texts.reranking import cut_to_fit
from infer.engine.texts.vector_options import TextIds
from infer.errors import InvalidRequestError
from infer.outputs import Classification
from infer.text.tokenizer.pairs import EncodedPair

TextOrPair = Prompt | list[str] | tuple[str, ...]  # a pair has two texts


def classifier_of(host: Host) -> Classifier:
    """Return the classifier of a model. Raises InvalidRequestError if the model is not a classifier."""
    if (found := host.facts.heads.classifier) is None:
        raise InvalidRequestError(
            "this model is not a classifier: its files have no weight of labels, such as the score.weight of a "
            "Qwen3ForSequenceClassification or the classifier.weight of a BertForSequenceClassification. Load a "
            "classifier"
        )
    return found


def texts_to_classify(
    host: Host, texts: Sequence[TextOrPair], *, truncate: bool, check: Callable[[], None] = lambda: None
) -> TextIds:
    """Return the ids of texts and of pairs of texts. `check` is called before each, and may raise.

    Raises InvalidRequestError for any other value, and ContextLengthError for a text that does not fit the context.
    With `truncate`, the text is cut at its end instead.
    """
    classifier, found, second_starts, num_cut = classifier_of(host), list[list[int]](), list[int](), 0
    host.check_has_states()
    if isinstance(texts, str | bytes) or not isinstance(texts, Sequence):
        raise InvalidRequestError(f"texts must be a list of texts or pairs of texts, got {type(texts).__name__}")
    for index, text in enumerate(texts):
        check()
        try:
            pair, is_cut = _ids_of(host, text, truncate=truncate)
            ids = check_prompt(host.requests.limits, pair.ids, room=0)
            found.append(_without_padding(ids, classifier.pad_id) if classifier.pooling == "last" else ids)
            second_starts.append(pair.second_start)
        except InvalidRequestError as error:
            raise type(error)(f"text {index}: {error}") from error
        num_cut += is_cut
    return TextIds(found, host.requests.limits.max_seq_len, num_cut, second_starts=second_starts)


def _ids_of(host: Host, text: Any, *, truncate: bool) -> tuple[EncodedPair, bool]:
    """Return the ids of a text or a pair, and True if it was cut."""
    if not _is_pair(text):
        if is_conversation(text):
            raise InvalidRequestError("a classifier reads a text, ids or a pair of texts, got messages: render them")
        ids, is_cut = ids_within(host, text, truncate=truncate)
        return EncodedPair.of_one(ids), is_cut
    if len(text) != 2 or not all(isinstance(each, str) for each in text):
        other = next((type(each).__name__ for each in text if not isinstance(each, str)), len(text))
        raise InvalidRequestError(f"a pair must be two texts, got {other}")
    first, second = text
    encode = partial(host.tokenizer.encode_pair, first)
    return cut_to_fit(host, encode, first + second, second, truncate=truncate)


def _is_pair(text: Any) -> bool:
    return isinstance(text, list | tuple) and any(isinstance(each, str) for each in text)


def _without_padding(ids: list[int], pad_id: int | None) -> list[int]:
    """Return the ids up to the last one that is not padding, but at least one, as `transformers` pools them."""
    count = len(ids)
    while count > 1 and ids[count - 1] == pad_id:
        count -= 1
    return ids[:count]


def classify(host: Host, texts: TextIds) -> Work[list[list[float]]]:
    """Return the value of each label per text, in the order of the labels. It is work for the loop, step by step."""
    classifier = classifier_of(host)
    states = yield from pool(host, texts, classifier.pooling)
    return (yield from of_each(states, lambda state: _scaled(classifier, classifier.head.of(state))))


def _scaled(classifier: Classifier, logits: torch.Tensor) -> list[float]:
    match classifier.scale:
        case "softmax":
            logits = logits.softmax(-1)
        case "sigmoid":
            logits = logits.sigmoid()
    found: list[float] = logits.tolist()
    return found


def classifications(host: Host, values: Sequence[Sequence[float]]) -> list[Classification]:
    """Return the labels of each text, the most probable first. If two are equal, the first label comes first."""
    labels = classifier_of(host).labels
    orders = [sorted(range(len(labels)), key=lambda index: -each[index]) for each in values]
    return [
        Classification(tuple(labels[index] for index in order), tuple(each[index] for index in order))
        for order, each in zip(orders, values, strict=True)
    ]
