"""The stages of the definition: functions that map a row of logits to a row of the same shape and dtype.

A stage changes nothing in place. It keeps a finite logit finite or bans it (−inf). When its value is off, it is the
identity, bit for bit.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from infer.compute.sampling.noise import target, weights
from infer.errors import InvalidRequestError
from infer.parameters import shown
from infer.sampling_params import PARAMETERS, SMALLEST_TOP_P, SamplingParams

Logits = Float[Tensor, "vocab"]


def keep_allowed(logits: Logits, allowed: Bool[Tensor, "vocab"] | Collection[int] | None) -> Logits:
    """Return the logits with −inf outside `allowed`, a mask or a collection of ids."""
    if allowed is None:
        return logits
    if not isinstance(allowed, Tensor):
        index = index_of(logits, sorted(allowed), "allowed token ids")
        allowed = torch.zeros(len(logits), dtype=torch.bool, device=logits.device).index_fill(0, index, True)
    elif allowed.dtype != torch.bool or allowed.shape != logits.shape:
        raise InvalidRequestError(
            f"allowed must be bool [{len(logits)}] as the logits, got {allowed.dtype} {list(allowed.shape)}"
        )
    return logits.masked_fill(~allowed, -math.inf)


def apply_logit_bias(logits: Logits, bias_by_id: Mapping[int, float] | None) -> Logits:
    """Return logit + bias. −inf bans an id; +inf bans all ids except those with +inf. A banned id stays banned.

    Args:
        logits: The logits of the next token, `[vocab]`.
        bias_by_id: The bias of each id. None and {} are off.

    Returns:
        Logits of the same shape and dtype.

    Raises:
        InvalidRequestError: An id is outside the vocabulary, or a bias is no number.

    Examples:
        >>> apply_logit_bias(torch.tensor([0.0, 2.0, 1.0]), {0: 5.0})
        tensor([5., 2., 1.])
    """
    check_row(logits)
    if not bias_by_id:
        return logits
    index_of(logits, list(bias_by_id), "logit_bias")
    check_row(logits, "logit_bias", bias_by_id)
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
    longer = logits.index_fill(0, index_of(logits, sorted(end_ids), "EOS and stop ids"), -math.inf)
    return longer if bool((longer > -math.inf).any()) else logits


def apply_repetition_penalty(logits: Logits, token_ids: Sequence[int], penalty: float) -> Logits:
    """Apply the penalty once per distinct id: divide a positive logit by it, multiply a negative one (CTRL, 2019).

    Args:
        logits: The logits of the next token, `[vocab]`.
        token_ids: The ids of the prompt and of the answer.
        penalty: Above 0. 1 is off.

    Returns:
        Logits of the same shape and dtype.

    Raises:
        InvalidRequestError: An id is outside the vocabulary, or the penalty is no number that it may be.

    Examples:
        >>> apply_repetition_penalty(torch.tensor([3.0, 2.0, -1.0]), [1, 2, 2], 2.0)
        tensor([ 3.,  1., -2.])
    """
    check_row(logits, "repetition_penalty", penalty)
    if penalty == 1.0 or not len(token_ids):
        return logits
    index = index_of(logits, sorted(set(token_ids)), "the context")
    values = logits[index]
    factor = _scalar(values, penalty)
    wide = values.to(factor.dtype)
    penalised = torch.where(wide > 0, wide / factor, wide * factor).to(logits.dtype)
    return logits.scatter(0, index, _keep_finite(values, penalised))


def apply_frequency_penalty(logits: Logits, generated_token_ids: Sequence[int], penalty: float) -> Logits:
    """Return logit − penalty × the number of occurrences of the id in the answer.

    Args:
        logits: The logits of the next token, `[vocab]`.
        generated_token_ids: The ids of the answer, without those of the prompt.
        penalty: A number, for which `SamplingParams` allows −2 to 2. 0 is off.

    Returns:
        Logits of the same shape and dtype.

    Raises:
        InvalidRequestError: An id is outside the vocabulary, or the penalty is no number that it may be.

    Examples:
        >>> apply_frequency_penalty(torch.tensor([3.0, 2.0, 1.0]), [1, 2, 2], 0.5)
        tensor([3.0000, 1.5000, 0.0000])
    """
    check_row(logits)
    if penalty == 0.0 or not len(generated_token_ids):
        return logits
    index = index_of(logits, generated_token_ids, "the context")
    index, counts = torch.unique(index, return_counts=True)
    return _subtract(logits, index, _scalar(logits, penalty, tiny=False) * counts)


def apply_presence_penalty(logits: Logits, generated_token_ids: Sequence[int], penalty: float) -> Logits:
    """Return logit − penalty for each id that occurs in the answer.

    Args:
        logits: The logits of the next token, `[vocab]`.
        generated_token_ids: The ids of the answer, without those of the prompt.
        penalty: A number, for which `SamplingParams` allows −2 to 2. 0 is off.

    Returns:
        Logits of the same shape and dtype.

    Raises:
        InvalidRequestError: An id is outside the vocabulary, or the penalty is no number that it may be.

    Examples:
        >>> apply_presence_penalty(torch.tensor([3.0, 2.0, 1.0]), [1, 2, 2], 0.5)
        tensor([3.0000, 1.5000, 0.5000])
    """
    check_row(logits)
    if penalty == 0.0 or not len(generated_token_ids):
        return logits
    index = index_of(logits, sorted(set(generated_token_ids)), "the context")
    return _subtract(logits, index, _scalar(logits, penalty, tiny=False))


def apply_temperature(logits: Logits, temperature: float) -> Logits:
    """Return logits / temperature. If the largest overflows, the row is shifted first.

    Args:
        logits: The logits of the next token, `[vocab]`.
        temperature: Above 0. 1 is off.

    Returns:
        Logits of the same shape and dtype.

    Raises:
        InvalidRequestError: The temperature is 0, which is greedy and has no division, or below 0.

    Examples:
        >>> apply_temperature(torch.tensor([0.0, 2.0, 1.0]), 0.5)
        tensor([0., 4., 2.])
    """
    check_row(logits)
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

    Args:
        logits: The logits of the next token, `[vocab]`.
        k: At least 1. None, and the size of the vocabulary or more, are off.

    Returns:
        Logits of the same shape and dtype.

    Raises:
        InvalidRequestError: k breaks its rule.

    Examples:
        >>> apply_top_k(torch.tensor([0.0, 2.0, 1.0]), 2)
        tensor([-inf, 2., 1.])
    """
    check_row(logits, "top_k", k)
    if k is None or k >= len(logits):
        return logits
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

    Args:
        logits: The logits of the next token, `[vocab]`.
        p: Above 0, at most 1. 1 is off.

    Returns:
        Logits of the same shape and dtype.

    Raises:
        InvalidRequestError: p breaks its rule.

    Examples:
        >>> apply_top_p(torch.tensor([0.0, 2.0, 1.0]), 0.9)
        tensor([-inf, 2., 1.])
    """
    check_row(logits, "top_p", p)
    if p == 1.0:
        return logits
    if not bool((logits > -math.inf).any()):
        return logits
    ranked, order = logits.float().sort(descending=True, stable=True)
    sums = weights(ranked, ranked[0]).cumsum(0)
    goal = target(sums[-1], torch.tensor(p, dtype=torch.float64, device=logits.device))
    num_kept = int((sums.double() < goal).sum()) + 1
    return keep_allowed(logits, order[:num_kept].tolist())


def apply_min_p(logits: Logits, min_p: float) -> Logits:
    """Set logits to −inf if the probability is below min_p × the largest: logit < max + ln(min_p).

    Args:
        logits: The logits of the next token, `[vocab]`.
        min_p: At least 0, below 1. 0 is off.

    Returns:
        Logits of the same shape and dtype.

    Raises:
        InvalidRequestError: min_p breaks its rule.

    Examples:
        >>> apply_min_p(torch.tensor([0.0, 2.0, 1.0]), 0.2)
        tensor([-inf, 2., 1.])
    """
    check_row(logits, "min_p", min_p)
    if min_p == 0.0:
        return logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.masked_fill(wide < wide.max() + math.log(min_p), -math.inf)


class Filter(NamedTuple):
    """A filter: a stage that only bans tokens, and that a greedy row does not need.

    `number(value, vocab_size)` is what kernels read in place of the parameter's value, as a float64: `off` if the
    filter keeps every token.
    """

    apply: Callable[[Logits, Any], Logits]
    number: Callable[[Any, int], float]
    off: float


# By the parameter's name, in the order in which they are applied. Kernels read top-k's number of tokens, top-p's
# probability, and the logarithm of min-p, rounded to the float32 that logits have.
FILTERS: dict[str, Filter] = {
    "top_k": Filter(apply_top_k, lambda k, vocab_size: k if k and k < vocab_size else 0, off=0),
    "top_p": Filter(apply_top_p, lambda p, _: max(p, SMALLEST_TOP_P), off=1),
    "min_p": Filter(apply_min_p, lambda p, _: float(np.float32(math.log(p))) if p else -math.inf, off=-math.inf),
}


def filter_numbers(params: SamplingParams, vocab_size: int) -> dict[str, float]:
    """Return the number of each filter by the parameter's name. A greedy row has no filter."""
    if params.is_greedy:
        return {name: each.off for name, each in FILTERS.items()}
    return {name: each.number(getattr(params, name), vocab_size) for name, each in FILTERS.items()}


