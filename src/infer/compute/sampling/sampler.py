"""The sampler for a batch, in torch on any device: every row with its own parameters, no loop over rows, no read-back.

 1. float32; raw log-probabilities are computed from these logits
 2. grammar mask, `allowed_token_ids`, minimum length (lifted if steps 2 and 3 would leave only the end)
 3. `logit_bias`
 4. repetition, then frequency, then presence penalty
 5. greedy rows: argmax
 6. temperature (rows with `temperature_last`: after step 9)
 7. top-k       8. top-p       9. min-p
10. Gumbel noise, argmax

`stages` yields these steps one by one. A step that no row needs is left out. A row that does not need a step passes
through it unchanged, bit for bit. A row's token equals the token that `definition` returns for that row alone.
Ties: logit descending, then id ascending.
A row with NaN or +inf, or with no token left, gets a negative code in place of a token. Other rows are not affected.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.constants import NOT_A_NUMBER, NOTHING_ALLOWED, WEIGHT_BITS
from infer.compute.sampling.definition import NO_TOKEN_ALLOWED, LogitsError
from infer.compute.sampling.history import History
from infer.compute.sampling.integer_probs import target, weights
from infer.compute.sampling.masks import num_mask_words, unpack_bits
from infer.compute.sampling.noise import gumbel_rows
from infer.errors import InvalidRequestError
from infer.outputs import TokenLogprob

Logits = Float[Tensor, "rows vocab"]
Masks = Int[Tensor, "rows words"]
Choose = Callable[[Logits, SamplingColumns, History | None, Int[Tensor, "rows"], Masks | None], Int[Tensor, "rows"]]

_MESSAGES = {
    NOT_A_NUMBER: "the logits of this row have NaN or +inf: nothing is sampled",
    NOTHING_ALLOWED: NO_TOKEN_ALLOWED,
}
_LARGEST = torch.finfo(torch.float32).max


@final
@dataclass(frozen=True)
class Sampled:
    """One token per row. Log-probabilities are None unless a row requested them, and undefined for failed rows."""

    token_ids: Int[Tensor, "rows"]  # a negative code if the row failed; `message_of` returns the reason
    logprobs: Float[Tensor, "rows"] | None = None
    ranks: Int[Tensor, "rows"] | None = None  # 1 is the likeliest
    top_ids: Int[Tensor, "rows alternatives"] | None = None
    top_logprobs: Float[Tensor, "rows alternatives"] | None = None

    def logprob_of(self, row: int, num_alternatives: int) -> TokenLogprob:
        assert self.logprobs is not None
        assert self.ranks is not None
        assert self.top_ids is not None
        assert self.top_logprobs is not None
        ids, logprobs = (x[row, :num_alternatives].tolist() for x in (self.top_ids, self.top_logprobs))
        return TokenLogprob(
            token_id=int(self.token_ids[row]),
            logprob=float(self.logprobs[row]),
            rank=int(self.ranks[row]),
            top=tuple(zip(ids, logprobs, strict=True)),
        )


def message_of(code: int) -> str:
    """Return the reason why a row failed, from the code that the row got in place of a token."""
    return _MESSAGES[code]


def check(token_id: int) -> int:
    """Return the token. Raises LogitsError for the code of a failed row."""
    if token_id < 0:
        raise LogitsError(message_of(token_id))
    return token_id


def sample(
    logits: Logits,
    columns: SamplingColumns,
    history: History | None,
    positions: Int[Tensor, "rows"],
    allowed: Masks | None = None,
    *,
    choose: Choose | None = None,
) -> Sampled:
    """Return the token of each row at `positions`. A position is the number of tokens before it, and the noise's
    counter.

    logits may be float32, float16 or bfloat16 and stay unchanged. `allowed` is the grammar's mask, packed as
    `columns.masks`, with all ones for rows without a grammar. `choose` is the function that finds the tokens, by
    default `choose_tokens`. Raises InvalidRequestError for wrong shapes.
    """
    check_shapes(logits, columns, history, positions, allowed)
    token_ids = (choose or choose_tokens)(logits, columns, history, positions, allowed)
    counts = [0 if count is None else count for count in columns.num_logprobs]
    if all(count is None for count in columns.num_logprobs):
        return Sampled(token_ids)
    scored = logits.float()
    if any(columns.is_processed):
        processed = process(logits, columns, history, positions, allowed)
        is_processed = torch.tensor(columns.is_processed, device=logits.device)
        scored = torch.where(is_processed[:, None], processed, scored)
    return Sampled(token_ids, *log_probabilities(scored, token_ids.clamp(min=0), max(counts)))


def choose_tokens(
    logits: Logits,
    columns: SamplingColumns,
    history: History | None,
    positions: Int[Tensor, "rows"],
    allowed: Masks | None = None,
) -> Int[Tensor, "rows"]:
    """Return the token of each row, by steps 1 to 10."""
    processed = process(logits, columns, history, positions, allowed)
    token_ids = processed.argmax(-1)
    if columns.has_sampled:
        noise = gumbel_rows(columns.seed, positions, torch.arange(columns.vocab_size, device=logits.device))
        sampled = (processed + noise).argmax(-1)
        token_ids = torch.where(columns.temperature == 0, token_ids, sampled) if columns.has_greedy else sampled
    largest = logits.max(-1).values.float()  # NaN if a row has one
    token_ids = torch.where(processed.gather(1, token_ids[:, None])[:, 0] == -math.inf, NOTHING_ALLOWED, token_ids)
    return torch.where(largest.isnan() | (largest == math.inf), NOT_A_NUMBER, token_ids)


def process(
    logits: Logits,
    columns: SamplingColumns,
    history: History | None,
    positions: Int[Tensor, "rows"],
    allowed: Masks | None = None,
) -> Float[Tensor, "rows vocab"]:
    """Return float32 logits after steps 1 to 9 (to 4 if greedy), to which the noise is added."""
    *_, (_, processed) = stages(logits, columns, history, positions, allowed)
    return processed


def stages(
    logits: Logits,
    columns: SamplingColumns,
    history: History | None,
    positions: Int[Tensor, "rows"],
    allowed: Masks | None = None,
) -> Iterator[tuple[str, Float[Tensor, "rows vocab"]]]:
    """Yield the name of each step that some row needs, and the logits after it."""
    x = logits.float()
    yield "raw", x
    if allowed is not None or columns.has_mask:
        x = keep_allowed(x, columns, allowed)
        yield "allowed", x
    if columns.has_bias:
        x = apply_logit_bias(x, columns)
        yield "logit_bias", x
    if columns.has_min_new_tokens:
        x = ban_ends(x, columns, positions)
        yield "min_new_tokens", x
    if columns.has_penalty:
        if history is None:
            raise InvalidRequestError("rows with a penalty need a history")
        for name, apply in _PENALTIES.items():
            x = apply(x, columns, history)
            yield name, x
    if not columns.has_sampled:
        return
    last = columns.temperature_last
    if columns.has_temperature and not columns.all_temperature_last:
        x = apply_temperature(x, torch.where(last, 1.0, columns.temperature))
        yield "temperature", x
    if columns.max_top_k:
        x = keep_top_k(x, columns)
        yield "top_k", x
    if columns.has_top_p:
        x = keep_top_p(x, columns)
        yield "top_p", x
    if columns.has_min_p:
        x = keep_min_p(x, columns)
        yield "min_p", x
    if columns.has_temperature and columns.has_temperature_last:
        x = apply_temperature(x, torch.where(last, columns.temperature, 1.0))
        yield "temperature_last", x


def keep_allowed(x: Logits, columns: SamplingColumns, allowed: Masks | None) -> Logits:
    """Return the logits with −inf outside the grammar's mask and the row's own mask."""
    if allowed is not None:
        x = x.masked_fill(~unpack_bits(allowed, x.shape[1]), -math.inf)
    if columns.has_mask:
        own = unpack_bits(columns.masks, x.shape[1])[columns.mask_index.clamp(min=0)]
        x = x.masked_fill(~(own | (columns.mask_index < 0)[:, None]), -math.inf)
    return x


def apply_logit_bias(x: Logits, columns: SamplingColumns) -> Logits:
    """Return logit + bias, computed in float64; −inf bans."""
    at = (columns.bias_rows, columns.bias_ids)
    values = x[at]
    biased = _keep_finite(values, (values.double() + columns.biases).float())
    return x.index_put(at, biased.masked_fill(columns.biases == -math.inf, -math.inf))


def ban_ends(x: Logits, columns: SamplingColumns, positions: Int[Tensor, "rows"]) -> Logits:
    """Return the logits with −inf at EOS and stop ids below the minimum length, unless no other id is left."""
    at = (columns.end_rows, columns.end_ids)
    is_short = positions - columns.num_prompt_tokens < columns.min_new_tokens
    longer = x.index_put(at, x[at].masked_fill(is_short[columns.end_rows], -math.inf))
    return torch.where((longer > -math.inf).any(-1, keepdim=True), longer, x)


def apply_repetition_penalty(x: Logits, columns: SamplingColumns, history: History) -> Logits:
    """Penalise each id within the row's window: divide a positive logit by the penalty, multiply a negative one."""
    mine = columns.penalised
    is_within = history.is_within(columns.history_slot[mine], columns.repetition_window[mine])
    penalty, values = columns.repetition_penalty[mine, None], x[mine]
    penalised = _keep_finite(values, torch.where(values > 0, values / penalty, values * penalty))
    return x.index_copy(0, mine, torch.where(is_within & (penalty != 1), penalised, values))


