"""Hidden states of texts, step by step: from a decoder with its own cache, or from an encoder stage by stage."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from infer.compute.operands.limits import MAX_STEP_TEXTS
from infer.engine.requests.host import Host
from infer.engine.runner.hidden_states import MAX_SHARED_TOKENS, STEP_TOKENS
from infer.engine.step.scheduler import LEAST_PROMPT_TOKENS, STREAM_SECONDS
from infer.engine.texts.vector_options import TextIds


class TextStep(NamedTuple):
    """The float32 states of some texts' next tokens, each with the index of its text.

    If `ends_batch`, nothing is kept for the next step, so that another call may compute its texts.
    """

    found: list[tuple[int, Float[Tensor, "tokens hidden"]]]
    ends_batch: bool = False


def text_states(host: Host, given: TextIds, *, only_last: bool = False) -> Iterator[TextStep]:
    """Yield the states after the last norm of all tokens of the texts, after each step.

    If `only_last`, only the last state of each text is needed, so the common first tokens may be read once.
    """
    texts = given.token_ids
    if host.reads_whole_texts:
        yield from _of_encoder(host, texts, given.second_starts or list(map(len, texts)))
        return
    hidden_states, room = host.hidden_states(), partial(step_tokens, host)
    num_shared = _num_shared(host, texts) if only_last else 0
    for batch in _batches([len(text) - num_shared for text in texts], STEP_TOKENS, hidden_states.max_texts):
        for _ in hidden_states.share(texts[0][:num_shared], room):
            yield TextStep([])
        for step in hidden_states.of([texts[index] for index in batch], room, num_shared):
            yield TextStep([(batch[row], states) for row, states in step])
        yield TextStep([], ends_batch=True)


def _of_encoder(host: Host, texts: Sequence[list[int]], second_starts: Sequence[int]) -> Iterator[TextStep]:
    encoder = host.text_encoder()
    for batch in _batches(list(map(len, texts)), encoder.step_tokens, MAX_STEP_TEXTS):
        for step in encoder.of([texts[index] for index in batch], [second_starts[index] for index in batch]):
            yield TextStep([(batch[row], states) for row, states in step])
        yield TextStep([], ends_batch=True)


def step_tokens(host: Host) -> int:
    """Return how many tokens a step may have so that others wait no longer than for their own steps."""
    costs = host.engine.scheduler.costs
    if not host.loop.num_sequences or not costs.costs.per_token:
        return STEP_TOKENS
    return max(LEAST_PROMPT_TOKENS, min(STEP_TOKENS, costs.tokens_in(STREAM_SECONDS, 0)))


def _num_shared(host: Host, texts: Sequence[list[int]]) -> int:
    """Return the number of common first tokens of all texts that are read once, or 0 if they are few.

    The last token of each text is always read with the text.
    """
    if len(texts) < 2 or host.model.is_long(max(map(len, texts))):
        return 0
    first, last = min(texts), max(texts)
    most = min(min(map(len, texts)) - 1, MAX_SHARED_TOKENS)
    count = next((at for at in range(most) if first[at] != last[at]), max(0, most))
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
