"""Hidden states of a text after the last norm, before the head: by a decoder over a cache, or by an encoder.

The tokens of an encoder see the tokens after them, so a layer can begin when the layer before it has ended for all
tokens of a text. A long text goes through a stage in tiles of as many tokens as a step may have, then through the next
stage. Texts that fit one tile together go through all stages in one batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.groups import with_state_memory
from infer.compute.kvcache.pages import num_pages
from infer.compute.kvcache.text_cache import TextCache
from infer.compute.operands.limits import MAX_STEP_TEXTS, StepLimits
from infer.compute.operands.step import Chunk, Step
from infer.engine.runner.runner import Runner
from infer.errors import InvalidRequestError
from infer.models.memory.memory_budget import STATES_SHARE
from infer.models.transformer import Transformer

MAX_TEXTS = 32  # texts in one step, or less if their states would take too much memory
STEP_TOKENS = 256
MAX_SHARED_TOKENS = 1024  # tokens with which all texts of a call begin


@final
class HiddenStates:
    """Computes hidden states over a cache of its own, which evicts no tokens. For one thread at a time."""

    def __init__(self, model: Transformer, kv_type: str, *, capture: bool) -> None:
        """Make a cache. Raises InvalidRequestError if the memory does not hold one more full context."""
        settings, capacity = CacheSettings(kv_type=kv_type), model.max_seq_len
        self.max_texts = _max_texts(model, settings)
        page_tokens = settings.page_tokens
        shared = num_pages(min(capacity, MAX_SHARED_TOKENS), page_tokens)
        # A row copies the last page that it shares before it writes.
        pages = max(num_pages(capacity, page_tokens) + 1, 2 * self.max_texts + STEP_TOKENS // page_tokens + shared)
        # Steps have no logits: each token has the residual stream in their place.
        limits = replace(model, step_limits=StepLimits(STEP_TOKENS, STEP_TOKENS))
        options: dict[str, Any] = {"capture": capture, "settings": settings, "pool_pages": pages}
        self._model = model
        try:
            self._runner = Runner(limits, capacity, num_slots=self.max_texts + 1, forward=model.residual, **options)
        except InvalidRequestError as error:
            if model.backend.computes_on_host:
                raise
            why = f"vectors of texts need memory beside the pool, which has taken it: {error}"
            raise InvalidRequestError(f"{why}; load the model with fewer pool_pages") from error
        self._shared_row, self._shared = self.max_texts, list[int]()  # and its tokens
        self._cache = self._runner.cache

    def share(self, beginning: Sequence[int], num_step_tokens: Callable[[], int]) -> Iterator[None]:
        """Compute the common beginning of the texts of the next call of `of`, unless the cache still has it.

        Rows that an abandoned call left are emptied, so all pages are free for the texts.
        """
        for row in range(self.max_texts):
            self._cache.truncate(row, 0)
        if beginning and self._shared == list(beginning):
            return
        self._shared = []
        self._cache.truncate(self._shared_row, 0)
        self._cache.set_rope(self._shared_row, is_long=False)
        for _ in self._steps({self._shared_row: beginning}, num_step_tokens):
            yield
        self._shared = list(beginning)

    def of(
        self, texts: Sequence[Sequence[int]], num_step_tokens: Callable[[], int], num_shared: int = 0
    ) -> Iterator[list[tuple[int, Float[Tensor, "tokens hidden"]]]]:
        """Compute texts that one step could take, or one text of any length, step after step.

        `share` must be called before. It computes the first `num_shared` tokens of all texts, and empties the rows.

        Yields, for each step, the indices of its texts with the float32 states of their next tokens. `num_step_tokens`
        is called before each step. Only one call may be active: `share` of a later one empties the rows.
        """
        for row, text in enumerate(texts):
            if num_shared:
                self._cache.copy_row(row, self._shared_row)
            else:
                self._cache.set_rope(row, is_long=self._model.is_long(len(text)))
        yield from self._steps(dict(enumerate(texts)), num_step_tokens)
        for row in range(len(texts)):
            self._cache.truncate(row, 0)
        self._cache.give_back_free()

    def _steps(
        self, texts: Mapping[int, Sequence[int]], num_step_tokens: Callable[[], int]
    ) -> Iterator[list[tuple[int, Float[Tensor, "tokens hidden"]]]]:
        """Compute the tokens that the row of each text lacks, as `of` does."""
        lengths = self._runner.lengths
        while any(lengths[row] < len(text) for row, text in texts.items()):
            room, chunks = num_step_tokens(), list[Chunk]()
            for row, text in texts.items():
                taken = text[lengths[row] : lengths[row] + room]
                room -= len(taken)
                if taken:
                    self._cache.reserve(row, len(taken))
                    chunks.append(Chunk(row, taken, num_drafts=len(taken) - 1))
            states = torch.split(self._run(chunks), [chunk.num_logits for chunk in chunks])
            for chunk in chunks:
                self._runner.commit(chunk.row, chunk.num_logits)
            yield [(chunk.row, each) for chunk, each in zip(chunks, states, strict=True)]

    def _run(self, chunks: Sequence[Chunk]) -> Float[Tensor, "tokens hidden"]:
        return self._model.final_norm(self._runner.forward(chunks)).float()


def _max_texts(model: Transformer, settings: CacheSettings) -> int:
    """Return the number of texts in one step, halved until their states take the share of the memory for states."""
    available, count = model.backend.available_bytes(), MAX_TEXTS

    def megabytes(num_rows: int) -> int:
        return with_state_memory(settings, model.own_mixers, model.max_seq_len, num_rows, None).state_memory_mb or 0

    while available is not None and count > 1 and megabytes(count + 1) << 20 > available // STATES_SHARE:
        count //= 2
    return count


@final
class TextEncoder:
    """Computes hidden states of texts. For one thread at a time."""

    def __init__(self, model: Transformer, kv_type: str, *, capture: bool) -> None:
        """Make the cache. Raises InvalidRequestError for a type of keys that the model's heads cannot have."""
        self._model, self.step_tokens = model, model.step_limits.tokens
        kv_type = "f32" if kv_type == "auto" else kv_type
        self._cache = TextCache(
            model.architecture.attention, MAX_STEP_TEXTS, model.max_seq_len, self.step_tokens, kv_type, model.backend
        )
        stages = [partial(self._stage, index) for index in range(model.num_stages)]
        with torch.inference_mode():
            self._stages = model.backend.make_stages(stages, self.step_tokens, capture=capture)

    def _stage(self, index: int, x: Tensor | None, step: Step) -> Float[Tensor, "tokens hidden"]:
        return self._model.run_stage(index, x, step, self._cache)

    def of(
        self, texts: Sequence[Sequence[int]], second_starts: Sequence[int]
    ) -> Iterator[list[tuple[int, Float[Tensor, "tokens hidden"]]]]:
        """Compute the texts that fit one tile, or one text of any length.

        Of each text, tokens from `second_starts` on have the second type. Yields, after each step, the
        indices of texts with their next tokens' float32 states, which only the last stage has.
        """
        lengths = [len(text) for text in texts]
        if len(texts) > 1 and sum(lengths) > self.step_tokens:
            raise InvalidRequestError(f"texts must have {self.step_tokens} tokens together, got {sum(lengths)}")
        self._cache.hold(lengths, second_starts)
        chunks = [Chunk(row, text, has_logits=False) for row, text in enumerate(texts)]
        step, num_stages = Step.of_chunks(chunks, [0] * len(chunks)), self._model.num_stages
        if len(step.tokens) <= self.step_tokens:
            states = self._final(self._stages.run(0, num_stages, None, step.to(self._model.device)))
            ends = accumulate(lengths)
            yield [(row, states[end - count : end]) for row, (count, end) in enumerate(zip(lengths, ends, strict=True))]
            return
        tiles = list(step.pieces(self.step_tokens, max_logits=0))
        streams: list[Tensor | None] = [None] * len(tiles)
        for index in range(num_stages):
            for number, tile in enumerate(tiles):
                x = self._stages.run(index, index + 1, streams[number], tile.to(self._model.device))
                streams[number] = x.clone()
                yield []
        for tile, stream in zip(tiles, streams, strict=True):
            assert stream is not None
            states = self._final(stream)
            yield [(row, states[tile.rows == row]) for row in sorted(set(tile.rows.tolist()))]

    def _final(self, x: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        return self._model.final_norm(x).float().cpu().clone()