def apply_frequency_penalty(x: Logits, columns: SamplingColumns, history: History) -> Logits:
    """Return logit − penalty × the number of occurrences of the id in the output."""
    mine = columns.penalised
    counts, values = history.counts[columns.history_slot[mine]], x[mine]
    penalty = columns.frequency_penalty[mine, None]
    penalised = _keep_finite(values, values - penalty * counts)
    return x.index_copy(0, mine, torch.where((counts > 0) & (penalty != 0), penalised, values))


def apply_presence_penalty(x: Logits, columns: SamplingColumns, history: History) -> Logits:
    """Return logit − penalty for each id that occurs in the output."""
    mine = columns.penalised
    counts, values = history.counts[columns.history_slot[mine]], x[mine]
    penalty = columns.presence_penalty[mine, None]
    penalised = _keep_finite(values, values - penalty)
    return x.index_copy(0, mine, torch.where((counts > 0) & (penalty != 0), penalised, values))


_PENALTIES = {
    "repetition_penalty": apply_repetition_penalty,
    "frequency_penalty": apply_frequency_penalty,
    "presence_penalty": apply_presence_penalty,
}


def apply_temperature(x: Logits, temperature: Float[Tensor, "rows"]) -> Logits:
    """Return logits / temperature; 0 counts as 1. A row whose largest logit would overflow is shifted first."""
    divisor = torch.where(temperature == 0, 1.0, temperature)[:, None]
    largest = x.max(-1, keepdim=True).values
    overflows = (largest / divisor).isinf() & largest.isfinite()
    return _keep_finite(x, torch.where(overflows, x - largest, x) / divisor)


