"""The logits of a text, and the stages by which a token of an answer was sampled from them."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from itertools import repeat

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from infer.compute.sampling.masks import num_mask_words
from infer.compute.sampling.sampler import Sampled, log_probabilities
from infer.compute.sampling.trace import sample_trace
from infer.engine.requests.answer import Work
from infer.engine.requests.ask import Ask
from infer.engine.requests.host import Host
from infer.engine.requests.prompt_encoding import Prompt, prompt_ids
from infer.engine.step.request import Request, check_prompt
from infer.engine.step.sequence import Lease
from infer.engine.step.slots import keep_common
from infer.engine.texts.text_states import step_tokens
from infer.errors import InferError, InvalidRequestError
from infer.outputs import SampleTrace, TokenLogprob
from infer.parameters import Count
from infer.request_limits import MAX_LOGPROBS


def logits_of(
    host: Host, token_ids: Sequence[int], last: int | None
) -> Generator[None, None, Float[Tensor, "tokens vocab"]]:
    """Return the float32 logits after every token, or only after the last few. It is work for the loop."""
    num_logits = len(token_ids) if last is None else min(last, len(token_ids))
    first, parts = len(token_ids) - max(1, num_logits), list[Tensor]()
    for logits in logits_beside(host, token_ids, first):
        parts += [] if logits is None else [logits]
        yield
    return torch.cat(parts)[len(token_ids) - first - num_logits :]


def logits_beside(
    host: Host, token_ids: Sequence[int], first: int, lease: Lease | None = None
) -> Iterator[Float[Tensor, "tokens vocab"] | None]:
    """Yield the float32 logits after each token from index `first` on, at most as many at a time as a step may have.

    They are computed in a slot of the engine, one chunk per `next`. It is the lease's slot, which keeps the prefix that
    both share. After a chunk before `first`, it yields None. If others take the slot, tokens are computed again, and it
    yields None meanwhile. Each time it computes twice as many tokens per chunk, so there is always progress.
    """
    runner, held = host.runner, lease or Lease()
    num_done = num_held = num_losses = 0  # tokens whose logits are known or not wanted; tokens in the slot; its losses

    def compute(slot: int) -> Tensor | None:
        nonlocal num_done, num_held, num_losses
        start = keep_common(runner.cache, held, token_ids, slot)
        start = 0 if runner.choose_rope(slot, len(token_ids)) else start
        num_done, num_losses = max(num_done, min(start, first)), num_losses + (start < num_held)
        most, logits = step_tokens(host), None
        held.token_ids = []
        try:
            if start < num_done:
                runner.extend(slot, token_ids[start:num_done][: most << num_losses])
            if runner.lengths[slot] == num_done < first:
                runner.extend(slot, token_ids[num_done : min(num_done + most, first)])
                num_done = runner.lengths[slot]
            elif runner.lengths[slot] == num_done < len(token_ids):
                chunk = token_ids[num_done : num_done + min(most, host.model.step_limits.logits)]
                logits = runner.append(slot, chunk, len(chunk))
                num_done += len(chunk)
        finally:  # it may run out of pages after some tokens
            num_held = runner.lengths[slot]
            held.token_ids = list(token_ids[:num_held])
        return logits

    while num_done < len(token_ids):
        yield host.engine.change(held, compute)


def computing(host: Host, token_ids: Sequence[int], lease: Lease) -> Work[None]:
    """Make a lease's slot contain exactly these tokens. It is work for the loop."""
    for _ in logits_beside(host, token_ids, len(token_ids), lease):
        yield None


def score_prompt(
    host: Host, token_ids: Sequence[int], num_top: int
) -> Generator[None, None, list[TokenLogprob | None]]:
    """Return the log-probability of each token by the raw logits, None for the first. It is work for the loop."""
    entries: list[TokenLogprob | None] = [None]
    for logits in logits_beside(host, token_ids, 0):
        yield
        if logits is None:
            continue
        logits[:, host.requests.limits.vocab_size :] = -torch.inf
        next_ids = token_ids[len(entries) : len(entries) + len(logits)]
        following = torch.tensor(next_ids, dtype=torch.int64, device=logits.device)
        scored = Sampled(following, *log_probabilities(logits[: len(following)], following, num_top))
        entries += [scored.logprob_of(index, num_top) for index in range(len(following))]
    return entries


def ids_to_score(host: Host, prompt: Prompt, num_top: int = 0) -> list[int]:
    """Return the ids of a prompt that is not answered. Raises InvalidRequestError."""
    Count(0, MAX_LOGPROBS).check("num", num_top)
    limits = host.requests.limits
    return check_prompt(limits, prompt_ids(prompt, host.tokenizer, limits.max_seq_len), room=0)