def filters_in_use(params: SamplingParams, vocab_size: int) -> list[str]:
    """Return the names of the filters that may ban tokens of this row, in their order. Every sampler asks here."""
    return [name for name, number in filter_numbers(params, vocab_size).items() if number != FILTERS[name].off]


def allowed_ids(params: SamplingParams) -> Collection[int] | None:
    """Return the ids left by `allowed_token_ids` and biases of +inf, or None if every id is allowed."""
    if params.logit_bias is None:
        return params.allowed_token_ids
    forced = {token_id for token_id, bias in params.logit_bias.items() if bias == math.inf}
    if params.allowed_token_ids is None:
        return forced or None
    return forced & set(params.allowed_token_ids) if forced else params.allowed_token_ids


def check_row(logits: object, name: str | None = None, value: object = None) -> None:
    """Raise InvalidRequestError for logits that are not one row of floats, and for a value that breaks its rule."""
    if not isinstance(logits, Tensor) or logits.ndim != 1 or not len(logits) or not logits.is_floating_point():
        given = f"{logits.dtype} {list(logits.shape)}" if isinstance(logits, Tensor) else shown(logits)
        raise InvalidRequestError(f"logits must be one row of floats, got {given}")
    if name is not None:
        PARAMETERS[name].kind.check(name, value)


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
    if math.isnan(value):
        raise InvalidRequestError(f"a penalty and a temperature must be a number, got {value}")
    limits = torch.finfo(dtype)
    bounded = min(max(value, limits.tiny if tiny else -limits.max), limits.max)
    return torch.tensor(bounded, dtype=dtype, device=logits.device)


def index_of(logits: Tensor, token_ids: Sequence[int], source: str) -> Int[Tensor, "ids"]:
    """Return the ids as a tensor. Raises InvalidRequestError for an id outside the vocabulary."""
    index = torch.as_tensor(token_ids, dtype=torch.int64, device=logits.device)
    outside = (index < 0) | (index >= len(logits))
    if bool(outside.any()):
        token_id = int(index[outside][0])
        raise InvalidRequestError(f"{source}: token id must be in [0, {len(logits)}), the vocabulary, got {token_id}")
    return index
