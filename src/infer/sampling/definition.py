"""The sampler for one row in plain torch. It is the definition: every other sampler gives the same result.

 1. float32; NaN, +inf or nothing finite is a LogitsError; raw log-probabilities are computed from these logits
 2. grammar mask, `allowed_token_ids`, minimum length (lifted if steps 2 and 3 would leave only the end)
 3. `logit_bias`
 4. repetition, then frequency, then presence penalty
 5. greedy (`temperature` 0): argmax
 6. temperature (with `temperature_last`: after step 9)
 7. top-k       8. top-p       9. min-p
10. Gumbel noise, argmax

Every stage maps a row to a row of the same shape and dtype, and changes nothing in place. It keeps a finite logit
finite or bans it (−inf). It leaves at least one token; masks and bans that leave none raise LogitsError. When its value
is off, it is the identity, bit for bit.
Ties are a total order: logit descending, then id ascending.
"""

import math
import secrets
from collections.abc import Collection, Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from infer.errors import InferError, InvalidRequestError
from infer.outputs import TokenLogprob
from infer.sampling.integer_probs import target, weights
from infer.sampling.noise import gumbel_at
from infer.sampling_params import SamplingParams

Logits = Float[Tensor, "vocab"]

NO_TOKEN_ALLOWED = "no token of this row is allowed by the grammar, allowed_token_ids and logit_bias together"


class LogitsError(InferError):
    """Error of a row from which nothing can be sampled: NaN or +inf in the logits, or no allowed token."""


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
    if params.is_greedy:
        return int(processed.argmax())
    kept = (processed > -math.inf).nonzero()[:, 0]
    if generator is not None:
        noise = _generated_gumbel(len(processed), generator).to(kept.device)[kept]
    else:
        seed = secrets.randbits(64) if params.seed is None else params.seed
        noise = gumbel_at(seed, len(context_token_ids), kept)
    return int(kept[(processed[kept] + noise).argmax()])


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
    if not 0 <= num_prompt_tokens <= len(context_token_ids):
        raise InvalidRequestError(
            f"num_prompt_tokens must be in [0, {len(context_token_ids)}] (the context), got {num_prompt_tokens}"
        )
    generated = context_token_ids[num_prompt_tokens:]
    row = keep_allowed(keep_allowed(check_logits(logits), allowed), params.allowed_token_ids)
    row = apply_logit_bias(row, params.logit_bias)
    if not bool((row > -math.inf).any()):
        raise LogitsError(NO_TOKEN_ALLOWED)
    if len(generated) < params.min_new_tokens:
        row = ban_ends(row, {*eos_token_ids, *(params.stop_token_ids or ())})
    window = params.repetition_window
    recent = context_token_ids if window is None else context_token_ids[max(len(context_token_ids) - window, 0) :]
    row = apply_repetition_penalty(row, recent, params.repetition_penalty)
    row = apply_frequency_penalty(row, generated, params.frequency_penalty)
    row = apply_presence_penalty(row, generated, params.presence_penalty)
    if params.is_greedy:
        return row
    if not params.temperature_last:
        row = apply_temperature(row, params.temperature)
    row = apply_top_k(row, params.top_k)
    row = apply_top_p(row, params.top_p)
    row = apply_min_p(row, params.min_p)
    return apply_temperature(row, params.temperature) if params.temperature_last else row


def check_logits(logits: Logits) -> Float[Tensor, "vocab"]:
    """Return the row in float32.

    Raises InvalidRequestError on a wrong shape or dtype, LogitsError on NaN, +inf, all −inf.
    """
    if logits.ndim != 1 or len(logits) == 0 or not logits.is_floating_point():
        raise InvalidRequestError(f"logits must be one row of floats, got {logits.dtype} {list(logits.shape)}")
    row = logits.float()
    # NaN is the maximum of any row that has one.
    largest = float(row.max())
    if math.isnan(largest) or largest == math.inf:
        raise LogitsError(f"the logits of this row have {'NaN' if math.isnan(largest) else '+inf'}: nothing is sampled")
    if largest == -math.inf:
        raise LogitsError("all logits of this row are -inf: no token can be sampled")
    return row


