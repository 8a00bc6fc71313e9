"""The logits of a text, and how one token of an answer was sampled from them, stage by stage."""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from infer.errors import InferError, InvalidRequestError
from infer.kvcache.settings import CacheSettings
from infer.model.transformer import Transformer
from infer.operands.step import MAX_STEP_TOKENS, Step
from infer.outputs import GenerationResult, SampleTrace
from infer.runner.runner import make_cache
from infer.sampling import trace
from infer.sampling_params import SamplingParams
from infer.tokenizer import Tokenizer


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


def trace_token(
    prompt: list[int],
    params: SamplingParams,
    tokenizer: Tokenizer,
    vocab_size: int,
    *,
    generate: Callable[[list[int], SamplingParams], GenerationResult],
    last_logits: Callable[[list[int]], Float[Tensor, "vocab"]],
    step: int,
    num_candidates: int,
) -> SampleTrace:
    """Raises InvalidRequestError where the answer ends before `step`."""
    params = replace(params, max_new_tokens=step, min_new_tokens=min(params.min_new_tokens, step))
    result = generate(prompt, params)
    if result.error is not None:
        raise InvalidRequestError(f"the generation ended early: {result.error}")
    if len(result.token_ids) < step:
        why = f"{result.finish_reason}, {result.stop_reason!r}"
        raise InvalidRequestError(
            f"step must be at most {len(result.token_ids)}, where the answer ends ({why}), got {step}"
        )
    context = prompt + result.token_ids[: step - 1]
    found = trace.sample_trace(
        last_logits(context)[:vocab_size],
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
