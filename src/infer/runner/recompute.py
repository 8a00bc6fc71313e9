"""The oracle of every cache: it computes the whole sequence again for each step."""

from collections.abc import Sequence
from typing import final

from jaxtyping import Float
from torch import Tensor

from infer.kvcache.settings import CacheSettings
from infer.model.transformer import Transformer
from infer.operands.step import Chunk, Step
from infer.runner.caches import make_cache
from infer.runner.runner import Runner


@final
class RecomputeRunner(Runner):
    """One slot. Slow, and right whatever a cache does."""

    def __init__(self, model: Transformer, settings: CacheSettings | None = None) -> None:
        super().__init__(model)
        self._settings, self._token_ids = settings, list[int]()
        self._provisional: Sequence[int] = ()

    @property
    def num_slots(self) -> int:
        return 1

    @property
    def lengths(self) -> Sequence[int]:
        return [len(self._token_ids)]

    def reset(self) -> None:
        self._token_ids = []

    def reserve(self, slot: int, num_tokens: int) -> None:
        return

    def forward(self, chunks: Sequence[Chunk]) -> Float[Tensor, "logits vocab"]:
        (chunk,) = chunks
        self._provisional = chunk.token_ids
        token_ids = [*self._token_ids, *chunk.token_ids]
        cache = make_cache(self.model, len(token_ids), step_tokens=len(token_ids), settings=self._settings)
        cache.set_rope(0, is_long=self.model.is_long(len(token_ids)))
        cache.reserve(0, len(token_ids))
        step = Step.of(token_ids, logit_indices=range(len(token_ids) - chunk.num_logits, len(token_ids)))
        return self.model.forward(step.to(self.model.device), cache)

    def commit(self, slot: int, count: int) -> None:
        self._token_ids += self._provisional[:count]

    def truncate(self, slot: int, length: int) -> None:
        del self._token_ids[length:]
