"""Rows of tokens that grow, and what is sampled behind them: from a cache, captured or not, or computed all again.

What a context runs is provisional: `commit` says how many of a part's tokens stay.
"""

import time
from abc import ABC, abstractmethod
from collections import defaultdict
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
from infer.model.memory import check_rows_fit
from infer.model.transformer import Transformer
from infer.operands.step import Masks, Part, Step, StepEnd
from infer.outputs import TokenLogprob
from infer.runner.rope_switch import LongRows
from infer.runner.verify import SampledTokens, verify
from infer.sampling.columns import SamplingColumns
from infer.sampling.history import History
from infer.sampling.sampler import Sampled, log_probabilities
from infer.speculation.policy import StepTimes
from infer.system.available_memory import available_memory_bytes

PREFILL_CHUNK = 512  # tokens per forward of a prompt: a cancel is seen between two chunks
MAX_LINES = 64  # logits of one step: rows and their drafts


class Context(ABC):
    """Rows of tokens, each with its own length. `step_times` is what the loop measured, of each kind of step."""

    def __init__(self, device: torch.device) -> None:
        self._backend = ops.backend_of(device)
        self.is_sound = True  # False within a step, and after one that an exception left: it must not be used again
        self.step_times = defaultdict[tuple[int, ...], StepTimes](StepTimes)

    @property
    @abstractmethod
    def lengths(self) -> Sequence[int]:
        """Tokens that each row holds: the next one's position."""

    @abstractmethod
    def forward(self, parts: Sequence[Part]) -> Float[Tensor, "lines vocab"]:
        """Run the parts provisionally: the logits of their lines, part after part."""

    @abstractmethod
    def commit(self, row: int, count: int) -> None:
        """Keep the first `count` tokens of the row's part."""

    @abstractmethod
    def truncate(self, row: int, length: int) -> None:
        """Forget the row's tokens from position `length` on."""

    def forget(self, row: int) -> None:
        """Empty a row that failed: no other row may begin with what it stored."""
        self.truncate(row, 0)

    def max_drafts(self, row: int) -> int:
        """The most drafts that a part of the row may have: its logits must be those of the steps one by one."""
        return MAX_LINES

    @property
    def compresses_prompts(self) -> bool:
        """Whether what a token sees changes where a prompt ends."""
        return False

    def end_prompt(self, row: int) -> None:
        """All of the row's prompt is committed, and what stands behind it sampled."""
        return

    def end_answer(self, row: int) -> None:
        """What the row holds need serve no further token of this answer."""
        return

    def chain(
        self,
        tokens: Sequence[tuple[int, int]],
        count: int,
        columns: SamplingColumns,
        history: History | None,
        stop_ids: Collection[int],
        masks: Masks | None = None,
    ) -> tuple[list[list[int]], list[StepEnd]]:
        """The tokens sampled after each (row, token), up to `count` or until all met a stop id, and when each step
        ended. Nothing if it cannot.

        They are committed but for the last, as after any sampling; the last may be the code of a failed row.
        """
        return [], []

    def sample(
        self, parts: Sequence[Part], columns: SamplingColumns, history: History | None, masks: Masks | None = None
    ) -> tuple[list[SampledTokens], list[StepEnd]]:
        """Run the parts, entry i of `columns` being part i's, and sample after the wanted ones while drafts are right.

        `history` sees what is sampled. Also when each line of the drafts was sampled.
        """
        positions = [self.lengths[part.row] + len(part.token_ids) - part.num_drafts for part in parts]
        with self._backend.threads(), torch.inference_mode():
            logits = self.forward(parts)[:, : columns.vocab_size]
            self._backend.synchronize()
            forward_ended = time.perf_counter()
            if masks is not None:
                masks.wait()
            words = None if masks is None else masks.words
            found, sampled = verify(logits, parts, positions, columns, history, words)
        return found, [StepEnd(*pair) for pair in pairwise([forward_ended, *sampled])]


