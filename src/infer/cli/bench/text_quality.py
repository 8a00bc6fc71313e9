"""How well a model predicts a text, and how far the predictions of another model are from it: llama.cpp's measures.

The text is cut into windows, and each begins anew. The second half of a window is predicted, each token from all tokens
before it in the window.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infer.errors import InvalidRequestError, ModelError
from infer.llm import LLM
from infer.text.tokenizer import Tokenizer

_ROWS = 32  # rows of logits that are in float64 at a time
_QUANTILE = 0.99
_LARGEST_LOSS = 700.0  # e to the power of a larger loss is not a float
_UNUSABLE = "its weights are damaged or belong to another model; copy or download the model again"
OnWindow = Callable[[int, int], None]  # windows that are done, and all


def cut(tokenizer: Tokenizer, ids: Sequence[int], size: int) -> list[list[int]]:
    """Return the whole windows of `size` tokens, each with the token that begins a text if the tokenizer has one.

    That token replaces the window's first token. The tokens after the last whole window are left out.
    """
    windows = [list(ids[start : start + size]) for start in range(0, len(ids) - size + 1, size)]
    if tokenizer.adds_bos and tokenizer.bos_token_id is not None:
        windows = [[tokenizer.bos_token_id, *window[1:]] for window in windows]
    return windows


@final
@dataclass(frozen=True)
class Perplexity:
    """e to the mean negative log-likelihood of `num_tokens` tokens, with its standard error."""

    perplexity: float
    standard_error: float
    num_tokens: int
    num_windows: int
    context: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@final
@dataclass(frozen=True)
class Divergence:
    """How far the predictions of a model are from those of a reference, over `num_tokens` tokens of a text.

    The Kullback-Leibler divergences are in nats. `same_likeliest` is the share of tokens at which both have the same
    likeliest token. `rms_change` is the root mean square of the change of the right token's probability.
    """

    reference: Perplexity
    other: Perplexity
    mean_kl: float
    median_kl: float
    kl_99: float  # 99 % of the tokens are below it
    largest_kl: float
    same_likeliest: float
    rms_change: float
    largest_logit_error: float
    kl_by_window: tuple[float, ...]  # means
    kl_by_position: tuple[float, ...]  # means over the windows, of the predicted positions in order

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class _Scored(NamedTuple):
    """The predicted tokens of a window, and the logits that predict them."""

    token_ids: Int[Tensor, "tokens"]
    logits: Float[Tensor, "tokens vocab"]


def measure_perplexity(llm: LLM, text: str, context: int, on_window: OnWindow = lambda done, total: None) -> Perplexity:
    """Return the perplexity of a text.

    Args:
        llm: The model.
        text: The text.
        context: Tokens of a window.
        on_window: Called after each window.

    Raises:
        InvalidRequestError: The context does not fit the model, or the text has fewer tokens than a window.
        ModelError: The model's logits are not finite.
    """
    windows, losses = _windows(llm, text, context), list[Tensor]()
    for number, window in enumerate(windows, 1):
        scored = _scored(llm, window)
        losses += [-of_right for _, of_right in _log_probabilities(scored)]
        on_window(number, len(windows))
    return _perplexity(torch.cat(losses), len(windows), context)


def measure_divergence(
    reference: LLM, other: LLM, text: str, context: int, on_window: OnWindow = lambda done, total: None
) -> Divergence:
    """Return how far the predictions of `other` are from those of `reference`.

    Args:
        reference: The model that is taken as right.
        other: A model with the same vocabulary. If one head has rows after the last token of the other, they are left
            out.
        text: The text.
        context: Tokens of a window.
        on_window: Called after each window.

    Raises:
        InvalidRequestError: As `measure_perplexity`, or the models have different vocabularies.
        ModelError: As `measure_perplexity`.
    """
    if reference.tokenizer.token_bytes != other.tokenizer.token_bytes:
        raise InvalidRequestError("the models have different vocabularies: compare models that have the same tokens")
    windows, found = _windows(reference, text, context), list[_Compared]()
    _windows(other, text, context)  # fits its context, too
    for number, window in enumerate(windows, 1):
        found += _compared(*_of_same_tokens(_scored(reference, window), _scored(other, window)))
        on_window(number, len(windows))
    *tensors, errors = zip(*found, strict=True)
    right, others, kl, is_same = map(torch.cat, tensors)
    ordered, by_window = kl.sort().values, kl.view(len(windows), -1)
    return Divergence(
        reference=_perplexity(-right, len(windows), context),
        other=_perplexity(-others, len(windows), context),
        mean_kl=float(kl.mean()),
        median_kl=float(ordered[len(ordered) // 2]),
        kl_99=float(ordered[min(len(ordered) - 1, int(_QUANTILE * len(ordered)))]),
        largest_kl=float(ordered[-1]),
        same_likeliest=float(is_same.double().mean()),
        rms_change=float((others.exp() - right.exp()).square().mean().sqrt()),
        largest_logit_error=max(errors),
        kl_by_window=tuple(by_window.mean(1).tolist()),
        kl_by_position=tuple(by_window.mean(0).tolist()),
    )


def _windows(llm: LLM, text: str, context: int) -> list[list[int]]:
    """Return the windows, each with the token that begins a text if the tokenizer has one."""
    if not 4 <= context <= llm.max_seq_len:
        raise InvalidRequestError(f"context must be from 4 to {llm.max_seq_len}, got {context}", param="context")
    tokenizer = llm.tokenizer
    ids = tokenizer.encode(text)
    if len(ids) < context:
        raise InvalidRequestError(
            f"the text has {len(ids)} tokens, and a window has {context}: give a longer text or a smaller context"
        )
    return cut(tokenizer, ids, context)


def _scored(llm: LLM, window: list[int]) -> _Scored:
    """Return a model's predictions of a window. Raises ModelError if its logits are not finite."""
    first = len(window) // 2 + 1
    logits = llm.logits(window[:-1], last=len(window) - first).cpu()
    if not logits.isfinite().all():
        raise ModelError(f"logits of the model are not finite: {_UNUSABLE}")
    return _Scored(torch.tensor(window[first:]), logits)


