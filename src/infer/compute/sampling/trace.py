"""Trace of one sampled token: the likeliest candidates after each stage, and the tokens that each stage removed.

Stages, noise and choice are those of `definition`, which every sampler equals.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infer.compute.sampling.definition import choose_token, stages
from infer.compute.sampling.masks import unpack_bits
from infer.compute.sampling.noise import gumbel_at
from infer.errors import InvalidRequestError
from infer.outputs import SampleTrace, TraceCandidate, TraceStage
from infer.sampling_params import PARAMETER_NAMES, SamplingParams


@torch.inference_mode()
def sample_trace(
    logits: Float[Tensor, "vocab"],
    params: SamplingParams,
    context_token_ids: Sequence[int],
    *,
    num_prompt_tokens: int | None = None,
    eos_token_ids: Collection[int] = frozenset(),
    num_candidates: int = 10,
    allowed: Int[Tensor, "words"] | None = None,
    shown_id: int | None = None,
) -> SampleTrace:
    """Return how the token after `context_token_ids` is sampled from these logits.

    The candidates are the tokens with the largest probability after any stage, and `shown_id`.

    Args:
        logits: The logits of the next token, `[vocab]`.
        params: The parameters of the sampler.
        context_token_ids: The ids of all tokens so far: the prompt, then the answer.
        num_prompt_tokens: The number of those ids that are the prompt. None: all.
        eos_token_ids: The ids that end an answer, which `min_new_tokens` bans.
        num_candidates: The least number of tokens to show after each stage.
        allowed: A grammar's mask of ids, in words of 32 bits. None allows all ids.
        shown_id: An id that is a candidate in any case.

    Returns:
        The trace: each stage with its candidates, and the token that is chosen.

    Raises:
        LogitsError: Nothing can be sampled from the logits.
        InvalidRequestError: A parameter does not fit the vocabulary or the context.

    Examples:
        >>> trace = sample_trace(torch.tensor([0.0, 2.0, 1.0]), SamplingParams(temperature=0), [0])
        >>> trace.token_id, trace.position
        (1, 1)
    """
    if num_candidates < 1:
        raise InvalidRequestError(f"num_candidates must be at least 1, got {num_candidates}")
    num_prompt_tokens = len(context_token_ids) if num_prompt_tokens is None else num_prompt_tokens
    if not params.is_greedy and params.seed is None:
        raise InvalidRequestError("a row that is sampled needs a seed: draw one and report it")
    passed = [
        *stages(
            logits,
            context_token_ids,
            params,
            num_prompt_tokens=num_prompt_tokens,
            eos_token_ids=[each for each in eos_token_ids if 0 <= each < len(logits)],
            allowed=None if allowed is None else unpack_bits(allowed, len(logits)),
        )
    ]
    token_id = choose_token(passed[-1][1], params, params.seed or 0, len(context_token_ids))
    probabilities = torch.stack([x.double().softmax(-1) for _, x in passed])
    ids, ranks = _candidates(
        passed[0][1], probabilities, [token_id, token_id if shown_id is None else shown_id], num_candidates
    )
    return SampleTrace(
        stages=tuple(_stages(passed, probabilities, ids, params)),
        candidates=tuple(_follow(passed, probabilities, ids, ranks, params, len(context_token_ids))),
        token_id=token_id,
        position=len(context_token_ids),
        step=len(context_token_ids) - num_prompt_tokens + 1,
        seed=None if params.is_greedy else params.seed,
    )


def _stages(
    passed: Sequence[tuple[str, Float[Tensor, "vocab"]]],
    probabilities: Float[Tensor, "stages vocab"],
    ids: Int[Tensor, "candidates"],
    params: SamplingParams,
) -> list[TraceStage]:
    others = probabilities.index_fill(1, ids, 0.0).sum(1).tolist()
    found = []
    before = passed[0][1]
    for index, (name, x) in enumerate(passed):
        is_dropped = (x == -math.inf) & (before > -math.inf)
        removed = float(before.double().softmax(-1)[is_dropped].sum())
        expected = before.masked_fill(is_dropped, -math.inf).double().softmax(-1)
        moved = float((probabilities[index] - expected).abs().sum()) / 2
        num_kept = int((x > -math.inf).sum())
        found.append(TraceStage(name, _value(name, params), num_kept, removed, moved, others[index]))
        before = x
    return found


def _value(name: str, params: SamplingParams) -> int | float | None:
    value: Any = params.temperature if name == "temperature_last" else None
    if value is None and name in PARAMETER_NAMES:
        value = getattr(params, name)
    return value if isinstance(value, int | float) else None


def _candidates(
    raw: Float[Tensor, "vocab"], probabilities: Float[Tensor, "stages vocab"], shown_ids: Sequence[int], count: int
) -> tuple[Int[Tensor, "candidates"], Int[Tensor, "candidates"]]:
    """Return the ids with the highest peak probability, including `shown_ids`, in the order of raw logits, and their
    ranks.
    """
    order = raw.sort(descending=True, stable=True).indices
    peaks = probabilities.max(0).values[order]
    places = peaks.sort(descending=True, stable=True).indices[:count]
    shown = torch.isin(order, torch.tensor(shown_ids, device=order.device)).nonzero()[:, 0]
    others = places[~torch.isin(places, shown)][: max(count - len(shown), 0)]
    places = torch.cat([others, shown]).sort().values
    return order[places], places + 1


def _follow(
    passed: Sequence[tuple[str, Float[Tensor, "vocab"]]],
    probabilities: Float[Tensor, "stages vocab"],
    ids: Int[Tensor, "candidates"],
    ranks: Int[Tensor, "candidates"],
    params: SamplingParams,
    position: int,
) -> list[TraceCandidate]:
    logits = torch.stack([x[ids] for _, x in passed], 1).tolist()
    last = passed[-1][1][ids]
    noise = None if params.is_greedy or params.seed is None else gumbel_at(params.seed, position, ids)
    scores = (last if noise is None else last + noise).tolist()
    found = []
    for index, values in enumerate(logits):
        dropped = next((name for (name, _), value in zip(passed, values, strict=True) if value == -math.inf), None)
        found.append(
            TraceCandidate(
                token_id=int(ids[index]),
                text="",
                rank=int(ranks[index]),
                logits=tuple(value if value > -math.inf else None for value in values),
                probabilities=tuple(probabilities[:, ids[index]].tolist()),
                noise=None if noise is None or dropped else float(noise[index]),
                score=None if dropped else scores[index],
                dropped_by=dropped,
            )
        )
    return found
