"""Texts as vectors: the hidden states of their tokens after the last norm, pooled.

They are computed between the engine's steps, over a cache of their own, in steps as short as the engine's while it has
work. A text's vector has the same bits whatever its neighbours and its steps are.
"""

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial, reduce

import torch
from jaxtyping import Float
from torch import Tensor

from infer.engine.host import Host
from infer.engine.prompt_encoding import Prompt, pairs_of, prompt_ids
from infer.engine.request import check_prompt
from infer.engine.scheduler import LEAST_PROMPT_TOKENS, STREAM_SECONDS
from infer.engine.vector_options import TextIds, VectorOptions
from infer.errors import ContextLengthError, InvalidRequestError, TruncationWarning
from infer.runner.hidden_states import MAX_SHARED_TOKENS, MAX_TEXTS, STEP_TOKENS


def texts_to_embed(
    host: Host, texts: Sequence[Prompt], options: VectorOptions, check: Callable[[], None] = lambda: None
) -> TextIds:
    """Return the ids of texts, with their prompt before them. `check` is called before each, and may raise.

    Raises InvalidRequestError for an option that cannot be served, and for a text that is no prompt or is too long.
    """
    options.check(host.model.architecture.hidden_size)
    before, most = host.settings.prompts.text_of(options.prompt_name), host.requests.limits.max_seq_len
    found, num_cut = list[list[int]](), 0
    for index, (text, _) in enumerate(pairs_of(texts, None)):
        check()
        try:
            if isinstance(text, str):
                text = before + text
            elif options.prompt_name is not None:
                raise InvalidRequestError("prompt_name is for texts, got ids or messages: leave it out")
            ids = _ids_of(host, text, most, may_cut=options.truncate)
            num_cut += len(ids) > most
            found.append(check_prompt(host.requests.limits, _cut(host, text, ids, most), room=0))
        except InvalidRequestError as error:
            raise type(error)(f"text {index}: {error}") from error
    return TextIds(found, most, num_cut)


def _ids_of(host: Host, text: Prompt, most: int, *, may_cut: bool) -> list[int]:
    """Raises ContextLengthError for a text of more than `most` tokens, unless it may be cut."""
    if not may_cut and isinstance(text, str) and (least := host.tokenizer.least_num_tokens(text)) > most:
        raise too_long(f"at least {least}", most)
    ids = prompt_ids(text, host.tokenizer, None)
    if not may_cut and len(ids) > most:
        raise too_long(str(len(ids)), most)
    return ids


def _cut(host: Host, text: Prompt, ids: list[int], most: int) -> list[int]:
    """Return the first `most` ids. The tokens with which the tokenizer ends each text stay at the end."""
    if len(ids) <= most:
        return ids
    end = host.tokenizer.ending_ids if isinstance(text, str) else []
    return ids[: most - len(end)] + end


def too_long(count: str, most: int) -> ContextLengthError:
    """Return the error about a text with this number of tokens."""
    message = f"the text has {count} tokens and the context holds {most}"
    return ContextLengthError(f"{message}: shorten it, raise max_seq_len or pass truncate=True")


def warn_if_cut(ids: TextIds) -> None:
    """Warn the caller of a method of `LLM` if texts were cut."""
    if ids.warning:
        warnings.warn(ids.warning, TruncationWarning, stacklevel=3)


def embed(
    host: Host, texts: Sequence[list[int]], options: VectorOptions
) -> Generator[None, None, Float[Tensor, "texts size"]]:
    """Return one float32 vector per text of ids. Work for the loop, a step at a time.

    Without a pooling, the model's own is used, or the mean if it has none. The mean is of all tokens; the last token is
    the only one that has seen the whole text. Vectors are cut to `dimensions`, then normalised.
    """
    pooling = options.pooling or host.settings.pooling or "mean"
    pooled = torch.zeros(len(texts), host.model.architecture.hidden_size, dtype=torch.float64)

    yield  # the texts of the calls before have the cache for themselves
    hidden_states, room = host.hidden_states(), partial(step_tokens, host)
    num_shared = _num_shared(host, texts) if pooling == "last" else 0
    if num_shared:
        for _ in hidden_states.share(texts[0][:num_shared], room):
            yield
    for batch in _batches(texts, num_shared):
        for step in hidden_states.of([texts[index] for index in batch], room, num_shared):
            for row, states in step:
                text, found = batch[row], states.double().cpu()
                # Token by token, as the steps may be any.
                pooled[text] = reduce(torch.add, found, pooled[text]) if pooling == "mean" else found[-1]
            yield
    if pooling == "mean":
        pooled /= torch.tensor([[len(text)] for text in texts]).reshape(-1, 1)
    pooled = pooled[:, : options.dimensions]
    return (torch.nn.functional.normalize(pooled) if options.normalize else pooled).float()


def step_tokens(host: Host) -> int:
    """Return how many tokens a step may have without keeping others waiting for longer than their own steps do."""
    costs = host.engine.scheduler.costs
    if not host.loop.num_sequences or not costs.costs.per_token:
        return STEP_TOKENS
    return max(LEAST_PROMPT_TOKENS, min(STEP_TOKENS, costs.tokens_in(STREAM_SECONDS, 0)))


def _num_shared(host: Host, texts: Sequence[list[int]]) -> int:
    """Return the number of tokens with which all texts begin and that are read once, 0 for few of them.

    The last token of each text is read with the text.
    """
    if len(texts) < 2 or host.model.is_long(max(map(len, texts))):
        return 0
    first, last = min(texts), max(texts)
    most = min(min(map(len, texts)) - 1, MAX_SHARED_TOKENS)
    count = next((at for at in range(most) if first[at] != last[at]), max(0, most))
    return count if count >= LEAST_PROMPT_TOKENS else 0


def _batches(texts: Sequence[Sequence[int]], num_shared: int) -> Iterator[list[int]]:
    """Yield indices of texts: of short ones as many as a step takes, and of each longer one by itself."""
    batch, num_tokens = list[int](), 0
    for index in sorted(range(len(texts)), key=lambda index: len(texts[index])):
        own = len(texts[index]) - num_shared
        num_tokens += own
        if batch and (num_tokens > STEP_TOKENS or len(batch) == MAX_TEXTS):
            yield batch
            batch, num_tokens = [], own
        batch.append(index)
    if batch:
        yield batch
