"""The forward of a model for many slots at once, and what is sampled after it.

What a step computes is provisional: `commit` says how many of a chunk's tokens stay.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from infer import ops
from infer.errors import InvalidRequestError
from infer.kvcache.paged import PagedCache
from infer.kvcache.settings import CacheSettings
from infer.kvcache.snapkv import PromptCompression
from infer.model.transformer import Transformer
from infer.operands.limits import MAX_STEP_LOGITS, MAX_STEP_TOKENS
from infer.operands.step import Chunk, Interrupt, Masks, Step, StepEnd
from infer.runner.caches import make_cache
from infer.runner.verify import SampledTokens, verify
from infer.sampling.columns import SamplingColumns
from infer.sampling.history import History

_MANY = 1 << 30


class Runner(ABC):
    """Slots of tokens, each with its own length."""

    def __init__(self, model: Transformer) -> None:
        self.model, self._backend = model, model.backend

    @property
    @abstractmethod
    def num_slots(self) -> int: ...

    @property
    @abstractmethod
    def lengths(self) -> Sequence[int]:
        """Committed tokens of each slot: the next one's position."""

    @abstractmethod
    def reset(self) -> None:
        """Empty all slots, whatever a step that an exception left midway has made of them."""

    @abstractmethod
    def reserve(self, slot: int, num_tokens: int) -> None:
        """Make room for a slot's next tokens, before they are run. Raises OutOfPagesError, nothing changed."""

    @abstractmethod
    def forward(self, chunks: Sequence[Chunk]) -> Float[Tensor, "logits vocab"]:
        """Run the chunks provisionally: their logits, chunk after chunk."""

    @abstractmethod
    def commit(self, slot: int, count: int) -> None:
        """Keep the first `count` tokens of those that were run."""

    @abstractmethod
    def truncate(self, slot: int, length: int) -> None:
        """Forget the slot's tokens from position `length` on. `lengths` says what is left: where tokens that were
        evicted would be needed, nothing.
        """

    def forget(self, slot: int) -> None:
        """Empty a slot that failed: nobody may begin with what it stored."""
        self.truncate(slot, 0)

    def pages_of(self, num_tokens: int) -> Sequence[int]:
        """How many pages so many tokens of a slot lie in, by group."""
        return []

    @property
    def pool_pages(self) -> Sequence[int]:
        """All there are, by group."""
        return []

    @property
    def free_pages(self) -> Sequence[int]:
        """Number of pages that no slot holds, per group."""
        return []

    def adopt(self, slot: int, token_ids: Sequence[int], salt: bytes = b"") -> int:
        """Give an empty slot what others have stored, with this salt, for the first of these tokens: how many."""
        return 0

    def remember(self, slot: int, token_ids: Sequence[int], salt: bytes = b"") -> None:
        """The slot's committed tokens are the first of these: others with this salt may begin with them."""
        return

    def give_back_free(self) -> int:
        """Return the memory of pages that hold nothing to the system: how many bytes."""
        return 0

    @property
    def shares_prefixes(self) -> bool:
        return False

    def choose_rope(self, slot: int, length: int) -> bool:
        """Set the rope factors for sequences of this length. True if they changed, which empties the slot."""
        return False

    def rope_room(self, length: int) -> int:
        """How many tokens more a sequence may have with the same rope factors."""
        border = self.model.rope_border
        return border - length if border is not None and length <= border else _MANY

    @property
    def compresses_prompts(self) -> bool:
        """True if the cache compresses a prompt once it is complete."""
        return False

    def after_prompt(self, slot: int, token_ids: Sequence[int]) -> None:
        """Called when all of the slot's prompt, these tokens, is committed and a token after it sampled."""
        return

    def after_answer(self, slot: int) -> None:
        """Called when the slot serves no further token of this answer."""
        return

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
        """Up to `count` steps without a return to Python, from chunks of one token: what was sampled after each, until
        all met a stop id or any thread set `interrupt`, and when each step ended. Nothing where it cannot. The last may
        be the code of a failed row.
        """
        return [], []

    def sample(
        self, chunks: Sequence[Chunk], columns: SamplingColumns, history: History | None, masks: Masks | None = None
    ) -> tuple[list[SampledTokens], list[StepEnd]]:
        """Run the chunks, entry i of `columns` being chunk i's, and sample after those with logits, on while drafts are
        right. `history` sees what is sampled. Also when each round of sampling ended.
        """
        positions = [self.lengths[chunk.slot] + len(chunk.token_ids) - chunk.num_drafts for chunk in chunks]
        with self._backend.threads(), ops.using(self._backend), torch.inference_mode():
            logits = self.forward(chunks)[:, : columns.vocab_size]
            self._backend.synchronize()
            forward_ended = time.perf_counter()
            if masks is not None:
                masks.wait()
            words = None if masks is None else masks.words
            sampled, ended = verify(logits, chunks, positions, columns, history, words)
        return sampled, [StepEnd(*pair) for pair in pairwise([forward_ended, *ended])]


