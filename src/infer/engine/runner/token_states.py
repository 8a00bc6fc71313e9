"""The states of a model for the last tokens of some rows, and how a head reads them that drafts for the model."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from infer.compute import ops
from infer.compute.kvcache.paged import PagedCache
from infer.compute.operands.step import Chunk, Step
from infer.models.transformer import Transformer


@dataclass
class _Kept:
    """The residual streams of a row's tokens [first, end), in the pieces in which steps computed them."""

    first: int = 0
    end: int = 0
    pieces: deque[Tensor] = field(default_factory=deque)


@final
class TokenStates:
    """The states of each row's last tokens: at least `most`, if the row has that many neighbouring computed tokens.

    A runner calls `expect` before a step, and `keep` for each chunk that it commits. The states of a recorded step are
    in a buffer that the next step overwrites.
    """

    def __init__(self, model: Transformer, most: int) -> None:
        self._model, self._most = model, most
        self._kept: dict[int, _Kept] = {}
        self._residual = torch.empty(0)  # of the tokens of the last step
        self._first_by_row: dict[int, int] = {}  # the first of these tokens that a row has
        self._num_steps = 1  # of the last multi-step

    def forward(self, step: Step, cache: PagedCache) -> Float[Tensor, "logits vocab"]:
        """Return the logits of a step as the model's own `forward` does."""
        self._residual = self._model.residual(step, cache)
        return self._model.logits(self._residual, step)

    def expect(self, chunks: Sequence[Chunk], num_steps: int = 1) -> None:
        """Note which rows of the residual stream the chunks of a step have, or of the last of several steps."""
        self._num_steps = num_steps
        starts = accumulate((len(chunk.token_ids) for chunk in chunks), initial=0)
        self._first_by_row = {chunk.row: start for chunk, start in zip(chunks, starts, strict=False)}

    def begin(self, row: int) -> None:
        """Begin to keep the states of a row, without those of its earlier tokens."""
        self._kept[row] = _Kept()

    def release(self, row: int) -> None:
        self._kept.pop(row, None)

    def first(self, row: int) -> int:
        """Return the position of the first token whose state is kept."""
        return self._kept[row].first

    def end(self, row: int) -> int:
        """Return the position after the last token whose state is kept."""
        return self._kept[row].end

    def keep(self, row: int, start: int, count: int) -> None:
        """Keep the states of the first `count` tokens of a chunk, which begins at position `start`.

        A gap before them drops all earlier states.
        """
        kept, at = self._kept.get(row), self._first_by_row.pop(row, None)
        if kept is None or at is None or not count:
            return
        if self._num_steps > 1:  # only the last state is left, and it is the right one if all tokens are
            if count < self._num_steps:
                return
            start, count = start + count - 1, 1
        num_skipped = max(0, count - self._most)
        if start != kept.end or num_skipped:
            kept.first = start + num_skipped
            kept.pieces.clear()
        kept.pieces.append(self._residual[at + num_skipped : at + count].clone())
        kept.end = start + count
        while kept.end - kept.first - len(kept.pieces[0]) >= self._most:
            kept.first += len(kept.pieces.popleft())

    def of(self, row: int, start: int, end: int) -> Float[Tensor, "tokens hidden"]:
        """Return the states of the tokens [start, end), after the model's last norm."""
        kept, pieces = self._kept[row], list[Tensor]()
        first = kept.end
        while first > start:
            pieces.insert(0, kept.pieces[-1 - len(pieces)])
            first -= len(pieces[0])
        return self._model.final_norm(torch.cat(pieces)[start - first : end - first]).float()

    def last(self, row: int) -> Float[Tensor, "1 hidden"]:
        """Return the state of the last token."""
        return self.of(row, self.end(row) - 1, self.end(row))


@final
class HeadInput:
    """The inputs of a head that drafts: each token, and the state of its model before the token.

    After the text, the head reads its own guesses, and its own states before them.
    """

    def __init__(self, head: Transformer, states: TokenStates, guessed: TokenStates) -> None:
        """Begin without rows. `states` are those of the model, and `guessed` those of the head."""
        self._head, self.states, self._guessed = head, states, guessed

    def begin(self, row: int) -> None:
        self.states.begin(row)
        self._guessed.begin(row)

    def release(self, row: int) -> None:
        self.states.release(row)
        self._guessed.release(row)

    def first(self, row: int) -> int:
        """Return the place in the text of the first token that the head can read."""
        return self.states.first(row) + 1

    def has_read(self, row: int, num_tokens: int) -> bool:
        """Return True if the model has computed the token before the last of `num_tokens` tokens."""
        return self.states.end(row) == num_tokens - 1

    def write(self, chunks: Sequence[Chunk], starts: Sequence[int]) -> None:
        """Set the inputs of the head's next step. The chunks begin at these places of their texts."""
        before = [
            self.states.of(chunk.row, start - 1, start - 1 + len(chunk.token_ids))
            for chunk, start in zip(chunks, starts, strict=True)
        ]
        self._write(chunks, before)

    def write_guesses(self, chunks: Sequence[Chunk]) -> None:
        """Set the inputs of the head's next step, whose chunks are its last guesses."""
        self._write(chunks, [self._guessed.last(chunk.row) for chunk in chunks])

    def _write(self, chunks: Sequence[Chunk], states: Sequence[Tensor]) -> None:
        assert self._head.state_input is not None
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        with ops.using(self._head.backend), torch.inference_mode():
            self._head.state_input.write(token_ids, torch.cat(tuple(states)))
