"""A forward in stages, recorded once: any range of its stages runs as one table of commands."""

from collections.abc import Sequence
from typing import final

import numpy as np
from jaxtyping import Float
from torch import Tensor

from infer.compute.backends.base import Stage, Stages
from infer.compute.backends.cpu.recording import arrays_of, record
from infer.compute.backends.cpu.state import fields_of
from infer.compute.backends.cpu.threads.dispatch_table import DispatchTable
from infer.compute.backends.cpu.threads.pool import thread_pool
from infer.compute.operands.step import Step
from infer.errors import InvalidRequestError


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
