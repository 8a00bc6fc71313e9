"""Texts and pairs as ids within the context, and their hidden states, pooled to one vector per text.

The states are computed between the engine's steps. While the engine has work, their steps are as short as the engine's.
A text's vector has the same bits, whatever its neighbours and its steps are.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from infer.compute.operands.limits import MAX_STEP_TEXTS
from infer.engine.requests.answer import GIVE_WAY, Check, Work
from infer.engine.requests.host import Host
from infer.engine.requests.prompt_encoding import Prompt, prompt_ids
from infer.engine.runner.hidden_states import MAX_SHARED_TOKENS, STEP_TOKENS, TextEncoder
from infer.engine.step.request import check_prompt
from infer.engine.step.scheduler import LEAST_PROMPT_TOKENS, STREAM_SECONDS
from infer.engine.step.sequence import common_length
from infer.engine.texts.text_ids import ReadText, TextIds
from infer.errors import ContextLengthError, InvalidRequestError, ModelError
from infer.outputs import Pooling
from infer.text.tokenizer.tokenizers_library import EncodedPair

_Value = TypeVar("_Value")
# The number by which a sum of states is divided, of the places of its tokens from 1.
_DIVISORS: Mapping[Pooling, Callable[[range], float]] = {
    "mean": len,
    "mean_sqrt_len": lambda places: len(places) ** 0.5,
    "weightedmean": sum,
}
_TextStates = list[tuple[int, Float[Tensor, "tokens hidden"]]]  # of a step: places in the batch, and next states


def values_of(host: Host, pooling: Pooling, value_of: Callable[[Tensor], _Value], texts: TextIds) -> Work[list[_Value]]:
    """Return `value_of` the pooled state of each text. It is work for the loop, step by step.

    A head may be slow, so other calls may run after each state. Raises ModelError for states that are not finite.
    """
    pooled = PooledStates(
        pooling, len(texts.texts), host.model.architecture.hidden_size, [text.num_skipped for text in texts.texts]
    )
    yield GIVE_WAY  # before this, the running batch needs the whole cache
    # The last token is the only one that attends to the whole text. If only its state is pooled, beginnings are shared.
    for batch, steps in _batches_of(host, texts, only_last=pooling == "last"):
        for step in steps:
            for row, states in step:
                pooled.add(batch[row], states.cpu())
            yield not GIVE_WAY
        yield GIVE_WAY  # nothing is kept for the next batch, so another call may compute its texts
    vectors, values = pooled.vectors(), list[_Value]()
    _check_finite(vectors)
    for vector in vectors:
        values.append(value_of(vector))
        yield GIVE_WAY
    return values


def _check_finite(vectors: Float[Tensor, "texts size"]) -> None:
    """Raise ModelError for states that are not finite, because they give no vector, score or label."""
    broken = (~vectors.isfinite().all(1)).nonzero().flatten().tolist()
    if broken:
        raise ModelError(
            f"text {broken[0]}: the model's states are not finite: its weights are damaged, or its keys and values do "
            "not fit the cache: download it again, or use kv_type f32"
        )


def _batches_of(host: Host, given: TextIds, *, only_last: bool) -> Iterator[tuple[list[int], Iterator[_TextStates]]]:
    """Yield the indices of the texts of a batch, and its steps, which give the states after the last norm."""
    texts = [text.ids for text in given.texts]
    if isinstance(computation := host.text_states(), TextEncoder):
        starts = [text.second_start for text in given.texts]
        second_starts = [len(ids) if start is None else start for ids, start in zip(texts, starts, strict=True)]
        for batch in _batches(list(map(len, texts)), computation.step_tokens, MAX_STEP_TEXTS):
            yield batch, computation.of([texts[index] for index in batch], [second_starts[index] for index in batch])
        return
    num_shared, room = _num_shared(host, texts) if only_last else 0, partial(step_tokens, host)
    for batch in _batches([len(ids) - num_shared for ids in texts], STEP_TOKENS, computation.max_texts):
        shared: Iterator[_TextStates] = ([] for _ in computation.share(texts[0][:num_shared], room))
        yield batch, chain(shared, computation.of([texts[index] for index in batch], room, num_shared))


def step_tokens(host: Host) -> int:
    """Return how many tokens a step may have so that others wait no longer than for their own steps."""
    costs = host.engine.scheduler.costs
    if not host.loop.thread.answers or not costs.costs.per_token:
        return STEP_TOKENS
    return max(LEAST_PROMPT_TOKENS, min(STEP_TOKENS, costs.tokens_in(STREAM_SECONDS, 0)))


def _num_shared(host: Host, texts: Sequence[list[int]]) -> int:
    """Return the number of common first tokens of all texts that are read once, or 0 if they are few.

    The last token of each text is always read with the text.
    """
    if len(texts) < 2 or host.model.is_long(max(map(len, texts))):
        return 0
    most = min(min(map(len, texts)) - 1, MAX_SHARED_TOKENS)
    count = common_length(min(texts)[: max(0, most)], max(texts))
    return count if count >= LEAST_PROMPT_TOKENS else 0


def _batches(lengths: Sequence[int], most_tokens: int, most_texts: int) -> Iterator[list[int]]:
    """Yield indices of texts: short texts together up to a step's size, and each longer text alone."""
    batch, num_tokens = list[int](), 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        num_tokens += lengths[index]
        if batch and (num_tokens > most_tokens or len(batch) == most_texts):
            yield batch
            batch, num_tokens = [], lengths[index]
        batch.append(index)
    if batch:
        yield batch