def keep_allowed(logits: Logits, allowed: Bool[Tensor, "vocab"] | Collection[int] | None) -> Logits:
    """Return the logits with −inf outside `allowed`, a mask or a collection of ids."""
    if allowed is None:
        return logits
    if not isinstance(allowed, Tensor):
        index = _index(logits, sorted(allowed), "allowed token ids")
        allowed = torch.zeros(len(logits), dtype=torch.bool, device=logits.device).index_fill(0, index, True)
    elif allowed.dtype != torch.bool or allowed.shape != logits.shape:
        raise InvalidRequestError(
            f"allowed must be bool [{len(logits)}] as the logits, got {allowed.dtype} {list(allowed.shape)}"
        )
    return logits.masked_fill(~allowed, -math.inf)


def apply_logit_bias(logits: Logits, bias_by_id: Mapping[int, float] | None) -> Logits:
    """Return logit + bias. −inf bans an id; +inf bans all ids except those with +inf. A banned id stays banned."""
    if not bias_by_id:
        return logits
    _index(logits, list(bias_by_id), "logit_bias")
    forced = [token_id for token_id, bias in bias_by_id.items() if bias == math.inf]
    if forced:
        logits = keep_allowed(logits, forced)
    index = torch.tensor([i for i in bias_by_id if bias_by_id[i] < math.inf], dtype=torch.int64, device=logits.device)
    biases = torch.tensor([bias_by_id[i] for i in index.tolist()], dtype=torch.float64, device=logits.device)
    values = logits[index]
    biased = _keep_finite(values, (values.double() + biases).to(logits.dtype))
    return logits.scatter(0, index, biased.masked_fill(biases == -math.inf, -math.inf))


def ban_ends(logits: Logits, end_ids: Collection[int]) -> Logits:
    """Return the logits with −inf at the ids that end a sequence, unless no other id is left.

    A grammar that allows only the end is finished, and ends below the minimum length.
    """
    if not end_ids:
        return logits
    longer = logits.index_fill(0, _index(logits, sorted(end_ids), "EOS and stop ids"), -math.inf)
    return longer if bool((longer > -math.inf).any()) else logits


def apply_repetition_penalty(logits: Logits, token_ids: Sequence[int], penalty: float) -> Logits:
    """Apply the penalty once per distinct id: divide a positive logit by it, multiply a negative one (CTRL, 2019)."""
    if penalty == 1.0 or not len(token_ids):
        return logits
    index = _index(logits, sorted(set(token_ids)), "the context")
    values = logits[index]
    factor = _scalar(values, penalty)
    wide = values.to(factor.dtype)
    penalised = torch.where(wide > 0, wide / factor, wide * factor).to(logits.dtype)
    return logits.scatter(0, index, _keep_finite(values, penalised))


def apply_frequency_penalty(logits: Logits, generated_token_ids: Sequence[int], penalty: float) -> Logits:
    """Return logit − penalty × the number of occurrences of the id in the generated text."""
    if penalty == 0.0 or not len(generated_token_ids):
        return logits
    index = _index(logits, generated_token_ids, "the context")
    index, counts = torch.unique(index, return_counts=True)
    return _subtract(logits, index, _scalar(logits, penalty, tiny=False) * counts)


def apply_presence_penalty(logits: Logits, generated_token_ids: Sequence[int], penalty: float) -> Logits:
    """Return logit − penalty for each id that occurs in the generated text."""
    if penalty == 0.0 or not len(generated_token_ids):
        return logits
    index = _index(logits, sorted(set(generated_token_ids)), "the context")
    return _subtract(logits, index, _scalar(logits, penalty, tiny=False))


def apply_temperature(logits: Logits, temperature: float) -> Logits:
    """Return logits / temperature, for temperature > 0. If the largest overflows, the row is shifted first."""
    if temperature == 1.0:
        return logits
    if not temperature > 0:
        raise InvalidRequestError(f"temperature must be above 0 to divide by, got {temperature} (0 is greedy: argmax)")
    divisor = _scalar(logits, temperature)
    wide = logits.to(divisor.dtype)
    largest = wide.max()
    if bool((largest / divisor).to(logits.dtype).isinf()):
        wide = wide - torch.where(largest.isinf(), 0.0, largest)
    return _keep_finite(logits, (wide / divisor).to(logits.dtype))


