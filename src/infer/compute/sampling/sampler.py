"""The sampler for a batch: the definition, row by row, and log-probabilities of the sampled tokens.

Backends without a sampler of their own use it, and every other sampler must give the same tokens. A row with NaN or
+inf, or with no token left, gets a negative code in place of a token. Other rows are not affected.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.constants import NOT_A_NUMBER, NOTHING_ALLOWED, WEIGHT_BITS
from infer.compute.sampling.definition import NO_TOKEN_ALLOWED, LogitsError, choose_token, process_logits
from infer.compute.sampling.history import History
from infer.compute.sampling.masks import num_mask_words, unpack_bits
from infer.compute.sampling.noise import weights
from infer.errors import InvalidRequestError
from infer.outputs import TokenLogprob

Logits = Float[Tensor, "rows vocab"]
Masks = Int[Tensor, "rows words"]
Choose = Callable[[Logits, SamplingColumns, History | None, Int[Tensor, "rows"], Masks | None], Int[Tensor, "rows"]]

_MESSAGES = {
    NOT_A_NUMBER: "the logits of this row have NaN or +inf: nothing is sampled",
    NOTHING_ALLOWED: NO_TOKEN_ALLOWED,
}


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
    if not columns.has_logprobs:
        return Sampled(token_ids)
    scored = logits.to(torch.float32, copy=True)
    for row, params in enumerate(columns.params):
        if params.logprobs_mode == "processed" and int(token_ids[row]) >= 0:
            scored[row] = _process(row, logits, columns, history, positions, allowed)
    most = max(count or 0 for count in columns.num_logprobs)
    return Sampled(token_ids, *log_probabilities(scored, token_ids.clamp(min=0), most))


def choose_tokens(
    logits: Logits,
    columns: SamplingColumns,
    history: History | None,
    positions: Int[Tensor, "rows"],
    allowed: Masks | None = None,
) -> Int[Tensor, "rows"]:
    """Return the token of each row, or the code of its failure."""
    token_ids = []
    for row, params in enumerate(columns.params):
        try:
            processed = _process(row, logits, columns, history, positions, allowed)
            token_ids.append(choose_token(processed, params, int(columns.seed[row]), int(positions[row])))
        except LogitsError as error:
            token_ids.append(error.code)
    return torch.tensor(token_ids, dtype=torch.int64, device=logits.device)


def _process(
    row: int,
    logits: Logits,
    columns: SamplingColumns,
    history: History | None,
    positions: Int[Tensor, "rows"],
    allowed: Masks | None,
) -> Float[Tensor, "vocab"]:
    """Return a row's float32 logits after steps 1 to 9 of the definition."""
    slot = int(columns.history_slot[row])
    context: Sequence[int] = range(int(positions[row]))  # without a penalty, only their number counts
    if slot >= 0:
        if history is None:
            raise InvalidRequestError("rows with a penalty need a history")
        context = history.tokens[slot, : int(history.lengths[slot])].tolist()
    return process_logits(
        logits[row],
        context,
        columns.params[row],
        num_prompt_tokens=int(columns.num_prompt_tokens[row]),
        eos_token_ids=columns.eos_token_ids,
        allowed=None if allowed is None else unpack_bits(allowed[row], columns.vocab_size),
    )


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
