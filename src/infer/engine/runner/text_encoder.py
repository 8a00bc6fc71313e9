"""Hidden states of whole texts by an encoder, whose tokens see the tokens after them.

A layer can begin when the layer before it has ended for all tokens of a text. So a long text goes through a stage in
tiles of as many tokens as a step may have, then through the next stage. Texts that fit one tile together go through all
stages in one batch.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from infer.compute.kvcache.text_cache import TextCache
from infer.compute.operands.limits import MAX_STEP_TEXTS
from infer.compute.operands.step import Step
from infer.errors import InvalidRequestError
from infer.models.transformer import Transformer


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
        step, num_stages = _step_of(texts), self._model.num_stages
        if len(step.tokens) <= self.step_tokens:
            states = self._final(self._stages.run(0, num_stages, None, self._placed(step)))
            ends = accumulate(lengths)
            yield [(row, states[end - count : end]) for row, (count, end) in enumerate(zip(lengths, ends, strict=True))]
            return
        tiles = [_tile(step, start, self.step_tokens) for start in range(0, len(step.tokens), self.step_tokens)]
        streams: list[Tensor | None] = [None] * len(tiles)
        for index in range(num_stages):
            for number, tile in enumerate(tiles):
                x = self._stages.run(index, index + 1, streams[number], self._placed(tile))
                streams[number] = x.clone()
                yield []
        for tile, stream in zip(tiles, streams, strict=True):
            assert stream is not None
            states = self._final(stream)
            yield [(row, states[tile.rows == row]) for row in sorted(set(tile.rows.tolist()))]

    def _placed(self, step: Step) -> Step:
        return step.to(self._model.device)

    def _final(self, x: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        return self._model.final_norm(x).float().cpu().clone()


def _step_of(texts: Sequence[Sequence[int]]) -> Step:
    lengths = torch.tensor([len(text) for text in texts])
    return Step(
        tokens=torch.tensor([token for text in texts for token in text], dtype=torch.int64),
        positions=torch.cat([torch.arange(length) for length in lengths.tolist()]),
        rows=torch.repeat_interleave(lengths),
        logit_indices=torch.zeros(0, dtype=torch.int64),
    )


def _tile(step: Step, start: int, num_tokens: int) -> Step:
    end = start + num_tokens
    return Step(step.tokens[start:end], step.positions[start:end], step.rows[start:end], step.logit_indices)
