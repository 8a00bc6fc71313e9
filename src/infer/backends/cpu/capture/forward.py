"""A forward recorded once as a table of commands, and run for any step: decode, verify, a batch, a chunk of a prompt.

The table reads the numbers of tokens and of wanted logits, and the step's arrays, from fixed slots when it is walked
(`backends.cpu.state`); nothing else changes between walks. So there is one recording for a model and its cache, and
what it computes is what the same ops compute one by one, to the bit.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from infer.backends.base import Captured, Generated
from infer.backends.cpu.capture.sampled import MultiStep, Verifier
from infer.backends.cpu.recording import record
from infer.backends.cpu.state import STATE, field_index, words_of
from infer.backends.cpu.table import Walk
from infer.backends.cpu.threads import team
from infer.errors import InvalidRequestError
from infer.operands.step import Masks, Part, Step
from infer.sampling.columns import SamplingColumns
from infer.sampling.history import History

Forward = Callable[[Step], Tensor]
_NUM_TOKENS, _NUM_WANTED = field_index(STATE, "num_tokens"), field_index(STATE, "num_wanted")


@final
class CapturedForward(Captured):
    """`forward(step)` → logits, recorded for up to `capacity` tokens at once; longer steps run in pieces.

    The tensors that forward reads and writes (weights, cache) must stay where they are.
    """

    def __init__(self, forward: Forward, capacity: int = 512, wanted_capacity: int = 32) -> None:
        with record(capacity, wanted_capacity) as self._recording:
            self._logits = forward(self._recording.step)
        self.capacity, self.wanted_capacity = capacity, wanted_capacity
        slots = self._recording.step
        self._slots = [array.numpy() for array in (slots.tokens, slots.positions, slots.rows, slots.wanted)]
        self._slot_words = [words_of(array) for array in self._slots]
        self._state_words = words_of(self._recording.state)
        self.table = self._recording.table
        self._walk = Walk(self.table)
        self._multi_step: MultiStep | None = None
        self._verifier: Verifier | None = None

    def run(self, step: Step, num_threads: int | None = None) -> Float[Tensor, "wanted vocab"]:
        """The wanted logits, in a buffer that the next run overwrites if they fit one piece."""
        pieces = []
        for piece in self._pieces(step):
            self._fill(piece)
            team().run(self._walk, self._recording.state, num_threads)
            pieces.append(self._logits[: len(piece.wanted)])
            if len(piece.tokens) < len(step.tokens):
                pieces[-1] = pieces[-1].clone()
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def takes(self, parts: Sequence[Part]) -> bool:
        num_tokens, num_lines = sum(len(part.token_ids) for part in parts), sum(part.num_lines for part in parts)
        return num_tokens <= self.capacity and num_lines <= self.wanted_capacity

    def run_multi_step(
        self,
        parts: Sequence[Part],
        starts: Sequence[int],
        count: int,
        columns: SamplingColumns,
        history: History | None = None,
        stop_ids: Sequence[int] = (),
        masks: Masks | None = None,
        num_threads: int | None = None,
    ) -> Generated:
        if len(parts) > self.wanted_capacity:
            raise InvalidRequestError(f"a multi-step takes up to {self.wanted_capacity} rows, got {len(parts)}")
        if len(parts) != len(columns) or any(not len(part.token_ids) == part.num_lines == 1 for part in parts):
            raise InvalidRequestError(f"a multi-step takes one wanted token for each of {len(columns)} rows")
        self._load(parts, starts)
        if self._multi_step is None:
            self._multi_step = MultiStep(self._recording, self._walk, self._logits)
        return self._multi_step.run(self._recording.state, count, columns, history, stop_ids, masks, num_threads)

    def run_verified(
        self,
        parts: Sequence[Part],
        starts: Sequence[int],
        columns: SamplingColumns,
        history: History | None = None,
        masks: Masks | None = None,
        num_threads: int | None = None,
    ) -> Generated:
        if not self.takes(parts):
            raise InvalidRequestError(
                f"a step takes up to {self.capacity} tokens and {self.wanted_capacity} wanted ones, "
                f"got {sum(len(part.token_ids) for part in parts)} and {sum(part.num_lines for part in parts)}"
            )
        if len(parts) != len(columns):
            raise InvalidRequestError(f"a step takes a part for each of {len(columns)} rows, got {len(parts)}")
        self._load(parts, starts)
        if self._verifier is None:
            self._verifier = Verifier(self._walk, self._logits)
        return self._verifier.run(self._recording.state, parts, starts, columns, history, masks, num_threads)

    def profile(self, step: Step, num_threads: int | None = None) -> list[tuple[str, int]]:
        """Each command's label and the cycles that thread 0 spent in it, barrier included."""
        times = np.zeros(len(self.table.commands), np.int64)
        walk = Walk(self.table)
        walk.arguments["times"] = times.ctypes.data
        for piece in self._pieces(step):
            self._fill(piece)
            team().run(walk, self._recording.state, num_threads)
        return list(zip(self.table.labels, times.tolist(), strict=True))

    def _fill(self, step: Step) -> None:
        state = self._recording.state
        for slot, values in zip(self._slots, (step.tokens, step.positions, step.rows, step.wanted), strict=True):
            slot[: len(values)] = values.numpy()
        state["num_tokens"], state["num_wanted"] = len(step.tokens), len(step.wanted)

    def _load(self, parts: Sequence[Part], starts: Sequence[int]) -> None:
        """`_fill` with `Step.of_parts`, without a step between: a step of decoding is short, and torch takes long."""
        tokens, positions, rows, wanted = self._slot_words
        at = num_wanted = 0
        for part, start in zip(parts, starts, strict=True):
            count, num_lines = len(part.token_ids), part.num_lines
            end = at + count
            tokens[at:end], rows[at:end] = list(part.token_ids), [part.row] * count
            positions[at:end] = list(range(start, start + count))
            wanted[num_wanted : num_wanted + num_lines] = list(range(end - num_lines, end))
            at, num_wanted = end, num_wanted + num_lines
        self._state_words[_NUM_TOKENS], self._state_words[_NUM_WANTED] = at, num_wanted

    def _pieces(self, step: Step) -> Iterator[Step]:
        num_tokens = len(step.tokens)
        if num_tokens <= self.capacity and len(step.wanted) <= self.wanted_capacity:
            yield step
            return
        wanted = step.wanted.tolist()
        if wanted != sorted(wanted):
            raise InvalidRequestError("the wanted tokens of a step longer than the recording must be in order")
        start = 0
        while start < num_tokens:
            end = min(num_tokens, start + self.capacity)
            mine = [index for index in wanted if start <= index < end]
            if len(mine) > self.wanted_capacity:
                mine = mine[: self.wanted_capacity]
                end = mine[-1] + 1
            tokens, positions, rows = (x[start:end] for x in (step.tokens, step.positions, step.rows))
            yield Step(tokens, positions, rows, torch.tensor([index - start for index in mine], dtype=torch.int64))
            start = end
