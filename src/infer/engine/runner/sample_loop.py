"""Sampling after a step's logits while its drafts are right: `backends.cpu.capture.sampled` in plain torch."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from infer.compute import ops
from infer.compute.operands.step import Chunk
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.history import History, remember
from infer.compute.sampling.sampler import Sampled
from infer.outputs import TokenLogprob


@final
@dataclass
class SampledTokens:
    """Result of one chunk: the accepted drafts and the token after them, or the code of a failed row."""

    token_ids: list[int]
    logprobs: list[TokenLogprob]


def verify(
    logits: Float[Tensor, "lines vocab"],
    chunks: Sequence[Chunk],
    positions: Sequence[int],
    columns: SamplingColumns,
    history: History | None,
    masks: Int[Tensor, "lines words"] | None,
) -> tuple[list[SampledTokens], list[float]]:
    """Sample line by line. A chunk continues with its next line while the sampled token equals the draft.

    Also returns the time at which each line was sampled, by `time.perf_counter`. `masks` are on the host, whatever the
    device of the logits.
    """
    found = [SampledTokens([], []) for _ in chunks]
    starts = np.cumsum([0, *(chunk.num_logits for chunk in chunks)]).tolist()
    alive = [index for index, chunk in enumerate(chunks) if chunk.has_logits]
    entry, ended = 0, list[float]()
    while alive:
        # Every row takes part. A row that is done takes any line, and its token is ignored.
        lines = torch.full((len(chunks),), starts[alive[0]] + entry)
        for index in alive:
            lines[index] = starts[index] + entry
        where = torch.tensor(positions, device=logits.device) + entry
        allowed = None if masks is None else masks[lines].to(logits.device)
        sampled = ops.sample(logits[lines.to(logits.device)], columns, history, where, allowed)
        token_ids = sampled.token_ids.tolist()
        for index in alive:
            _take(found[index], sampled, index, columns.num_logprobs[index])
        remember(history, columns, [index for index in alive if token_ids[index] >= 0], sampled.token_ids)
        alive = [
            index
            for index in alive
            if entry < chunks[index].num_drafts and token_ids[index] == chunks[index].drafts[entry]
        ]
        ops.backend_of(logits.device).synchronize()
        ended.append(time.perf_counter())
        entry += 1
    return found, ended


def _take(tokens: SampledTokens, sampled: Sampled, index: int, num_logprobs: int | None) -> None:
    token_id = int(sampled.token_ids[index])
    tokens.token_ids.append(token_id)
    if num_logprobs is not None and token_id >= 0:
        tokens.logprobs.append(sampled.logprob_of(index, num_logprobs))
