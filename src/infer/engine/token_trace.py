"""The logits of a text, and how one token of an answer was sampled from them, stage by stage."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from infer.engine.host import Host
from infer.engine.lease import Lease
from infer.engine.request_options import RequestOptions
from infer.errors import InferError, InvalidRequestError
from infer.kvcache.settings import CacheSettings
from infer.model.transformer import Transformer
from infer.operands.limits import MAX_STEP_TOKENS
from infer.operands.step import Step
from infer.outputs import SampleTrace, TokenLogprob
from infer.runner.caches import make_cache
from infer.sampling import trace
from infer.sampling_params import SamplingParams


@torch.inference_mode()
def logits_of(
    model: Transformer, token_ids: list[int], settings: CacheSettings, *, last: int | None
) -> Float[Tensor, "tokens vocab"]:
    """float32 logits after every token, or after the last few."""
    cache = make_cache(model, len(token_ids), settings=settings)
    cache.set_rope(0, is_long=model.is_long(len(token_ids)))
    first = 0 if last is None else max(len(token_ids) - last, 0)
    chunks = []
    for start in range(0, len(token_ids), MAX_STEP_TOKENS):
        chunk = token_ids[start : start + MAX_STEP_TOKENS]
        step = Step.of(chunk, start, logit_indices=range(max(first - start, 0), len(chunk))).to(model.device)
        cache.reserve(0, len(chunk))
        chunks.append(model.forward(step, cache))
        cache.commit(0, len(chunk))
    return torch.cat(chunks)


def score_prompt(host: Host, token_ids: list[int], num_top: int) -> list[TokenLogprob | None]:
    """How likely each token is after those before it, by the raw logits; None for the first."""

    def score(slot: int) -> list[TokenLogprob]:
        host.runner.truncate(slot, 0)  # of what a call left that ran out of pages
        return host.runner.score(slot, token_ids, num_top, host.vocab_size)

    return [None, *host.engine.change(Lease(), score)]


def trace_token(
    host: Host, prompt: list[int], params: SamplingParams, *, step: int, num_candidates: int
) -> SampleTrace:
    """Raises InvalidRequestError where the answer ends before `step`, or the cache keeps a part of a prompt."""
    tokenizer, cache = host.tokenizer, host.settings.cache
    if cache.keeps_whole_prompts:
        raise InvalidRequestError("a trace has logits of the whole text, of which snapkv keeps a part: load without it")
    params = replace(params, max_new_tokens=step, min_new_tokens=min(params.min_new_tokens, step))
    result = host.stream(host.sequence(prompt, params, RequestOptions(), {})).run()
    if result.error is not None:
        raise InvalidRequestError(f"the generation ended early: {result.error}")
    if len(result.token_ids) < step:
        why = f"{result.finish_reason}, {result.stop_reason!r}"
        raise InvalidRequestError(
            f"step must be at most {len(result.token_ids)}, where the answer ends ({why}), got {step}"
        )
    context = prompt + result.token_ids[: step - 1]
    found = trace.sample_trace(
        logits_of(host.model, context, cache, last=1)[0, : host.vocab_size],
        replace(params, seed=result.seed),
        context,
        num_prompt_tokens=len(prompt),
        eos_token_ids=tokenizer.eos_token_ids,
        num_candidates=num_candidates,
    )
    if found.token_id != result.token_ids[-1]:
        raise InferError(f"the trace ends in token {found.token_id}, the answer in {result.token_ids[-1]}")
    texts = tokenizer.token_bytes
    return replace(
        found,
        text_before=tokenizer.decode(context, skip_special_tokens=False),
        candidates=tuple(
            replace(candidate, text=texts[candidate.token_id].decode("utf-8", errors="backslashreplace"))
            for candidate in found.candidates
        ),
    )
