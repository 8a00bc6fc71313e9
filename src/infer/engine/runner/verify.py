"""Sampling after a step that runs its ops one by one: the tokens of each chunk, as long as its drafts are right."""

import time
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from infer.compute import ops
from infer.compute.operands.step import StepEnd
from infer.compute.sampling.history import remember


def verify(logits: Float[Tensor, "lines vocab"], step: ops.SampledStep) -> ops.Generated:
    """Sample line by line, now that the logits are known: `backends.cpu.capture.sampled` in plain torch.

    A chunk continues with its next line while the sampled token equals the draft. So its tokens are the accepted drafts
    and the token after them, or the code of a failed row. `masks` are on the host.
    """
    chunks, begins, columns, history, masks = step
    positions = [at + len(chunk.token_ids) - chunk.num_drafts for chunk, at in zip(chunks, begins, strict=True)]
    generated = ops.Generated([[] for _ in chunks], [], [[] for _ in chunks])
    starts = np.cumsum([0, *(chunk.num_logits for chunk in chunks)]).tolist()
    alive = [index for index, chunk in enumerate(chunks) if chunk.has_logits]
    entry, times = 0, [time.perf_counter()]
    if masks is not None:
        masks.wait()
    while alive:
        # Every row takes part. A row that is done takes any line, and its token is ignored.
        lines = torch.full((len(chunks),), starts[alive[0]] + entry)
        for index in alive:
            lines[index] = starts[index] + entry
        where = torch.tensor(positions, device=logits.device) + entry
        allowed = None if masks is None else masks.words[lines].to(logits.device)
        sampled = ops.sample(logits[lines.to(logits.device)], columns, history, where, allowed)
        token_ids = sampled.token_ids.tolist()
        for index in alive:
            generated.token_ids[index].append(token_ids[index])
            if (num_logprobs := columns.num_logprobs[index]) is not None and token_ids[index] >= 0:
                generated.logprobs[index].append(sampled.logprob_of(index, num_logprobs))
        remember(history, columns, [index for index in alive if token_ids[index] >= 0], sampled.token_ids)
        alive = [i for i in alive if entry < chunks[i].num_drafts and token_ids[i] == chunks[i].drafts[entry]]
        ops.backend_of(logits.device).synchronize()
        times.append(time.perf_counter())
        entry += 1
    generated.ends.extend(StepEnd(*pair) for pair in pairwise(times))
    return generated
