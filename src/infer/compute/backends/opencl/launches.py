"""Targets of an op's launches: the active recording, or the queue immediately.

A run has buffers that its launches share. An eager run has fresh buffers, and the op's own tensors. A recording has one
buffer per role and size, and slots of a fixed capacity for the step's arrays. So one builder serves both.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, final

import numpy as np
import pyopencl as cl
import torch
from jaxtyping import Float
from torch import Tensor

from infer.compute.backends import host_memory
from infer.compute.backends.base import Forward, Recorded
from infer.compute.backends.opencl.devices import ITEMS
from infer.compute.backends.opencl.runtime import Placed, Runtime
from infer.compute.operands.step import Step

Axis = Literal["tokens", "logits"]
_NUMBERS = {int: np.int32, float: np.float32}


class Launch(NamedTuple):
    """A kernel with its arguments, in one variant per number of tokens that a work item takes."""

    variants: Sequence[tuple[int, cl.Kernel]]
    width: int  # work items for each token, or for so many
    axis: Axis


class Run:
    """Launches that run in order, for up to `capacity` tokens and `max_logits` logits."""

    def __init__(self, runtime: Runtime, capacity: int, max_logits: int) -> None:
        self.runtime, self.capacity, self.max_logits = runtime, capacity, max_logits
        self._launches: list[Launch] = []
        self.most: dict[Axis, int] = {"tokens": capacity, "logits": max_logits}
        self.counts = {axis: torch.tensor([0], dtype=torch.int32) for axis in self.most}  # of this step
        self._placed: dict[tuple[int, int], tuple[Tensor, Placed]] = {}
        self._of_host: list[Tensor] = []

    def tensor(self, role: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a buffer for this role, with undefined contents."""
        return host_memory.zeros(shape, dtype)

    def launch(
        self,
        source: str,
        name: str,
        width: int,
        arguments: Sequence[Any],
        macros: Mapping[str, Any] | None = None,
        *,
        axis: Axis = "tokens",
        tokens: tuple[int, ...] = (1,),
    ) -> None:
        """Append a kernel of at least `width` work items per token, in whole work groups.

        It has a variant for each number of `tokens` that a work item takes. A tensor is passed as its buffer, whole
        numbers as int, floats as float, None as a null pointer.
        """
        kernels = [(count, self.runtime.kernel(source, name, {**(macros or {}), "TOKENS": count})) for count in tokens]
        for index, argument in enumerate(arguments):
            for _, kernel in kernels:
                kernel.set_arg(index, self._argument(argument))
        self._launches.append(Launch(kernels, -(-width // ITEMS) * ITEMS, axis))

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self._buffer(argument)
        number = _NUMBERS.get(type(argument))
        return argument if number is None else number(argument)

    def _buffer(self, tensor: Tensor, *, is_constant: bool = False) -> cl.Buffer:
        """Return the buffer of a contiguous tensor. The host's own tensor is copied before the launches, unless it is a
        constant.
        """
        key = tensor.data_ptr(), tensor.nbytes
        if key not in self._placed:
            self._placed[key] = tensor, self.runtime.memory.placed(tensor)
            if self._placed[key][1].is_of_host and not is_constant:
                self._of_host.append(tensor)
        return self._placed[key][1].buffer

    def constant(self, tensor: Tensor | None) -> cl.Buffer | None:
        return None if tensor is None else self._buffer(tensor, is_constant=True)

    def execute(self) -> None:
        """Run all launches, and make what they have written visible to the host."""
        self.enqueue(self.capacity, self.max_logits)
        for tensor in self._of_host:
            self.runtime.memory.to_host(tensor)
        self.runtime.memory.finish()

    def enqueue(self, num_tokens: int, num_logits: int) -> None:
        """Make the host's writes visible to the device, and begin all launches for these counts."""
        counts: dict[Axis, int] = {"tokens": num_tokens, "logits": num_logits}
        for axis, count in counts.items():
            self.counts[axis][0] = count
        for tensor in self._of_host:
            self.runtime.memory.to_device(tensor)
        for variants, width, axis in self._launches:
            tokens, kernel = next((each for each in variants if each[0] >= counts[axis]), variants[-1])
            if counts[axis]:
                items = width, -(-counts[axis] // tokens)
                cl.enqueue_nd_range_kernel(self.runtime.queue, kernel, items, (ITEMS, 1))


@final
class RecordedForward(Run, Recorded):
    """A forward recorded once, and run for any step. A step of more than `capacity` tokens runs in pieces.

    Kernels read the step's arrays and counts from slots, which are copied when a step begins. Logits are copied to the
    host, and the CPU samples.
    """

    def __init__(self, runtime: Runtime, forward: Forward, capacity: int, max_logits: int) -> None:
        super().__init__(runtime, capacity, max_logits)
        tokens, positions, rows = (host_memory.zeros((capacity,), torch.int64) for _ in range(3))
        self._step = Step(tokens, positions, rows, host_memory.zeros((max_logits,), torch.int64))
        self._workspace: dict[tuple[Any, ...], Tensor] = {}
        token = _active.set(self)
        try:
            self._logits = forward(self._step)
        finally:
            _active.reset(token)

    def tensor(self, role: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        key = (role, shape, dtype)
        if key not in self._workspace:
            self._workspace[key] = self.runtime.memory.zeros(shape, dtype)
        return self._workspace[key]

    def run(self, step: Step) -> Float[Tensor, "logits vocab"]:
        pieces = []
        for piece in step.pieces(self.capacity, self.max_logits):
            num_logits = len(piece.logit_indices)
            for name in ("tokens", "positions", "rows", "logit_indices"):
                values = getattr(piece, name).numpy()
                getattr(self._step, name).numpy()[: len(values)] = values
            self.enqueue(len(piece.tokens), num_logits)
            self.runtime.memory.to_host(self._logits, 0, num_logits)
            self.runtime.memory.finish()
            pieces.append(self._logits[:num_logits])
            if len(piece.tokens) < len(step.tokens):
                pieces[-1] = pieces[-1].clone()
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


_active: ContextVar[Run | None] = ContextVar("infer_opencl_recording", default=None)


@contextmanager
def scope(runtime: Runtime, num_tokens: int, num_logits: int = 0) -> Iterator[Run]:
    """Yield the run that an op's launches go to. An eager run executes at the end."""
    if (recording := _active.get()) is not None:
        yield recording
        return
    run = Run(runtime, num_tokens, num_logits)
    yield run
    run.execute()
