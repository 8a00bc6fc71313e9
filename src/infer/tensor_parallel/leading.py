"""Rank 0's runner. The other ranks repeat each call that changes its cache or runs its model, in the same order.

The other ranks receive changes before they happen here, and apply them with the next step. `reset` repairs any state
that an exception left incomplete. If a rank has ended during a step, the step raises InferError, and its logits are
discarded.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from infer.errors import InferError
from infer.kvcache.paged import PagedCache
from infer.operands.step import Chunk, Interrupt, Masks, StepEnd
from infer.runner.runner import CachedRunner, Runner
from infer.runner.verify import SampledTokens
from infer.sampling.columns import SamplingColumns
from infer.sampling.history import History
from infer.tensor_parallel.digest import digest_of
from infer.tensor_parallel.ranks import Ranks


@final
class LeadingRunner(Runner):
    def __init__(self, runner: CachedRunner, ranks: Ranks) -> None:
        super().__init__(runner.model)
        self._runner, self._ranks = runner, ranks

    def check_logits(self) -> None:
        """Raise InferError if the ranks compute different logits."""
        self.reserve(0, 1)
        logits = self.forward([Chunk(0, [0])])
        if set(self._ranks.digests()) != {digest_of(logits)}:
            raise InferError("the ranks of the model do not find the same logits: the memory or a build is faulty")
        self.truncate(0, 0)

    @contextmanager
    def _leading(self, name: str, *arguments: Any) -> Iterator[None]:
        """Start a step on the other ranks; the same step runs here within the context."""
        self._ranks.lead(name, *arguments)
        yield
        self._ranks.has_led()

    def _starts(self, chunks: Sequence[Chunk]) -> list[int]:
        return [self.lengths[chunk.slot] for chunk in chunks]

    # What runs the model

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> Float[Tensor, "logits vocab"]:
        with self._leading("forward", chunks, self._starts(chunks)):
            return self._runner.forward(chunks)

    def sample(
        self, chunks: Sequence[Chunk], columns: SamplingColumns, history: History | None, masks: Masks | None = None
    ) -> tuple[list[SampledTokens], list[StepEnd]]:
        with self._leading("forward", chunks, self._starts(chunks)):
            return self._runner.sample(chunks, columns, history, masks)

    def multi_step(
        self,
        chunks: Sequence[Chunk],
        count: int,
        columns: SamplingColumns,
        history: History | None,
        stop_ids: Collection[int],
        masks: Masks | None = None,
        interrupt: Interrupt | None = None,
    ) -> tuple[list[SampledTokens], list[StepEnd]]:
        if not self._runner.can_multi_step(chunks, columns):
            return [], []
        with self._leading("multi_step", chunks, self._starts(chunks), count):
            return self._runner.multi_step(chunks, count, columns, history, stop_ids, masks, interrupt)

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        with self._leading("extend", slot, list(token_ids)):
            self._runner.extend(slot, token_ids)

    def append(self, slot: int, token_ids: Sequence[int], num_logits: int) -> Float[Tensor, "logits vocab"]:
        with self._leading("append", slot, list(token_ids), num_logits):
            return self._runner.append(slot, token_ids, num_logits)

    def after_prompt(self, slot: int, token_ids: Sequence[int]) -> None:
        if self._runner.compresses_prompts:
            with self._leading("after_prompt", slot, list(token_ids)):
                self._runner.after_prompt(slot, token_ids)

    # What changes the cache

    def reset(self) -> None:
        self._ranks.begin_anew()
        self._runner.reset()

    def reserve(self, slot: int, num_tokens: int) -> None:
        self._ranks.tell("reserve", slot, num_tokens)
        self._runner.reserve(slot, num_tokens)

    def commit(self, slot: int, count: int) -> None:
        self._ranks.tell("commit", slot, count)
        self._runner.commit(slot, count)

    def truncate(self, slot: int, length: int) -> None:
        self._ranks.tell("truncate", slot, length)
        self._runner.truncate(slot, length)

    def forget(self, slot: int) -> None:
        self._ranks.tell("forget", slot)
        self._runner.forget(slot)

    def adopt(self, slot: int, token_ids: Sequence[int], salt: bytes = b"") -> int:
        if self.shares_prefixes:
            self._ranks.tell("adopt", slot, list(token_ids), salt)
        return self._runner.adopt(slot, token_ids, salt)

    def remember(self, slot: int, token_ids: Sequence[int], salt: bytes = b"") -> None:
        if self.shares_prefixes and self.cache.has_new_pages(slot):
            self._ranks.tell("remember", slot, list(token_ids), salt)
            self._runner.remember(slot, token_ids, salt)

    def choose_rope(self, slot: int, length: int) -> bool:
        if self.model.rope_border is not None:
            self._ranks.tell("choose_rope", slot, length)
        return self._runner.choose_rope(slot, length)

    def after_answer(self, slot: int) -> None:
        self._ranks.tell("after_answer", slot)
        self._runner.after_answer(slot)

    def give_back_free(self) -> int:
        """Free the memory of free pages on all ranks, and return the number of bytes on rank 0."""
        self._ranks.tell("give_back_free")
        return self._runner.give_back_free()

    def copy_slot(self, slot: int, source: int) -> None:
        self._ranks.tell("copy_slot", slot, source)
        self._runner.copy_slot(slot, source)

    def import_slot(self, slot: int, tensors: Mapping[str, Tensor], length: int) -> None:
        """Empty the slot. Each rank stores its own heads, so the tokens are computed again."""
        self.truncate(slot, 0)

    # What is asked of it

    @property
    def cache(self) -> PagedCache:
        """Cache of rank 0, with rank 0's heads."""
        return self._runner.cache

    @property
    def has_whole_slots(self) -> bool:
        return False

    @property
    def num_slots(self) -> int:
        return self._runner.num_slots

    @property
    def lengths(self) -> Sequence[int]:
        return self._runner.lengths

    def pages_of(self, num_tokens: int) -> Sequence[int]:
        return self._runner.pages_of(num_tokens)

    @property
    def pool_pages(self) -> Sequence[int]:
        return self._runner.pool_pages

    @property
    def free_pages(self) -> Sequence[int]:
        return self._runner.free_pages

    @property
    def shares_prefixes(self) -> bool:
        return self._runner.shares_prefixes

    @property
    def compresses_prompts(self) -> bool:
        return self._runner.compresses_prompts
