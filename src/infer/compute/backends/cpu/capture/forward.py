"""A forward recorded once as a table of commands, and run for any step: decode, verify, a batch, a chunk of a prompt.

The table reads the numbers of tokens and of logits, and the step's arrays, from fixed slots each time it runs
(`backends.cpu.thread_records`). Nothing else changes between runs. So there is one recording per model and cache, and
its results equal those of the same ops run one by one, to the bit.

`CapturedStages` records a forward in stages, of which any range runs as one table.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from infer.compute.backends.base import (
    Captured,
    Generated,
    PendingStep,
    SampledStep,
    Stage,
    Stages,
)
from infer.compute.backends.cpu.capture.sampled import Followed, MultiStep, Verifier
from infer.compute.backends.cpu.recording import arrays_of, record
from infer.compute.backends.cpu.thread_records import fields_of
from infer.compute.backends.cpu.threads.dispatch_table import DispatchTable
from infer.compute.backends.cpu.threads.pool import thread_pool
from infer.compute.operands.step import Chunk, Interrupt, Step
from infer.errors import InvalidRequestError

Forward = Callable[[Step], Tensor]


@final
class CapturedForward(Captured):
    """`forward(step)` → logits, recorded for up to `capacity` tokens per run; longer steps run in pieces.

    The tensors that forward reads and writes (weights, cache) must stay where they are.
    """

    is_followed = True

    def __init__(self, forward: Forward, capacity: int = 512, max_logits: int = 32) -> None:
        with record(capacity, max_logits) as self._recording:
            self._logits = forward(self._recording.step)
        self.capacity, self.max_logits = capacity, max_logits
        self._slots = [np.ctypeslib.as_ctypes(array.numpy()) for array in arrays_of(self._recording.step).values()]
        self._state = fields_of(self._recording.state)
        self._table = DispatchTable(self._recording.commands)

    @cached_property
    def _multi_step(self) -> MultiStep:
        return MultiStep(self._recording, self._table, self._logits)

    @cached_property
    def _verifier(self) -> Verifier:
        return Verifier(self._table, self._logits)

    @cached_property
    def _followed(self) -> Followed:
        if self._recording.group is None:
            raise InvalidRequestError("a model that is not shared out has nobody to follow")
        return Followed(self._recording.group, self._table)

    def run(self, step: Step, num_threads: int | None = None) -> Float[Tensor, "logits vocab"]:
        """Return the requested logits, in a buffer that the next run overwrites if they fit one piece."""
        pieces = []
        for piece in step.pieces(self.capacity, self.max_logits):
            self._fill(piece)
            thread_pool().run(self._table, self._recording.state, num_threads)
            if self._recording.checks:
                self._recording.check()
            pieces.append(self._logits[: len(piece.logit_indices)])
            if len(piece.tokens) < len(step.tokens):
                pieces[-1] = pieces[-1].clone()
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def run_multi_step(
        self, step: SampledStep, count: int, stop_ids: Sequence[int] = (), interrupt: Interrupt | None = None
    ) -> Generated:
        step.check_multi_step()
        self._load(step.chunks, step.starts)
        generated = self._multi_step.run(self._recording.state, step, count, stop_ids, interrupt)
        if self._recording.checks:
            self._recording.check()
        return generated

    def launch(self, step: SampledStep, behind: PendingStep | None = None) -> PendingStep:
        step.check()
        self._load(step.chunks, step.starts)
        generated = self._verifier.run(self._recording.state, step)
        if self._recording.checks:
            self._recording.check()
        return PendingStep(generated)

    def follow(self, chunks: Sequence[Chunk], starts: Sequence[int], count: int, num_threads: int | None = None) -> int:
        self._load(chunks, starts)
        return self._followed.run(self._recording.state, count, num_threads)

    def profile(self, step: Step, num_threads: int | None = None) -> list[tuple[str, int]]:
        """Return each command's label and the cycles that thread 0 spent in it, barrier included."""
        commands = self._recording.commands
        times, table = np.zeros(len(commands), np.int64), DispatchTable(commands)
        table.arguments["times"] = times.ctypes.data
        for piece in step.pieces(self.capacity, self.max_logits):
            self._fill(piece)
            thread_pool().run(table, self._recording.state, num_threads)
        return list(zip((command.label for command in commands), times.tolist(), strict=True))

    def _fill(self, step: Step) -> None:
        self._write([array.tolist() for array in arrays_of(step).values()])

    def _load(self, chunks: Sequence[Chunk], starts: Sequence[int]) -> None:
        """Fill the slots as `_fill` does with `Step.of_chunks`, but without making a step: a decode step is short, and
        torch slow.
        """
        tokens, positions, rows, logit_indices = columns = [list[Any]() for _ in range(4)]
        for (slot, token_ids, num_drafts, has_logits), start in zip(chunks, starts, strict=True):
            count = len(token_ids)
            tokens += token_ids
            positions += range(start, start + count)
            rows += [slot] * count
            logit_indices += range(len(tokens) - num_drafts - 1, len(tokens)) if has_logits else ()
        if len(tokens) > self.capacity or len(logit_indices) > self.max_logits:
            raise InvalidRequestError(
                f"a step takes up to {self.capacity} tokens and {self.max_logits} logits, "
                f"got {len(tokens)} and {len(logit_indices)}"
            )
        self._write(columns)

    def _write(self, columns: Sequence[list[Any]]) -> None:
        for slot, column in zip(self._slots, columns, strict=True):
            slot[: len(column)] = column
        self._state.num_tokens, self._state.num_logits = len(columns[0]), len(columns[-1])


@final
class CapturedStages(Stages):
    """Stages that read and change one residual stream of `capacity` tokens. The stages share all other buffers."""

    def __init__(self, stages: Sequence[Stage], capacity: int) -> None:
        self.capacity, self._ends, x = capacity, [0], None
        with record(capacity, 1) as self._recording:
            for stage in stages:
                x = stage(x, self._recording.step)
                self._ends.append(len(self._recording.commands))
        assert x is not None
        self._x = x
        self._slots = [np.ctypeslib.as_ctypes(array.numpy()) for array in arrays_of(self._recording.step).values()]
        self._state = fields_of(self._recording.state)
        self._tables = dict[tuple[int, int], DispatchTable]()

    def run(self, first: int, end: int, x: Tensor | None, step: Step) -> Float[Tensor, "tokens hidden"]:
        count = len(step.tokens)
        if count > self.capacity:
            raise InvalidRequestError(f"a step takes up to {self.capacity} tokens, got {count}")
        if x is not None:
            self._x[:count] = x
        columns = [array.tolist() for array in arrays_of(step).values()]
        for slot, column in zip(self._slots[:3], columns[:3], strict=True):
            slot[:count] = column
        self._state.num_tokens, self._state.num_logits = count, 0
        thread_pool().run(self._table(first, end), self._recording.state)
        return self._x[:count]

    def _table(self, first: int, end: int) -> DispatchTable:
        if (first, end) not in self._tables:
            commands = self._recording.commands[self._ends[first] : self._ends[end]]
            self._tables[first, end] = DispatchTable(commands)
        return self._tables[first, end]