@final
class CachedContext(Context):
    """Runs each token once; keys and values stay in a cache. Captured, a step is a walk over a table."""

    def __init__(
        self,
        model: Transformer,
        capacity: int,
        *,
        num_rows: int = 1,
        capture: bool = True,
        settings: CacheSettings | None = None,
        step_tokens: int | None = None,
    ) -> None:
        super().__init__(model.device)
        self._model, self._step_tokens = model, step_tokens or PREFILL_CHUNK
        self._cache = make_cache(model, capacity, num_rows, settings=settings, step_tokens=self._step_tokens)
        self._compression = PromptCompression(self._cache) if self._cache.settings.keeps_whole_prompts else None
        self._token_ids: list[list[int]] = [[] for _ in range(num_rows)]
        self._brought: list[Sequence[int]] = [()] * num_rows
        self._captured = self._capture() if capture else None
        self._long: LongRows | None = None
        if model.rope_border is not None:
            self._long = LongRows(self._cache, model.rope_border, self._reread)

    def _capture(self) -> ops.Captured | None:
        self._cache.reserve(0, 1)  # where the recording's own step stands, which is not run
        captured = self._backend.capture(
            lambda step: self._model.forward(step, self._cache), self._step_tokens, MAX_LINES
        )
        self._cache.truncate(0, 0)
        return captured

    @property
    def cache(self) -> PagedCache:
        return self._cache

    @property
    def lengths(self) -> Sequence[int]:
        return self._cache.lengths

    @torch.inference_mode()
    def extend(self, row: int, token_ids: Sequence[int]) -> None:
        """Append tokens without asking what follows; an exception leaves whole chunks of them."""
        with self._backend.threads():
            for start in range(0, len(token_ids), self._step_tokens):
                chunk = token_ids[start : start + self._step_tokens]
                self.forward([Part(row, chunk, is_wanted=False)])
                self.commit(row, len(chunk))

    @torch.inference_mode()
    def score(self, row: int, token_ids: Sequence[int], num_top: int, vocab_size: int) -> list[TokenLogprob]:
        """Append tokens; how likely each but the first was behind those before it, by the raw logits.

        Ids from `vocab_size` on are impossible.
        """
        self.is_sound, found = False, list[TokenLogprob]()
        with self._backend.threads():
            if self._long is not None:
                self._long.expect(row, self.lengths[row] + len(token_ids))
            for start in range(0, len(token_ids), MAX_LINES):
                chunk = token_ids[start : start + MAX_LINES]
                logits = self.forward([Part(row, chunk, num_drafts=len(chunk) - 1)])
                logits[:, vocab_size:] = -torch.inf
                self.commit(row, len(chunk))
                next_ids = token_ids[start + 1 : start + 1 + MAX_LINES]
                following = torch.tensor(next_ids, dtype=torch.int64, device=logits.device)
                scored = Sampled(following, *log_probabilities(logits[: len(following)], following, num_top))
                found += [scored.logprob_of(index, num_top) for index in range(len(following))]
        self.is_sound = True
        return found

    def forward(self, parts: Sequence[Part]) -> Float[Tensor, "lines vocab"]:
        return self._run(Step.of_parts(parts, self._reserve(parts)))

    def commit(self, row: int, count: int) -> None:
        self._cache.commit(row, count)
        self._token_ids[row] += self._brought[row][:count]
        self._cache.remember(row, self._token_ids[row])
        if self._long is not None:
            self._long.keep(row, count)

    def truncate(self, row: int, length: int) -> None:
        self._cache.truncate(row, length)
        del self._token_ids[row][self._cache.lengths[row] :]
        if self._long is not None:
            self._long.cut(row, self._cache.lengths[row])

    def forget(self, row: int) -> None:
        self._cache.forget(row)
        self.truncate(row, 0)

    def import_row(self, row: int, tensors: Mapping[str, Tensor], token_ids: Sequence[int]) -> None:
        """Replace a row by what was exported of these tokens.

        Raises InvalidRequestError, nothing changed, where it does not fit.
        """
        self._cache.import_row(row, tensors, len(token_ids), is_long=self._model.is_long(len(token_ids)))
        self.restore(row, token_ids)

    def restore(self, row: int, token_ids: Sequence[int]) -> None:
        """To be told which tokens a row holds that was copied into the cache."""
        self._token_ids[row] = list(token_ids)
        if self._long is not None:
            self._long.restore(row, token_ids)

    def adopt(self, row: int, token_ids: Sequence[int]) -> int:
        """Give an empty row what other rows have stored for the first of these tokens: how many."""
        if self._long is not None:  # what is stored for a token depends on how long its row is
            return 0
        count = self._cache.adopt(row, token_ids)
        self._token_ids[row] = list(token_ids[:count])
        return count

    @property
    def compresses_prompts(self) -> bool:
        return self._compression is not None

    @torch.inference_mode()
    def end_prompt(self, row: int) -> None:
        if self._compression is not None:
            with self._backend.threads():
                self._compression.after_prompt(
                    row,
                    self._token_ids[row],
                    lambda step: self._model.forward(step.to(self._model.device), self._cache),
                )

    def end_answer(self, row: int) -> None:
        self._cache.end_answer(row)
        self.truncate(row, self.lengths[row])

    def max_drafts(self, row: int) -> int:
        return MAX_LINES if self._long is None else min(MAX_LINES, self._long.max_drafts(row))

    def chain(
        self,
        tokens: Sequence[tuple[int, int]],
        count: int,
        columns: SamplingColumns,
        history: History | None,
        stop_ids: Collection[int],
        masks: Masks | None = None,
    ) -> tuple[list[list[int]], list[StepEnd]]:
        captured = self._captured
        if captured is None or len(tokens) > MAX_LINES:
            return [], []
        if self._long is not None:
            count = min(count, self._long.max_chain([row for row, _ in tokens]))
        if count < 1:
            return [], []
        parts = [Part(row, [token_id]) for row, token_id in tokens]
        starts = self._reserve(parts, count)
        chains, ends = captured.run_multi_step(parts, starts, count, columns, history, tuple(stop_ids), masks)
        for (row, token_id), sampled in zip(tokens, chains, strict=True):
            self._brought[row] = [token_id, *sampled]
            if self._long is not None:
                self._long.bring(row, self._brought[row])
            self.commit(row, len(sampled))
        return chains, ends

    def sample(
        self, parts: Sequence[Part], columns: SamplingColumns, history: History | None, masks: Masks | None = None
    ) -> tuple[list[SampledTokens], list[StepEnd]]:
        starts, captured = self._reserve(parts), self._captured
        if captured is None or not captured.takes(parts) or any(count is not None for count in columns.num_logprobs):
            return super().sample(parts, columns, history, masks)
        found, ends = captured.run_verified(parts, starts, columns, history, masks)
        return [SampledTokens(token_ids, []) for token_ids in found], ends

    def profile(self, token_ids: Sequence[int]) -> list[tuple[str, int]]:
        """Where the time of a step goes: each command's label and cycles. The sequence stays as it is."""
        if self._captured is None:
            raise InvalidRequestError("a profile needs steps that are recorded: they are on a CPU, with capture on")
        self._cache.reserve(0, len(token_ids))
        return self._captured.profile(Step.of(token_ids, self._cache.lengths[0]))

    def clear(self) -> None:
        for row in range(len(self.lengths)):
            self.truncate(row, 0)

    def _run(self, step: Step) -> Float[Tensor, "lines vocab"]:
        step = step.to(self._model.device)
        return self._model.forward(step, self._cache) if self._captured is None else self._captured.run(step)

    @torch.inference_mode()
    def _reread(self, row: int, token_ids: Sequence[int]) -> None:
        """Put an emptied row's tokens into the cache again."""
        for start in range(0, len(token_ids), self._step_tokens):
            chunk = token_ids[start : start + self._step_tokens]
            self._cache.reserve(row, len(chunk))
            self._run(Step.of(chunk, start, row=row))
            self._cache.commit(row, len(chunk))

    def _reserve(self, parts: Sequence[Part], repeats: int = 1) -> list[int]:
        """Room for the parts, or for so many tokens of a row that has one; their first positions.

        Raises InvalidRequestError where a row would not hold them: kernels write where they are told.
        """
        for part in parts:
            length = self.lengths[part.row] + len(part.token_ids) * repeats
            if length > self._cache.capacity:
                raise InvalidRequestError(f"a row holds {self._cache.capacity} tokens, got {length}")
        for part in parts:
            num_tokens, self._brought[part.row] = len(part.token_ids) * repeats, part.token_ids
            if self._long is not None:
                self._long.bring(part.row, part.token_ids)
                self._long.reach(part.row, self.lengths[part.row] + num_tokens)
            self._cache.reserve(part.row, num_tokens)
        return [self.lengths[part.row] for part in parts]