def apply_top_k(logits: Logits, k: int | None) -> Logits:
    """Keep the k largest logits by (logit descending, id ascending), and set the others to −inf.

    Off if k is None or covers the row.
    """
    if k is None or k >= len(logits):
        return logits
    if k < 1:
        raise InvalidRequestError(f"top_k must be at least 1, or None for off, got {k}")
    threshold = logits.topk(k).values[-1]
    below = logits < threshold
    kept = logits.masked_fill(below, -math.inf)
    num_surplus = len(logits) - int(below.sum()) - k
    if num_surplus == 0:
        return kept
    tied = (logits == threshold).nonzero()[:, 0]
    return kept.index_fill(0, tied[-num_surplus:], -math.inf)


def apply_top_p(logits: Logits, p: float) -> Logits:
    """Keep the fewest largest tokens whose probabilities sum to p or more, and set the others to −inf.

    `integer_probs` computes the sums.
    """
    if p == 1.0:
        return logits
    if not 0 <= p <= 1:
        raise InvalidRequestError(f"top_p must be in [0, 1], got {p}")
    if not bool((logits > -math.inf).any()):
        return logits
    ranked, order = logits.float().sort(descending=True, stable=True)
    sums = weights(ranked, ranked[0]).cumsum(0)
    goal = target(sums[-1], torch.tensor(p, dtype=torch.float64, device=logits.device))
    num_kept = int((sums.double() < goal).sum()) + 1
    return keep_allowed(logits, order[:num_kept].tolist())


def apply_min_p(logits: Logits, min_p: float) -> Logits:
    """Set logits to −inf if the probability is below min_p × the largest: logit < max + ln(min_p)."""
    if min_p == 0.0:
        return logits
    if not 0 <= min_p < 1:
        raise InvalidRequestError(f"min_p must be in [0, 1), got {min_p}")
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.masked_fill(wide < wide.max() + math.log(min_p), -math.inf)


def log_probabilities(logits: Logits, k: int, token_id: int | None = None) -> TokenLogprob:
    """Return the log-softmax of a row: the chosen token with its rank, and the k likeliest tokens.

    By default the chosen token is the likeliest.
    """
    row = check_logits(logits)
    logprobs = row.log_softmax(0)
    chosen = int(row.argmax()) if token_id is None else int(_index(row, [token_id], "token_id")[0])
    ahead = (row > row[chosen]).sum() + (row[:chosen] == row[chosen]).sum()
    top_ids = row.sort(descending=True, stable=True).indices[:k].tolist() if k else []
    top = tuple((token, float(logprobs[token])) for token in top_ids)
    return TokenLogprob(token_id=chosen, logprob=float(logprobs[chosen]), rank=int(ahead) + 1, top=top)


def _subtract(logits: Logits, index: Int[Tensor, "ids"], amounts: Tensor) -> Logits:
    values = logits[index]
    return logits.scatter(0, index, _keep_finite(values, (values.to(amounts.dtype) - amounts).to(logits.dtype)))


def _keep_finite(before: Tensor, after: Tensor) -> Tensor:
    """Return `after`, limited to the dtype's largest number. Values that were infinite before stay unchanged."""
    limit = torch.finfo(before.dtype).max
    return torch.where(before.isinf(), before, after.clamp(-limit, limit))


def _scalar(logits: Tensor, value: float, *, tiny: bool = True) -> Tensor:
    """Return the value on the row's device, in float32 or wider. CUDA divides by a Python number inexactly, so it is a
    tensor.

    With `tiny` a positive value stays a normal number, which is safe to divide by.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    limits = torch.finfo(dtype)
    bounded = min(max(value, limits.tiny if tiny else -limits.max), limits.max)
    return torch.tensor(bounded, dtype=dtype, device=logits.device)


def _index(logits: Tensor, token_ids: Sequence[int], source: str) -> Int[Tensor, "ids"]:
    """Return the ids as a tensor. Raises InvalidRequestError for an id outside the vocabulary."""
    index = torch.as_tensor(token_ids, dtype=torch.int64, device=logits.device)
    outside = (index < 0) | (index >= len(logits))
    if bool(outside.any()):
        token_id = int(index[outside][0])
        raise InvalidRequestError(f"{source}: token id must be in [0, {len(logits)}), the vocabulary, got {token_id}")
    return index


def _generated_gumbel(vocab_size: int, generator: torch.Generator) -> Float[Tensor, "vocab"]:
    uniform = torch.rand(vocab_size, generator=generator, device=generator.device, dtype=torch.float64)
    return -(-torch.log1p(-uniform.clamp(min=2.0**-54))).log().float()
