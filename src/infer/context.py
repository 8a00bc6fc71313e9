"""Where the logits of a growing sequence come from: a cache, captured or not, or everything computed again."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from infer import ops
from infer.batch import Step
from infer.cache.dense import DenseCache
from infer.capture.cpu import CapturedForward
from infer.errors import InvalidRequestError
from infer.model.transformer import Transformer

PREFILL_CHUNK = 512  # tokens per forward of a prompt: a cancel is seen between two chunks


class Context(ABC):
    """A sequence that grows and gives the logits after its last token."""

    @abstractmethod
    def extend(self, token_ids: Sequence[int]) -> Float[Tensor, "vocab"]: ...

    def feed(self, token_ids: Sequence[int]) -> None:
        """Append tokens whose logits nobody wants: all but the last chunk of a prompt."""
        self.extend(token_ids)

    def chain(self, token_id: int, count: int, stop_ids: Collection[int]) -> list[int]:
        """The greedy tokens after this one, up to `count` or a stop id, without a return to Python; [] if it cannot.

        The last of them is not part of the sequence yet, as after any sampling.
        """
        return []

    def drop(self, count: int) -> None:
        """Take back the last tokens of a chain."""
        if count:
            raise InvalidRequestError(f"this context has no chain to take {count} tokens back from")


@final
class CachedContext(Context):
    """Runs each token once; keys and values stay in one row of a cache. Captured, a step is a walk over a table."""

    def __init__(self, model: Transformer, capacity: int, *, capture: bool = True) -> None:
        cache = make_cache(model, capacity)
        self._model, self._cache = model, cache
        self._captured: CapturedForward | None = None
        if capture and ops.can_capture(model.device):
            self._captured = CapturedForward(lambda step: model.forward(step, cache), PREFILL_CHUNK)

    def extend(self, token_ids: Sequence[int]) -> Float[Tensor, "vocab"]:
        return self._run(Step.of(token_ids, self._cache.lengths[0]))[0]

    def feed(self, token_ids: Sequence[int]) -> None:
        self._run(Step.of(token_ids, self._cache.lengths[0], wanted=()))

    def _run(self, step: Step) -> Float[Tensor, "wanted vocab"]:
        step = step.to(self._model.device)
        logits = self._model.forward(step, self._cache) if self._captured is None else self._captured.run(step)
        self._cache.commit([len(step.tokens)])
        return logits

    def chain(self, token_id: int, count: int, stop_ids: Collection[int]) -> list[int]:
        if self._captured is None:
            return []
        position = torch.tensor([self._cache.lengths[0]])
        token_ids = self._captured.run_chain(
            torch.tensor([token_id]), position, torch.tensor([0]), count, tuple(stop_ids)
        )[:, 0].tolist()
        if token_ids[-1] < 0:  # NaN among its logits: `extend` will find it again and say so
            token_ids.pop()
        self._cache.commit([len(token_ids)])
        return token_ids

    def profile(self, token_ids: Sequence[int]) -> list[tuple[str, int]]:
        """Where the time of `extend` goes: each command's label and cycles. The sequence stays as it is."""
        if self._captured is None:
            raise InvalidRequestError("a profile needs steps that are recorded: they are on a CPU, with capture on")
        return self._captured.profile(Step.of(token_ids, self._cache.lengths[0]))

    def drop(self, count: int) -> None:
        self._cache.truncate(0, self._cache.lengths[0] - count)

    def clear(self) -> None:
        self._cache.truncate(0, 0)


@final
class RecomputedContext(Context):
    """Runs the whole sequence again for every token: slow, and the oracle for every cache."""

    def __init__(self, model: Transformer) -> None:
        self._model, self._token_ids = model, list[int]()

    def extend(self, token_ids: Sequence[int]) -> Float[Tensor, "vocab"]:
        self._token_ids += token_ids
        cache = make_cache(self._model, len(self._token_ids))
        return self._model.forward(Step.of(self._token_ids).to(self._model.device), cache)[0]


def make_cache(model: Transformer, capacity: int, num_rows: int = 1) -> DenseCache:
    """A dense cache in the dtype that the model asks for."""
    return DenseCache(model.architecture.layers, num_rows, capacity, model.cache_dtype, model.device)
