"""Texts as vectors: the hidden states of their tokens after the last norm, pooled.

They are computed between the engine's steps, over a cache of their own, in steps as short as the engine's while it has
work. A text's vector has the same bits whatever its neighbours and its steps are.
"""

import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import NamedTuple, final, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from infer.checkpoint.pooling import Pooling
from infer.engine.host import Host
from infer.engine.prompt_encoding import Prompt, pairs_of, prompt_ids
from infer.engine.request import check_prompt
from infer.engine.request_options import check_choice, check_count
from infer.engine.scheduler import LEAST_PROMPT_TOKENS, STREAM_SECONDS
from infer.errors import ContextLengthError, InvalidRequestError, TruncationWarning
from infer.runner.hidden_states import MAX_TEXTS, STEP_TOKENS


@final
@dataclass(frozen=True)
class VectorOptions:
    """How texts become vectors: the arguments of `LLM.embed`."""

    pooling: Pooling | None = None
    prompt_name: str | None = None
    dimensions: int | None = None
    normalize: bool = True
    truncate: bool = False

    def check(self, hidden_size: int) -> None:
        """Raise InvalidRequestError for a pooling that does not exist, or a number of dimensions that is too large."""
        if self.pooling is not None:
            check_choice("pooling", self.pooling, get_args(Pooling))
        if self.dimensions is not None:
            check_count("dimensions", self.dimensions, 1, hidden_size)


class TextIds(NamedTuple):
    """The ids of each text, and the number of texts that were cut at the end of the context."""

    token_ids: list[list[int]]
    num_cut: int = 0

    def warning(self, most: int) -> str:
        """Return the warning about texts that were cut to `most` tokens, "" if none was."""
        total = len(self.token_ids)
        return f"{self.num_cut} of {total} texts were cut to {most} tokens" if self.num_cut else ""


def texts_to_embed(host: Host, texts: Sequence[Prompt], options: VectorOptions) -> TextIds:
    """Return the ids of texts, with their prompt before them.

    Raises InvalidRequestError for an option that cannot be served, and for a text that is no prompt or is too long.
    """
    options.check(host.model.architecture.hidden_size)
    before, most = host.settings.prompts.text_of(options.prompt_name), host.requests.limits.max_seq_len
    found, num_cut = list[list[int]](), 0
    for index, (text, _) in enumerate(pairs_of(texts, None)):
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
    return TextIds(found, num_cut)


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


def warn_if_cut(ids: TextIds, most: int) -> None:
    """Warn the caller of `LLM.embed` if texts were cut to `most` tokens."""
    if warning := ids.warning(most):
        warnings.warn(warning, TruncationWarning, stacklevel=3)


def embed(
    host: Host, texts: Sequence[Sequence[int]], options: VectorOptions
) -> Generator[None, None, Float[Tensor, "texts size"]]:
    """Return one float32 vector per text of ids. Work for the loop, a step at a time.

    Without a pooling, the model's own is used, or the mean if it has none. The mean is of all tokens; the last token is
    the only one that has seen the whole text. Vectors are cut to `dimensions`, then normalised.
    """
    pooling = options.pooling or host.settings.pooling or "mean"
    pooled = torch.zeros(len(texts), host.model.architecture.hidden_size, dtype=torch.float64)

    yield  # the texts of the calls before have the cache for themselves
    for batch in _batches(texts):
        for step in host.hidden_states().of([texts[index] for index in batch], partial(step_tokens, host)):
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


def _batches(texts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Short texts together, as many as a step takes, and each longer one by itself: which of `texts`."""
    batch, num_tokens = list[int](), 0
    for index in sorted(range(len(texts)), key=lambda index: len(texts[index])):
        num_tokens += len(texts[index])
        if batch and (num_tokens > STEP_TOKENS or len(batch) == MAX_TEXTS):
            yield batch
            batch, num_tokens = [], len(texts[index])
        batch.append(index)
    if batch:
        yield batch