def keep_top_k(x: Logits, columns: SamplingColumns) -> Logits:
    """Keep exactly the k largest of each sampled row that has a k. Among equal logits the smallest ids are kept."""
    k = torch.where(columns.temperature != 0, columns.top_k, 0)
    ranked = x.topk(columns.max_top_k).values
    threshold = ranked.gather(1, (k - 1).clamp(min=0)[:, None])
    is_above, is_equal = x > threshold, x == threshold
    room = k[:, None] - is_above.sum(-1, keepdim=True)
    is_kept = is_above | (is_equal & (is_equal.cumsum(-1) <= room))
    return x.masked_fill(~is_kept & (k > 0)[:, None], -math.inf)


def keep_top_p(x: Logits, columns: SamplingColumns) -> Logits:
    """Keep the fewest largest tokens of each row whose probabilities reach p, including the crossing token."""
    mine = columns.with_top_p
    ranked, order = x[mine].sort(descending=True, stable=True)
    largest = torch.where(ranked[:, 0].isfinite(), ranked[:, 0], 0.0)
    sums = weights(ranked, largest).cumsum(-1)
    goal = target(sums[:, -1], columns.top_p[mine])
    num_kept = (sums.double() < goal[:, None]).sum(-1, keepdim=True) + 1
    is_dropped = torch.arange(x.shape[1], device=x.device) >= num_kept
    dropped = ranked.masked_fill(is_dropped, -math.inf)
    return x.index_copy(0, mine, torch.empty_like(dropped).scatter_(1, order, dropped))