@final
class CachedRunner(Runner):
    """Runs each token once; keys and values stay in a cache. Captured, a step is a walk over a table."""

    def __init__(
        self,
        model: Transformer,
        capacity: int,
        *,
        num_slots: int = 1,
        capture: bool = True,
        settings: CacheSettings | None = None,
        step_tokens: int | None = None,
        pool_pages: int | None = None,
    ) -> None:
        """`capacity` is how many tokens a slot holds, `step_tokens` how many it gets in one step at most. The slots
        share `pool_pages` pages; None: as many as all of them full take.
        """
        super().__init__(model)
        self._step_tokens = step_tokens or MAX_STEP_TOKENS
        self._cache = make_cache(
            model, capacity, num_slots, settings=settings, step_tokens=self._step_tokens, pool_pages=pool_pages
        )
        self._compression = PromptCompression(self._cache) if self._cache.settings.keeps_whole_prompts else None
        self._captured = self._capture() if capture else None

    def _capture(self) -> ops.Recorded | None:
        self._cache.reserve(0, 1)  # where the recording's own step stands, which is not run
        captured = self._backend.capture(
            lambda step: self.model.forward(step, self._cache), self._step_tokens, MAX_STEP_LOGITS
        )
        self._cache.truncate(0, 0)
        return captured

    @property
    def cache(self) -> PagedCache:
        return self._cache

    @property
    def has_whole_slots(self) -> bool:
        """True if this process stores the whole of each slot, so that a slot can be saved."""
        return True

    @property
    def num_slots(self) -> int:
        return len(self._cache.lengths)

    @property
    def lengths(self) -> Sequence[int]:
        return self._cache.lengths

    def reset(self) -> None:
        self._cache.reset()

    def reserve(self, slot: int, num_tokens: int) -> None:
        self._cache.reserve(slot, num_tokens)

    @torch.inference_mode()
    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """Append tokens without asking what follows; an exception leaves whole chunks of them."""
        with self._backend.threads():
            for start in range(0, len(token_ids), self._step_tokens):
                chunk = token_ids[start : start + self._step_tokens]
                self._cache.reserve(slot, len(chunk))
                self.forward([Chunk(slot, chunk, has_logits=False)])
                self.commit(slot, len(chunk))

    @torch.inference_mode()
    def append(self, slot: int, token_ids: Sequence[int], num_logits: int) -> Float[Tensor, "logits vocab"]:
        """The logits after the last `num_logits` (at least one) of a few tokens that are appended: the caller's own."""
        with self._backend.threads():
            self._cache.reserve(slot, len(token_ids))
            logits = self.forward([Chunk(slot, token_ids, num_drafts=num_logits - 1)]).clone()
            self.commit(slot, len(token_ids))
        return logits

    def forward(self, chunks: Sequence[Chunk]) -> Float[Tensor, "logits vocab"]:
        return self._run(Step.of_chunks(chunks, self._starts(chunks)))

    def _run(self, step: Step) -> Float[Tensor, "logits vocab"]:
        if self._captured is None:
            return self.model.forward(step.to(self.model.device), self._cache)
        return self._captured.run(step)

    def _starts(self, chunks: Sequence[Chunk]) -> list[int]:
        return [self._cache.lengths[chunk.slot] for chunk in chunks]

    def commit(self, slot: int, count: int) -> None:
        self._cache.commit(slot, count)

    def truncate(self, slot: int, length: int) -> None:
        self._cache.truncate(slot, length)

    def forget(self, slot: int) -> None:
        self._cache.forget(slot)
        self._cache.truncate(slot, 0)

    def pages_of(self, num_tokens: int) -> Sequence[int]:
        return self._cache.pages_of(num_tokens)

    @property
    def pool_pages(self) -> Sequence[int]:
        return self._cache.pool_pages

    @property
    def free_pages(self) -> Sequence[int]:
        return self._cache.free_pages

    def adopt(self, slot: int, token_ids: Sequence[int], salt: bytes = b"") -> int:
        return self._cache.adopt(slot, token_ids, salt) if self.shares_prefixes else 0

    def choose_rope(self, slot: int, length: int) -> bool:
        if self.model.rope_border is None:
            return False
        is_long = self.model.is_long(length)
        if is_long == self._cache.is_long(slot):
            return False
        self._cache.truncate(slot, 0)
        self._cache.set_rope(slot, is_long=is_long)
        return True

    def remember(self, slot: int, token_ids: Sequence[int], salt: bytes = b"") -> None:
        self._cache.remember(slot, token_ids, salt)

    def give_back_free(self) -> int:
        return self._cache.give_back_free()

    @property
    def shares_prefixes(self) -> bool:
        """True if prefixes can be shared: the values stored for a token do not depend on the length of its sequence."""
        return self._cache.shares_prefixes and self.model.rope_border is None

    @property
    def compresses_prompts(self) -> bool:
        return self._compression is not None

    @torch.inference_mode()
    def after_prompt(self, slot: int, token_ids: Sequence[int]) -> None:
        if self._compression is not None:
            with self._backend.threads():
                self._compression.after_prompt(
                    slot, token_ids, lambda step: self.model.forward(step.to(self.model.device), self._cache)
                )

    def after_answer(self, slot: int) -> None:
        self._cache.end_answer(slot)

    def copy_slot(self, slot: int, source: int) -> None:
        """Replace a slot's tokens by another's: what is stored is shared until one of the two writes to it."""
        self._cache.copy_row(slot, self._cache, source)

    def import_slot(self, slot: int, tensors: Mapping[str, Tensor], length: int) -> None:
        """Replace a slot's tokens by `length` that were exported. Raises InvalidRequestError, nothing changed."""
        self._cache.import_row(slot, tensors, length, is_long=self.model.is_long(length))

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
        captured = self._captured_for(chunks, columns)
        if captured is None:
            return [], []
        found = captured.run_multi_step(
            chunks, self._starts(chunks), count, columns, history, tuple(stop_ids), masks, interrupt
        )
        return list(map(SampledTokens, found.token_ids, found.logprobs)), found.ends

    def can_multi_step(self, chunks: Sequence[Chunk], columns: SamplingColumns) -> bool:
        return self._captured_for(chunks, columns) is not None

    def _captured_for(self, chunks: Sequence[Chunk], columns: SamplingColumns) -> ops.Captured | None:
        """Return the recording that runs the chunks and samples after them; None if there is none."""
        captured = self._captured
        return captured if isinstance(captured, ops.Captured) and captured.takes(chunks, columns) else None

    def follow(self, chunks: Sequence[Chunk], count: int) -> None:
        """The steps of rank 0's `multi_step`: it samples, and tells them what."""
        assert isinstance(self._captured, ops.Captured)
        self._captured.follow(chunks, self._starts(chunks), count)

    def sample(
        self, chunks: Sequence[Chunk], columns: SamplingColumns, history: History | None, masks: Masks | None = None
    ) -> tuple[list[SampledTokens], list[StepEnd]]:
        captured = self._captured_for(chunks, columns)
        if captured is None:
            return super().sample(chunks, columns, history, masks)
        found = captured.run_verified(chunks, self._starts(chunks), columns, history, masks)
        return list(map(SampledTokens, found.token_ids, found.logprobs)), found.ends

    def profile(self, token_ids: Sequence[int]) -> list[tuple[str, int]]:
        """Return the label and the cycles of each command of a step. The sequence is unchanged."""
        if not isinstance(self._captured, ops.Captured):
            raise InvalidRequestError("a profile needs steps that are recorded: they are on a CPU, with capture on")
        self._cache.reserve(0, len(token_ids))
        return self._captured.profile(Step.of(token_ids, self._cache.lengths[0]))