@final
class PooledStates:
    """The vectors of texts, in float64. Each is summed token by token, so its bits do not depend on the parts."""

    def __init__(self, pooling: Pooling, num_texts: int, size: int, num_skipped: Sequence[int]) -> None:
        """Begin without states. `num_skipped` is the number of first tokens of each text to skip."""
        self._pooling = pooling
        first = -torch.inf if pooling == "max" else 0.0
        self._vectors = torch.full((num_texts, size), first, dtype=torch.float64)
        self._num_skipped, self._num_tokens = num_skipped, [0] * num_texts

    def add(self, text: int, states: Float[Tensor, "tokens size"]) -> None:
        """Pool the states of the next tokens of a text."""
        first, num_skipped = self._num_tokens[text], self._num_skipped[text]
        self._num_tokens[text] += len(states)
        vector, start = self._vectors[text], max(num_skipped - first, 0)
        if self._pooling == "last":
            start = len(states) - 1
        last = start + 1 if self._pooling in ("cls", "last") else len(states)
        for place, state in enumerate(states[start:last].double(), first + start):
            match self._pooling:
                case "mean" | "mean_sqrt_len":
                    vector += state
                case "weightedmean":
                    vector += state * (place + 1)
                case "max":
                    torch.maximum(vector, state, out=vector)
                case "last":
                    vector[:] = state
                case "cls" if place == num_skipped:
                    vector[:] = state

    def vectors(self) -> Float[Tensor, "texts size"]:
        """Return the vectors of texts whose tokens have all been added."""
        if (divisor := _DIVISORS.get(self._pooling)) is None:
            return self._vectors
        ends = zip(self._num_skipped, self._num_tokens, strict=True)
        divisors = [divisor(range(skipped + 1, total + 1)) for skipped, total in ends]
        return self._vectors / torch.tensor(divisors, dtype=torch.float64).reshape(-1, 1)


def read_texts(
    host: Host,
    given: Iterable[Any],
    read: Callable[[Any], ReadText],
    check: Check,
    name: str = "text",
    num_texts: int | None = None,
) -> TextIds:
    """Return the ids that the model reads for each text. `check` is called before each text, and may raise.

    Raises the errors of `read` and of `check_prompt` with the number of the text, unless another argument is too
    long, which the error names as `param`. `name` is the word for a text there. Texts after the first `num_texts` are
    queries.
    """
    limits, texts = host.requests.limits, list[ReadText]()
    for index, each in enumerate(given):
        check()
        try:
            text = read(each)
            texts.append(text._replace(ids=check_prompt(limits, text.ids, room=0)))
        except InvalidRequestError as error:
            if isinstance(error, ContextLengthError) and error.param is not None:
                raise
            if num_texts is not None and index >= num_texts:
                raise type(error)(f"query: {error}", param="query") from error
            raise type(error)(f"{name} {index}: {error}") from error
    return TextIds(texts, limits.max_seq_len)


def read_text(host: Host, text: Prompt, *, truncate: bool) -> ReadText:
    """Return a text, ids or messages as the model reads them, cut to the context.

    The tokens that the tokenizer adds after each text stay at the end. Raises ContextLengthError without `truncate`.
    """
    most = host.requests.limits.max_seq_len
    if not truncate and isinstance(text, str) and (least := host.tokenizer.least_num_tokens(text)) > most:
        raise _too_long(f"at least {least}", most)
    ids = prompt_ids(text, host.tokenizer, None)
    if len(ids) <= most:
        return ReadText(ids)
    if not truncate:
        raise _too_long(str(len(ids)), most)
    end = host.tokenizer.ending_ids if isinstance(text, str) else []
    return ReadText(ids[: most - len(end)] + end, is_cut=True)


def read_pair(
    host: Host,
    encode: Callable[[str, str], EncodedPair],
    first: str,
    second: str,
    *,
    truncate: bool,
    argument: str | None = None,
) -> ReadText:
    """Return what `encode` makes of two texts, with the second text cut to the context.

    Raises ContextLengthError for a pair that does not fit the context, or, with `truncate`, if the first is too long.
    An error about the first text names its `argument`.
    """
    tokenizer, most = host.tokenizer, host.requests.limits.max_seq_len
    if not truncate and (least := tokenizer.least_num_tokens(first + second)) > most:
        if (of_first := tokenizer.least_num_tokens(first)) > most:
            raise _first_too_long(argument, f"at least {of_first}", most)
        raise _too_long(f"at least {least}", most)
    pair = encode(first, second)
    if len(pair.ids) <= most:
        return ReadText(pair.ids, second_start=pair.second_start)
    own = tokenizer.encode(second, add_special_tokens=False, parse_special=False)
    if not truncate and len(pair.ids) - len(own) <= most:
        raise _too_long(str(len(pair.ids)), most)
    while (surplus := len(pair.ids) - most) > 0:
        if len(own) < surplus:
            raise _first_too_long(argument, str(len(pair.ids) - len(own)), most)
        own = own[: len(own) - surplus]
        pair = encode(first, tokenizer.decode(own, skip_special_tokens=False))
    return ReadText(pair.ids, is_cut=True, second_start=pair.second_start)


def _first_too_long(argument: str | None, count: str, most: int) -> ContextLengthError:
    name = argument or "the first text of the pair"
    message = f"{name} has {count} tokens with its prompt and the context holds {most}"
    fix = f"only the second text is cut, so shorten {argument or 'the first'} or raise max_seq_len"
    return ContextLengthError(f"{message}: {fix}", param=argument)


def _too_long(count: str, most: int) -> ContextLengthError:
    message = f"the text has {count} tokens and the context holds {most}"
    return ContextLengthError(f"{message}: shorten it, raise max_seq_len or pass truncate=True")
