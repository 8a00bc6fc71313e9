"""Texts as vectors: the hidden states of their tokens after the last norm, pooled.

They are computed between the engine's steps, over a cache of their own, in steps as short as the engine's while it has
work. A text's vector has the same bits whatever its neighbours and its steps are.
"""

from collections.abc import Generator, Iterator, Sequence
from functools import partial, reduce
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor

from infer.checkpoint.pooling import Pooling
from infer.engine.host import Host
from infer.engine.prompt_encoding import Prompt, pairs_of
from infer.engine.request import check_prompt
from infer.engine.request_options import check_choice
from infer.engine.scheduler import LEAST_PROMPT_TOKENS, STREAM_SECONDS
from infer.errors import InvalidRequestError
from infer.runner.hidden_states import MAX_TEXTS, STEP_TOKENS


def texts_to_embed(host: Host, texts: Sequence[Prompt], pooling: Pooling | None) -> list[list[int]]:
    """The ids of each. Raises InvalidRequestError for a pooling that there is not and for what is no prompt."""
    if pooling is not None:
        check_choice("pooling", pooling, get_args(Pooling))
    found = list[list[int]]()
    for index, (prompt, _) in enumerate(pairs_of(texts, None)):
        try:
            found.append(check_prompt(host.requests.limits, host.requests.encode(prompt), room=0))
        except InvalidRequestError as error:
            raise type(error)(f"text {index}: {error}") from error
    return found


def embed(
    host: Host, texts: Sequence[Sequence[int]], pooling: Pooling | None, *, normalize: bool
) -> Generator[None, None, Float[Tensor, "texts hidden"]]:
    """Return a vector a text of ids, float32, of length 1 where `normalize`. Work for the loop, a step at a time.

    `pooling` None is the model's own, the mean where it has none. The mean is of all tokens; the last token is the only
    one that has seen the whole text.
    """
    pooling = pooling or host.settings.pooling or "mean"
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
    return (torch.nn.functional.normalize(pooled) if normalize else pooled).float()


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
