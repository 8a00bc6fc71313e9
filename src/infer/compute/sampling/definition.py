"""The sampler for one row in plain torch. It is the definition: every other sampler gives the same result.

 1. float32; NaN, +inf or nothing finite is a LogitsError; raw log-probabilities are computed from these logits
 2. grammar mask, `allowed_token_ids`, minimum length (lifted if steps 2 and 3 would leave only the end)
 3. `logit_bias`
 4. repetition, then frequency, then presence penalty
 5. greedy (`temperature` 0): argmax
 6. temperature (with `temperature_last`: after step 9)
 7. top-k       8. top-p       9. min-p
10. Gumbel noise, argmax

`row_stages` has the stages, and `FILTERS` there the order of 7 to 9. Each leaves at least one token; masks and bans
that leave none raise LogitsError.
Ties are a total order: logit descending, then id ascending.
"""

import math
import secrets
from collections.abc import Collection, Iterator, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from infer.compute.sampling.constants import NOT_A_NUMBER, NOTHING_ALLOWED
from infer.compute.sampling.noise import gumbel_at
from infer.compute.sampling.row_stages import (
    FILTERS,
    Logits,
    allowed_ids,
    apply_frequency_penalty,
    apply_logit_bias,
    apply_presence_penalty,
    apply_repetition_penalty,
    apply_temperature,
    ban_ends,
    check_row,
    filters_in_use,
    index_of,
    keep_allowed,
)
from infer.errors import InferError, InvalidRequestError
from infer.outputs import TokenLogprob
from infer.sampling_params import SamplingParams

NO_TOKEN_ALLOWED = "no token of this row is allowed by the grammar, allowed_token_ids and logit_bias together"


class LogitsError(InferError):
    """Error of a row from which nothing can be sampled: NaN or +inf in the logits, or no allowed token.

    A batch has `code` in place of the row's token.
    """

    def __init__(self, message: str, code: int = NOTHING_ALLOWED) -> None:
        super().__init__(message)
        self.code = code


def sample_token(
    logits: Logits,
    context_token_ids: Sequence[int],
    params: SamplingParams,
    generator: torch.Generator | None = None,
    *,
    num_prompt_tokens: int = 0,
    eos_token_ids: Collection[int] = frozenset(),
    allowed: Bool[Tensor, "vocab"] | Collection[int] | None = None,
) -> int:
    """Return the next token id after a context. It is the definition that every faster sampler must equal.

    Args:
        logits: The logits of the next token, `[vocab]`.
        context_token_ids: The prompt and the tokens generated so far.
        params: The sampling parameters.
        generator: Source of the noise. None: the noise is a function of the seed, the number of context tokens and the
            token id (`sampling.noise`). Without a seed, a fresh one is drawn.
        num_prompt_tokens: Number of the first context tokens that are the prompt.
        eos_token_ids: Ids that are banned until `min_new_tokens` are generated.
        allowed: The ids that may be sampled, as a mask or as ids. None: all ids.

    Raises:
        LogitsError: No token can be sampled from these logits.

    Examples:
        >>> logits = torch.tensor([0.0, 2.0, 1.0])
        >>> sample_token(logits, [5, 6], SamplingParams(temperature=0))
        1
    """
    processed = process_logits(
        logits,
        context_token_ids,
        params,
        num_prompt_tokens=num_prompt_tokens,
        eos_token_ids=eos_token_ids,
        allowed=allowed,
    )
    seed = secrets.randbits(64) if params.seed is None else params.seed
    if params.is_greedy or generator is None:
        return choose_token(processed, params, seed, len(context_token_ids))
    kept = (processed > -math.inf).nonzero()[:, 0]
    noise = _generated_gumbel(len(processed), generator).to(kept.device)[kept]
    return int(kept[(processed[kept] + noise).argmax()])


def choose_token(processed: Float[Tensor, "vocab"], params: SamplingParams, seed: int, position: int) -> int:
    """Return the token of steps 5 and 10, from logits after step 9. `position` is the noise's counter."""
    if params.is_greedy:
        return int(processed.argmax())
    kept = (processed > -math.inf).nonzero()[:, 0]
    return int(kept[(processed[kept] + gumbel_at(seed, position, kept)).argmax()])


def process_logits(
    logits: Logits,
    context_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    num_prompt_tokens: int = 0,
    eos_token_ids: Collection[int] = frozenset(),
    allowed: Bool[Tensor, "vocab"] | Collection[int] | None = None,
) -> Float[Tensor, "vocab"]:
    """Return float32 logits after steps 1 to 9 (to 4 if greedy), to which the noise is added."""
    *_, (_, processed) = stages(
        logits,
        context_token_ids,
        params,
        num_prompt_tokens=num_prompt_tokens,
        eos_token_ids=eos_token_ids,
        allowed=allowed,
    )
    return processed


