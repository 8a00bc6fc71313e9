"""Rerankers: how relevant documents are to a query, by a model that reads both together.

A score is computed like an embedding, from one state of the pair, so its bits depend only on its own pair.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from infer.engine.requests.host import Host
from infer.engine.requests.loop_messages import Work
from infer.engine.requests.reranker import Reranker
from infer.engine.step.request import check_prompt
from infer.engine.texts.embedding import of_each, pool, too_long
from infer.engine.texts.vector_options import TextIds
from infer.errors import ContextLengthError, InvalidRequestError
from infer.text.tokenizer.pairs import EncodedPair


def reranker_of(host: Host) -> Reranker:
    """Return the reranker of a model. Raises InvalidRequestError if the model is not a reranker."""
    if host.facts.heads.reranker is None:
        raise InvalidRequestError(
            "this model is not a reranker and was not made for embeddings, as far as its files say: load a reranker, "
            "or pass reranker='qwen3' for a copy of Qwen3-Reranker"
        )
    return host.facts.heads.reranker


def pairs_to_score(
    host: Host,
    pairs: Sequence[tuple[Any, Any]],
    instruction: str | None,
    *,
    truncate: bool,
    check: Callable[[], None] = lambda: None,
) -> TextIds:
    """Return the ids of the prompt for each query and document. `check` is called before each, and may raise.

    Raises InvalidRequestError for a value that is not a text, and ContextLengthError for a pair that does not fit the
    context. With `truncate`, the document is cut at its end instead.
    """
    reranker = reranker_of(host)
    host.check_has_states()
    _check_text("instruction", instruction if instruction is not None else "")
    if instruction is not None and not reranker.takes_instruction:
        raise InvalidRequestError("instruction must be left out: this model's prompt has none", param="instruction")
    found, second_starts, num_cut = list[list[int]](), list[int](), 0
    for index, (query, document) in enumerate(pairs):
        check()
        _check_text("query", query)
        _check_text("document", document, f" {index}")
        try:
            encode = partial(reranker.encode, host.tokenizer, instruction, query)
            pair, is_cut = cut_to_fit(host, encode, query + document, document, truncate=truncate)
            second_starts.append(pair.second_start)
            found.append(check_prompt(host.requests.limits, pair.ids, room=0))
        except InvalidRequestError as error:
            raise type(error)(f"document {index}: {error}", param=error.param) from error
        num_cut += is_cut
    return TextIds(found, host.requests.limits.max_seq_len, num_cut, second_starts=second_starts)


def cut_to_fit(
    host: Host, encode: Callable[[str], EncodedPair], both: str, second: str, *, truncate: bool
) -> tuple[EncodedPair, bool]:
    """Return the result of `encode` for the second text of a pair with the first, and True if the second was cut.

    Raises ContextLengthError for a pair that does not fit the context, or, with `truncate`, if the first is too long.
    """
    tokenizer, most = host.tokenizer, host.requests.limits.max_seq_len
    if not truncate and (least := tokenizer.least_num_tokens(both)) > most:
        raise too_long(f"at least {least}", most)
    pair, own = encode(second), list[int]()
    if len(pair.ids) <= most:
        return pair, False
    if truncate:
        own = tokenizer.encode(second, add_special_tokens=False, parse_special=False)
    while (surplus := len(pair.ids) - most) > 0:
        if len(own) < surplus:
            if not truncate:
                raise too_long(str(len(pair.ids)), most)
            first = len(pair.ids) - len(own)
            problem = f"the first text of the pair has {first} tokens with its prompt and the context holds {most}"
            raise ContextLengthError(
                f"{problem}: only the second text is cut, so shorten the first or raise max_seq_len"
            )
        own = own[: len(own) - surplus]
        pair = encode(tokenizer.decode(own, skip_special_tokens=False))
    return pair, True


def _check_text(name: str, value: object, where: str = "") -> None:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name}{where} must be a text, got {type(value).__name__}", param=name)


def scores(host: Host, pairs: TextIds) -> Work[list[float]]:
    """Return the score of each pair. It is work for the loop, step by step."""
    reranker = reranker_of(host)
    states = yield from pool(host, pairs, reranker.pooling)
    return (yield from of_each(states, reranker.score))


def check_top_n(top_n: int | None) -> None:
    """Raise InvalidRequestError for a number of documents that is not at least 1."""
    if top_n is not None and (type(top_n) is not int or top_n < 1):
        raise InvalidRequestError(f"top_n must be a whole number of at least 1, got {top_n!r:.40}", param="top_n")


def documents_of(documents: object) -> list[str]:
    """Return a list of documents. Raises InvalidRequestError for one text in place of a list."""
    if isinstance(documents, str) or not isinstance(documents, Sequence):
        raise InvalidRequestError(
            f"documents must be a list of texts, got {type(documents).__name__}", param="documents"
        )
    return list(documents)
