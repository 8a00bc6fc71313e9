"""Texts as vectors: the hidden states of their tokens after the last norm, pooled.

They are computed beside the engine, over a cache of their own: its steps wait for one op at most. A text's vector has
the same bits whatever its neighbours are.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from infer import ops
from infer.engine.async_stream import Check
from infer.engine.host import Host
from infer.engine.prompt_ids import Prompt, pairs_of
from infer.engine.request import check_prompt
from infer.engine.request_options import check_choice
from infer.errors import InvalidRequestError
from infer.kvcache.pages import num_pages
from infer.kvcache.settings import CacheSettings
from infer.operands.limits import MAX_STEP_LOGITS
from infer.operands.step import Step
from infer.runner.caches import make_cache

Pooling = Literal["mean", "last"]
STEP_TOKENS = 128  # of which an op takes a moment: the engine's steps go on between two ops


def texts_to_embed(host: Host, texts: Sequence[Prompt], pooling: Pooling) -> list[list[int]]:
    """The ids of each. Raises InvalidRequestError for a pooling that there is not and for what is no prompt."""
    check_choice("pooling", pooling, get_args(Pooling))
    found = list[list[int]]()
    for index, (prompt, _) in enumerate(pairs_of(texts, None)):
        try:
            found.append(check_prompt(host.model, host.tokenizer, host.encode(prompt), room=0))
        except InvalidRequestError as error:
            raise type(error)(f"text {index}: {error}") from error
    return found


@torch.inference_mode()
def embed(
    host: Host, texts: Sequence[Sequence[int]], pooling: Pooling, *, normalize: bool, check: Check = lambda: None
) -> Float[Tensor, "texts hidden"]:
    """A vector a text of ids, float32, of length 1 where `normalize`. `check` is called before each step and may raise.

    The mean is of all tokens; the last token is the only one that has seen the whole text.
    """
    pooled = torch.zeros(len(texts), host.model.architecture.hidden_size, dtype=torch.float64)
    with ops.backend_of(host.model.device).threads():
        for batch in _batches(texts):
            for text, hidden in _hidden_states(host, texts, batch, check):
                if pooling == "mean":
                    pooled[text] += hidden.double().sum(0).cpu() / len(texts[text])
                else:
                    pooled[text] = hidden[-1].double().cpu()
    return (torch.nn.functional.normalize(pooled) if normalize else pooled).float()


def _batches(texts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Short texts together, as many as a step takes, and each longer one by itself: which of `texts`."""
    batch = list[int]()
    for index in sorted(range(len(texts)), key=lambda index: len(texts[index])):
        num_tokens = sum(len(texts[each]) for each in [*batch, index])
        if batch and (num_tokens > STEP_TOKENS or len(batch) == MAX_STEP_LOGITS):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _hidden_states(
    host: Host, texts: Sequence[Sequence[int]], batch: Sequence[int], check: Check
) -> Iterator[tuple[int, Float[Tensor, "tokens hidden"]]]:
    """Of each text of a batch its hidden states; of a long one chunk after chunk, always the same chunks."""
    model, settings = host.model, CacheSettings(kv_type=host.settings.cache.kv_type)
    lengths = [len(texts[index]) for index in batch]
    pages = sum(num_pages(length, settings.page_tokens) for length in lengths)
    cache = make_cache(model, max(lengths), len(batch), settings=settings, step_tokens=STEP_TOKENS, pool_pages=pages)
    for row, length in enumerate(lengths):
        cache.set_rope(row, is_long=model.is_long(length))
    for start in range(0, max(lengths), STEP_TOKENS):
        check()
        host.open.check_open()
        chunks = [texts[index][start : start + STEP_TOKENS] for index in batch]
        for row, chunk in enumerate(chunks):
            cache.reserve(row, len(chunk))
        step = Step.join([Step.of(chunk, start, row=row) for row, chunk in enumerate(chunks)])
        states = model.hidden_states(step.to(model.device), cache)
        for row, chunk in enumerate(chunks):
            cache.commit(row, len(chunk))
        yield from zip(batch, torch.split(states, [len(chunk) for chunk in chunks]), strict=True)