def keep_min_p(x: Logits, columns: SamplingColumns) -> Logits:
    """Set logits of sampled rows to −inf if logit < largest + ln(min_p)."""
    lowest = torch.where(columns.temperature != 0, columns.log_min_p, -math.inf)[:, None]
    return x.masked_fill(x < x.max(-1, keepdim=True).values + lowest, -math.inf)


def log_probabilities(
    logits: Float[Tensor, "rows vocab"], token_ids: Int[Tensor, "rows"], num_alternatives: int
) -> tuple[
    Float[Tensor, "rows"], Int[Tensor, "rows"], Int[Tensor, "rows alternatives"], Float[Tensor, "rows alternatives"]
]:
    """Return the log-softmax of each token, its rank, and the likeliest ids and their log-softmax, in the total order.

    The normaliser is a sum of integer weights, because a floating-point sum depends on the batch and on torch's
    threads. It is within 4e-8 for a vocabulary of 262,144.
    """
    largest = logits.max(-1, keepdim=True).values
    totals = weights(logits, torch.where(largest.isfinite(), largest, 0.0)[:, 0]).sum(-1, keepdim=True)
    chosen = logits.gather(1, token_ids[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)
    is_ahead = (logits > chosen) | ((logits == chosen) & (ids < token_ids[:, None]))
    top, top_ids = _largest(logits, min(num_alternatives, logits.shape[1]))
    logprobs, top_logprobs = (normalized(each, largest, totals) for each in (chosen, top))
    return logprobs[:, 0], is_ahead.sum(-1) + 1, top_ids, top_logprobs


def normalized(
    logits: Float[Tensor, "rows some"], largest: Float[Tensor, "rows 1"], totals: Int[Tensor, "rows 1"]
) -> Float[Tensor, "rows some"]:
    """Return log-probabilities of a row's logits, from the row's largest logit and the sum of its weights."""
    log_sums = totals.double().log() - WEIGHT_BITS * math.log(2)
    # The largest goes first: beside a logit of 1e38 a logarithm would vanish.
    return (logits.double() - largest.double() - log_sums).float()


def check_shapes(
    logits: Logits,
    columns: SamplingColumns,
    history: History | None,
    positions: Int[Tensor, "rows"],
    allowed: Masks | None,
) -> None:
    def need(name: str, x: Tensor, shape: Sequence[int]) -> None:
        if tuple(x.shape) != tuple(shape):
            raise InvalidRequestError(f"{name} must be {list(shape)} for {len(columns)} rows, got {list(x.shape)}")

    if not logits.is_floating_point():
        raise InvalidRequestError(f"logits must be floats, got {logits.dtype}")
    need("logits", logits, (len(columns), columns.vocab_size))
    need("positions", positions, (len(columns),))
    if allowed is not None:
        need("allowed", allowed, (len(columns), num_mask_words(columns.vocab_size)))
        if allowed.dtype != torch.int32:
            raise InvalidRequestError(f"allowed must be int32, one bit per token, got {allowed.dtype}")
    if columns.has_penalty and (history is None or history.vocab_size != columns.vocab_size):
        size = None if history is None else history.vocab_size
        raise InvalidRequestError(f"rows with a penalty need a history of {columns.vocab_size} words, got {size}")


def _largest(x: Logits, count: int) -> tuple[Float[Tensor, "rows count"], Int[Tensor, "rows count"]]:
    """Return the largest logits of each row and their ids, in the total order. topk promises no order among equals."""
    if count == 0:
        return x[:, :0], torch.zeros(len(x), 0, dtype=torch.int64, device=x.device)
    threshold = x.topk(count).values[:, -1:]
    is_equal = x == threshold
    is_kept = (x > threshold) | (is_equal & (is_equal.cumsum(-1) <= count - (x > threshold).sum(-1, keepdim=True)))
    ids = is_kept.int().topk(count).indices.sort().values
    values, order = x.gather(1, ids).sort(descending=True, stable=True)
    return values, ids.gather(1, order)


def _keep_finite(before: Tensor, after: Tensor) -> Tensor:
    """Return `after`, limited to the largest number. Values that were not finite before stay unchanged."""
    return torch.where(before.isfinite(), after.clamp(-_LARGEST, _LARGEST), before)