@final
class RecomputedContext(Context):
    """Runs the whole row again for every step: slow, and the oracle for every cache. One row."""

    def __init__(self, model: Transformer, settings: CacheSettings | None = None) -> None:
        super().__init__(model.device)
        self._model, self._settings, self._token_ids = model, settings, list[int]()
        self._provisional: Sequence[int] = ()

    @property
    def lengths(self) -> Sequence[int]:
        return [len(self._token_ids)]

    def forward(self, parts: Sequence[Part]) -> Float[Tensor, "lines vocab"]:
        (part,) = parts
        self._provisional = part.token_ids
        token_ids = [*self._token_ids, *part.token_ids]
        cache = make_cache(self._model, len(token_ids), step_tokens=len(token_ids), settings=self._settings)
        cache.set_rope(0, is_long=self._model.is_long(len(token_ids)))
        cache.reserve(0, len(token_ids))
        step = Step.of(token_ids, wanted=range(len(token_ids) - part.num_lines, len(token_ids)))
        return self._model.forward(step.to(self._model.device), cache)

    def max_drafts(self, row: int) -> int:
        border, length = self._model.rope_border, len(self._token_ids) + 1
        return MAX_LINES if border is None or self._model.is_long(length) else border - length

    def commit(self, row: int, count: int) -> None:
        self._token_ids += self._provisional[:count]

    def truncate(self, row: int, length: int) -> None:
        del self._token_ids[length:]


def make_cache(
    model: Transformer,
    capacity: int,
    num_rows: int = 1,
    *,
    settings: CacheSettings | None = None,
    step_tokens: int = PREFILL_CHUNK,
    pool_pages: int | None = None,
) -> PagedCache:
    """A cache whose rows get up to `step_tokens` in one step, with pages for all rows full or `pool_pages` of them.

    Raises InvalidRequestError, nothing allocated, where the memory that is available would not hold all pages.
    """
    settings = settings or CacheSettings()
    kv_type = model.kv_type if settings.kv_type == "auto" else settings.kv_type
    if ops.backend_of(model.device).computes_on_host:
        check_rows_fit(
            model.architecture,
            settings,
            kv_type,
            num_tokens=capacity,
            num_rows=num_rows,
            pool_pages=pool_pages,
            available=available_memory_bytes(),
        )
    return PagedCache(
        model.architecture.layers,
        num_rows,
        capacity,
        kv_type,
        model.device,
        step_tokens=step_tokens,
        settings=settings,
        context=model.architecture.most_positions,
        pool_pages=pool_pages,
    )
