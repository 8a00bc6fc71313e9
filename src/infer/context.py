"""Rows of tokens that grow, and what is sampled behind them: from a cache, captured or not, or computed all again.

What a context runs is provisional: `commit` says how many of a part's tokens stay.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from infer import ops
from infer.batch import Masks, Part, Step
from infer.cache.base import KVCache
from infer.cache.paged import PagedCache
from infer.cache.settings import CacheSettings
from infer.capture.cpu import CapturedForward
from infer.errors import InvalidRequestError
from infer.model.transformer import Transformer
from infer.results import TokenLogprob
from infer.sampling.history import History
from infer.sampling.rows import Rows
from infer.sampling.sampler import Sampled, log_probabilities

PREFILL_CHUNK = 512  # tokens per forward of a prompt: a cancel is seen between two chunks
MAX_LINES = 64  # logits of one step: rows and their drafts


@final
@dataclass
class Drawn:
    """What one part gave: the drafts that were right and the token behind them, or the code of a failed row."""

    token_ids: list[int]
    logprobs: list[TokenLogprob]


class Context(ABC):
    """Rows of tokens, each with its own length."""

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

    def chain(
        self,
        tokens: Sequence[tuple[int, int]],
        count: int,
        rows: Rows,
        history: History | None,
        stop_ids: Collection[int],
        masks: Masks | None = None,
    ) -> list[list[int]]:
        """The tokens sampled after each (row, token), up to `count` or until all met a stop id. [] if it cannot.

        They are committed but for the last, as after any sampling; the last may be the code of a failed row.
        """
        return []

    def sample(
        self, parts: Sequence[Part], rows: Rows, history: History | None, masks: Masks | None = None
    ) -> tuple[list[Drawn], float]:
        """Run the parts, entry i of `rows` being part i's, and sample behind the wanted ones while drafts are right.

        `history` sees what is sampled. Also the seconds that sampling took, 0 where it is part of the forward.
        """
        positions = [self.lengths[part.row] + len(part.token_ids) - part.num_drafts for part in parts]
        logits = self.forward(parts)[:, : rows.vocab_size]
        if masks is not None:
            masks.wait()
        started = time.perf_counter()
        drawn = verify(logits, parts, positions, rows, history, None if masks is None else masks.words)
        return drawn, time.perf_counter() - started


def verify(
    logits: Float[Tensor, "lines vocab"],
    parts: Sequence[Part],
    positions: Sequence[int],
    rows: Rows,
    history: History | None,
    masks: Int[Tensor, "lines words"] | None,
) -> list[Drawn]:
    """Sample line by line: a part goes on to its next line while what was sampled is what was drafted."""
    drawn = [Drawn([], []) for _ in parts]
    starts = np.cumsum([0, *(part.num_lines for part in parts)]).tolist()
    alive = [index for index, part in enumerate(parts) if part.is_wanted]
    entry = 0
    while alive:
        # Every row takes part, those that are through with any line: their tokens are not looked at.
        lines = torch.full((len(parts),), starts[alive[0]] + entry, device=logits.device)
        for index in alive:
            lines[index] = starts[index] + entry
        where = torch.tensor(positions, device=logits.device) + entry
        sampled = ops.sample(logits[lines], rows, history, where, None if masks is None else masks[lines])
        token_ids = sampled.token_ids.tolist()
        for index in alive:
            _take(drawn[index], sampled, index, rows.num_logprobs[index])
        _remember(history, rows, [index for index in alive if token_ids[index] >= 0], sampled.token_ids)
        alive = [
            index
            for index in alive
            if entry < parts[index].num_drafts and token_ids[index] == parts[index].drafts[entry]
        ]
        entry += 1
    return drawn


def _take(drawn: Drawn, sampled: Sampled, index: int, num_logprobs: int | None) -> None:
    token_id = int(sampled.token_ids[index])
    drawn.token_ids.append(token_id)
    if num_logprobs is not None and token_id >= 0:
        drawn.logprobs.append(sampled.logprob_of(index, num_logprobs))


def _remember(history: History | None, rows: Rows, indices: Sequence[int], token_ids: Int[Tensor, "rows"]) -> None:
    if history is None:
        return
    index = torch.tensor(indices, dtype=torch.int64, device=rows.device)
    index = index[rows.history_slot[index] >= 0]
    history.append(rows.history_slot[index], token_ids[index])


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
    ) -> None:
        cache = make_cache(model, capacity, num_rows, settings=settings)
        self._model, self._cache = model, cache
        self._captured: CapturedForward | None = None
        if capture and ops.can_capture(model.device):
            self._captured = CapturedForward(lambda step: model.forward(step, cache), PREFILL_CHUNK, MAX_LINES)

    @property
    def cache(self) -> KVCache:
        return self._cache

    @property
    def lengths(self) -> Sequence[int]:
        return self._cache.lengths

    @torch.inference_mode()
    def extend(self, row: int, token_ids: Sequence[int]) -> None:
        """Append tokens without asking what follows; an exception leaves whole chunks of them."""
        with ops.threads_for(self._model.device):
            for start in range(0, len(token_ids), PREFILL_CHUNK):
                chunk = token_ids[start : start + PREFILL_CHUNK]
                self.forward([Part(row, chunk, is_wanted=False)])
                self.commit(row, len(chunk))

    @torch.inference_mode()
    def score(self, row: int, token_ids: Sequence[int], num_top: int, vocab_size: int) -> list[TokenLogprob]:
        """Append tokens; how likely each but the first was behind those before it, by the raw logits.

        Ids from `vocab_size` on are impossible.
        """
        found = []
        with ops.threads_for(self._model.device):
            for start in range(0, len(token_ids), MAX_LINES):
                chunk = token_ids[start : start + MAX_LINES]
                logits = self.forward([Part(row, chunk, num_drafts=len(chunk) - 1)])
                logits[:, vocab_size:] = -torch.inf
                self.commit(row, len(chunk))
                following = torch.tensor(token_ids[start + 1 : start + 1 + MAX_LINES], device=logits.device)
                following = following.to(torch.int64)
                scores = log_probabilities(logits[: len(following)], following, num_top)
                scored = Sampled(following, *scores)
                found += [scored.logprob_of(index, num_top) for index in range(len(following))]
        return found

    def forward(self, parts: Sequence[Part]) -> Float[Tensor, "lines vocab"]:
        step = self._step(parts).to(self._model.device)
        return self._model.forward(step, self._cache) if self._captured is None else self._captured.run(step)

    def commit(self, row: int, count: int) -> None:
        self._cache.commit([count if index == row else 0 for index in range(len(self.lengths))])

    def truncate(self, row: int, length: int) -> None:
        self._cache.truncate(row, length)

    def chain(
        self,
        tokens: Sequence[tuple[int, int]],
        count: int,
        rows: Rows,
        history: History | None,
        stop_ids: Collection[int],
        masks: Masks | None = None,
    ) -> list[list[int]]:
        if self._captured is None or len(tokens) > MAX_LINES:
            return []
        step = self._step([Part(row, [token_id]) for row, token_id in tokens], count)
        by_step = self._captured.run_chain(step, count, rows, history, tuple(stop_ids), masks)
        for row, _ in tokens:
            self.commit(row, len(by_step))
        chains: list[list[int]] = by_step.T.tolist()
        return chains

    def sample(
        self, parts: Sequence[Part], rows: Rows, history: History | None, masks: Masks | None = None
    ) -> tuple[list[Drawn], float]:
        captured, num_tokens = self._captured, sum(len(part.token_ids) for part in parts)
        num_lines = sum(part.num_lines for part in parts)
        fits = captured is not None and num_tokens <= captured.capacity and num_lines <= captured.wanted_capacity
        if captured is None or not fits or any(count is not None for count in rows.num_logprobs):
            return super().sample(parts, rows, history, masks)
        found = captured.run_verified(
            self._step(parts),
            [self.lengths[part.row] + len(part.token_ids) - part.num_drafts for part in parts],
            [part.drafts for part in parts],
            [part.is_wanted for part in parts],
            rows,
            history,
            masks,
        )
        return [Drawn(token_ids, []) for token_ids in found], 0.0

    def profile(self, token_ids: Sequence[int]) -> list[tuple[str, int]]:
        """Where the time of a step goes: each command's label and cycles. The sequence stays as it is."""
        if self._captured is None:
            raise InvalidRequestError("a profile needs steps that are recorded: they are on a CPU, with capture on")
        self._cache.reserve(0, len(token_ids))
        return self._captured.profile(Step.of(token_ids, self._cache.lengths[0]))

    def clear(self) -> None:
        for row in range(len(self.lengths)):
            self._cache.truncate(row, 0)

    def _step(self, parts: Sequence[Part], repeats: int = 1) -> Step:
        """Raises InvalidRequestError where a row would not hold them: kernels write where they are told."""
        for part in parts:
            length = self.lengths[part.row] + len(part.token_ids) * repeats
            if length > self._cache.capacity:
                raise InvalidRequestError(f"a row holds {self._cache.capacity} tokens, got {length}")
        for part in parts:
            self._cache.reserve(part.row, len(part.token_ids) * repeats)
        return Step.of_parts(parts, [self.lengths[part.row] for part in parts])


@final
class RecomputedContext(Context):
    """Runs the whole row again for every step: slow, and the oracle for every cache. One row."""

    def __init__(self, model: Transformer, settings: CacheSettings | None = None) -> None:
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
        cache.reserve(0, len(token_ids))
        step = Step.of(token_ids, wanted=range(len(token_ids) - part.num_lines, len(token_ids)))
        return self._model.forward(step.to(self._model.device), cache)

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
) -> PagedCache:
    """A cache whose rows get up to `step_tokens` in one step."""
    settings = settings or CacheSettings()
    kv_type = model.kv_type if settings.kv_type == "auto" else settings.kv_type
    layers, device = model.architecture.layers, model.device
    return PagedCache(layers, num_rows, capacity, kv_type, device, step_tokens=step_tokens, settings=settings)