def trace_token(host: Host, ask: Ask, step: int, num_candidates: int) -> SampleTrace:
    """Return the trace of one step of an answer.

    Raises InvalidRequestError if the answer ends before `step`, and the errors of `check_traceable`.
    """
    Count(1, host.requests.limits.max_seq_len).check("step", step)
    Count(1, host.requests.limits.vocab_size).check("num_candidates", num_candidates)
    check_traceable(host)
    params = host.requests.params_of(ask)
    asked = replace(params, max_new_tokens=step, min_new_tokens=min(params.min_new_tokens, step))
    sequence = host.requests.sequence(replace(ask, given=asked, sampling={}))
    result = host.loop.stream(sequence).run()
    if result.error is not None:
        raise InvalidRequestError(f"the generation ended early: {result.error}")
    if len(result.token_ids) < step:
        why = f"{result.finish_reason}, {result.stop_reason!r}"
        raise InvalidRequestError(
            f"step must be at most {len(result.token_ids)}, the end of the answer ({why}), got {step}"
        )
    request = replace(sequence.request, params=replace(params, seed=result.seed))
    work = trace_answer(host, request, result.token_ids, first=step, num_candidates=num_candidates)
    (trace,) = host.loop.call(work).get()
    context = [*request.prompt_token_ids, *result.token_ids[: step - 1]]
    return replace(trace, text_before=host.tokenizer.decode(context, skip_special_tokens=False))


def check_traceable(host: Host) -> None:
    """Raise InvalidRequestError if the cache keeps only a part of a prompt."""
    if host.settings.cache.keeps_whole_prompts:
        raise InvalidRequestError(
            "a trace needs the whole prompt, but snapkv keeps only a part: load the model without snapkv"
        )


def trace_answer(
    host: Host,
    request: Request,
    answer: Sequence[int],
    *,
    first: int = 1,
    last: int | None = None,
    num_candidates: int,
    is_given: bool = False,
) -> Generator[None, None, list[SampleTrace]]:
    """Return the trace of each token of an answer, from step `first` to `last` (by default the answer's end).

    If the answer `is_given`, its tokens may differ from those of the sampler. It is work for the loop, token by token.
    """
    num_prompt_tokens = len(request.prompt_token_ids)
    context, place = [*request.prompt_token_ids, *answer[:last]], num_prompt_tokens + first - 1
    traces, masks = list[SampleTrace](), _masks(host, request, answer, first)
    for logits in logits_beside(host, context[:-1], place - 1):
        yield
        for row in () if logits is None else logits:
            trace = sample_trace(
                row[: host.requests.limits.vocab_size],
                request.params,
                context[:place],
                num_prompt_tokens=num_prompt_tokens,
                eos_token_ids=host.tokenizer.eos_token_ids,
                num_candidates=num_candidates,
                allowed=next(masks),
                shown_id=context[place],
            )
            if trace.token_id != context[place] and not is_given:
                raise InferError(f"the trace sampled token {trace.token_id}, but the answer has {context[place]}")
            traces.append(_spelled(trace, host.tokenizer.token_bytes))
            place += 1
            yield
    return traces


def _masks(host: Host, request: Request, answer: Sequence[int], first: int) -> Iterator[Int[Tensor, "words"] | None]:
    """Return the mask of the request's grammar before each token of the answer, from step `first` on.

    After the grammar's end, or a forbidden token, all bits are 1. Without a grammar, it is None. Raises
    InvalidRequestError if the grammar does not allow the tokens before.
    """
    if request.make_constraint is None:
        return repeat(None)
    constraint, before = request.make_constraint(), answer[: first - 1]
    if (count := constraint.accept(before)) < len(before):
        raise InvalidRequestError(f"the grammar does not allow token {before[count]}, number {count} of the answer")

    def masks() -> Iterator[Int[Tensor, "words"]]:
        has_ended = False
        for token_id in answer[first - 1 :]:
            mask = np.full(num_mask_words(host.requests.limits.vocab_size), -1, np.int32)
            if not has_ended:
                constraint.fill(mask)
                has_ended = constraint.accept([token_id]) == 0
            yield torch.from_numpy(mask).to(host.model.device)

    return masks()


def _spelled(trace: SampleTrace, token_bytes: Sequence[bytes]) -> SampleTrace:
    candidates = (
        replace(each, text=token_bytes[each.token_id].decode("utf-8", errors="backslashreplace"))
        for each in trace.candidates
    )
    return replace(trace, candidates=tuple(candidates))