def _of_same_tokens(reference: _Scored, other: _Scored) -> tuple[_Scored, _Scored]:
    """Return the logits of the tokens that both have: heads may be padded to different sizes after the last token."""
    size = min(reference.logits.shape[1], other.logits.shape[1])
    first, second = (each._replace(logits=each.logits[:, :size]) for each in (reference, other))
    return first, second


def _log_probabilities(scored: _Scored) -> Iterator[tuple[Float[Tensor, "rows vocab"], Float[Tensor, "rows"]]]:
    """Yield, for some rows at a time, the float64 log-probabilities of all tokens and of the right ones."""
    for logits, ids in zip(torch.split(scored.logits, _ROWS), torch.split(scored.token_ids, _ROWS), strict=True):
        found = logits.double().log_softmax(-1)
        yield found, found.gather(-1, ids[:, None])[:, 0]


class _Compared(NamedTuple):
    """Some rows of both models: log-probabilities of the right tokens, divergences, if the likeliest is the same."""

    right: Float[Tensor, "rows"]
    other: Float[Tensor, "rows"]
    kl: Float[Tensor, "rows"]
    is_same: Tensor
    largest_logit_error: float


def _compared(reference: _Scored, other: _Scored) -> Iterator[_Compared]:
    errors = [(a - b).abs().max() for a, b in zip(reference.logits, other.logits, strict=True)]
    both = zip(
        _log_probabilities(reference), _log_probabilities(other), torch.split(torch.stack(errors), _ROWS), strict=True
    )
    for (expected, right), (found, of_other), error in both:
        kl = (expected.exp() * (expected - found)).sum(-1).clamp(min=0)  # rounding makes some less than 0
        is_same = expected.argmax(-1) == found.argmax(-1)
        yield _Compared(right, of_other, kl, is_same, float(error.max()))


def _perplexity(losses: Float[Tensor, "tokens"], num_windows: int, context: int) -> Perplexity:
    mean, count = float(losses.mean()), len(losses)
    if mean > _LARGEST_LOSS:
        raise ModelError(f"the model's perplexity must be at most e^{_LARGEST_LOSS:.0f}, got e^{mean:.0f}: {_UNUSABLE}")
    deviation = float(losses.std()) if count > 1 else 0.0
    perplexity = math.exp(mean)
    return Perplexity(perplexity, perplexity * deviation / math.sqrt(count), count, num_windows, context)