def stages(
    logits: Logits,
    context_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    num_prompt_tokens: int = 0,
    eos_token_ids: Collection[int] = frozenset(),
    allowed: Bool[Tensor, "vocab"] | Collection[int] | None = None,
) -> Iterator[tuple[str, Float[Tensor, "vocab"]]]:
    """Yield the name of each of steps 1 to 9 that is in use, and the float32 logits after it. The first is "raw"."""
    if not 0 <= num_prompt_tokens <= len(context_token_ids):
        raise InvalidRequestError(
            f"num_prompt_tokens must be in [0, {len(context_token_ids)}] (the context), got {num_prompt_tokens}"
        )
    generated = context_token_ids[num_prompt_tokens:]
    row = check_logits(logits)
    yield "raw", row
    if allowed is not None or allowed_ids(params) is not None:
        row = keep_allowed(keep_allowed(row, allowed), allowed_ids(params))
        yield "allowed", row
    if any(bias < math.inf for bias in (params.logit_bias or {}).values()):
        row = apply_logit_bias(row, params.logit_bias)
        yield "logit_bias", row
    if not bool((row > -math.inf).any()):
        raise LogitsError(NO_TOKEN_ALLOWED)
    if params.min_new_tokens and (ends := {*eos_token_ids, *(params.stop_token_ids or ())}):
        row = ban_ends(row, ends) if len(generated) < params.min_new_tokens else row
        yield "min_new_tokens", row
    for name, penalised in _penalties(row, context_token_ids, generated, params):
        row = penalised
        yield name, row
    if params.is_greedy:
        return
    yield from _filters(row, params)


def _penalties(
    row: Logits, context_token_ids: Sequence[int], generated: Sequence[int], params: SamplingParams
) -> Iterator[tuple[str, Logits]]:
    window = params.repetition_window
    if params.repetition_penalty != 1 and window != 0:
        recent = context_token_ids if window is None else context_token_ids[max(len(context_token_ids) - window, 0) :]
        row = apply_repetition_penalty(row, recent, params.repetition_penalty)
        yield "repetition_penalty", row
    if params.frequency_penalty:
        row = apply_frequency_penalty(row, generated, params.frequency_penalty)
        yield "frequency_penalty", row
    if params.presence_penalty:
        yield "presence_penalty", apply_presence_penalty(row, generated, params.presence_penalty)


def _filters(row: Logits, params: SamplingParams) -> Iterator[tuple[str, Logits]]:
    if params.temperature != 1 and not params.temperature_last:
        row = apply_temperature(row, params.temperature)
        yield "temperature", row
    for name in filters_in_use(params, len(row)):
        row = FILTERS[name].apply(row, getattr(params, name))
        yield name, row
    if params.temperature != 1 and params.temperature_last:
        yield "temperature_last", apply_temperature(row, params.temperature)


def check_logits(logits: Logits) -> Float[Tensor, "vocab"]:
    """Return the row in float32.

    Raises InvalidRequestError on a wrong shape or dtype, LogitsError on NaN, +inf, all −inf.
    """
    check_row(logits)
    row = logits.float()
    # NaN is the maximum of any row that has one.
    largest = float(row.max())
    if math.isnan(largest) or largest == math.inf:
        kind = "NaN" if math.isnan(largest) else "+inf"
        raise LogitsError(f"the logits of this row have {kind}: nothing is sampled", NOT_A_NUMBER)
    if largest == -math.inf:
        raise LogitsError("all logits of this row are -inf: no token can be sampled")
    return row


def log_probabilities(logits: Logits, k: int, token_id: int | None = None) -> TokenLogprob:
    """Return the log-softmax of a row: the chosen token with its rank, and the k likeliest tokens.

    By default the chosen token is the likeliest.
    """
    row = check_logits(logits)
    logprobs = row.log_softmax(0)
    chosen = int(row.argmax()) if token_id is None else int(index_of(row, [token_id], "token_id")[0])
    ahead = (row > row[chosen]).sum() + (row[:chosen] == row[chosen]).sum()
    top_ids = row.sort(descending=True, stable=True).indices[:k].tolist() if k else []
    top = tuple((token, float(logprobs[token])) for token in top_ids)
    return TokenLogprob(token_id=chosen, logprob=float(logprobs[chosen]), rank=int(ahead) + 1, top=top)


def _generated_gumbel(vocab_size: int, generator: torch.Generator) -> Float[Tensor, "vocab"]:
    uniform = torch.rand(vocab_size, generator=generator, device=generator.device, dtype=torch.float64)
    return -(-torch.log1p(-uniform.clamp(min=2.0**-54))).log().float()
