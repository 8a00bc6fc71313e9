"""Targets of an op's launches: the active recording, or the queue immediately.

A run has buffers that its launches share. An eager run has fresh buffers, and the op's own tensors. A recording has one
buffer per role and size, and slots of a fixed capacity for the step's arrays. So one builder serves both.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np
import pyopencl as cl
import torch
from torch import Tensor

from infer.compute.backends import host_memory
from infer.compute.backends.opencl.memory import Placed
from infer.compute.backends.opencl.runtime import Runtime
from infer.compute.operands.step import Step

Axis = Literal["tokens", "logits", "once"]
_NO_MACROS: Mapping[str, Any] = {}


@final
@dataclass
class Launch:
    """A kernel with its arguments, in one variant per number of tokens that a work item takes."""

    variants: tuple[tuple[int, cl.Kernel], ...]
    width: int  # work items for each token, or for so many
    axis: Axis
    kernel: cl.Kernel | None = None  # the variant for the step's counts, its work items and those of a work group
    items: tuple[int, int] = (0, 0)
    group: tuple[int, int] | None = None

    def set(self, index: int, value: Any) -> None:
        for _, kernel in self.variants:
            kernel.set_arg(index, value)

    def fit(self, count: int, runtime: Runtime) -> None:
        """Choose the variant and the work items for `count` tokens or logits."""
        tokens, self.kernel = next((each for each in self.variants if each[0] >= count), self.variants[-1])
        self.items = self.width, -(-count // tokens)
        self.group = runtime.group_size(*self.items)


class Run:
    """Launches that run in order, for up to `capacity` tokens and `max_logits` logits."""

    def __init__(self, runtime: Runtime, capacity: int, max_logits: int) -> None:
        self.runtime, self.capacity, self.max_logits = runtime, capacity, max_logits
        self.launches: list[Launch] = []
        self.most: dict[Axis, int] = {"tokens": capacity, "logits": max_logits}
        self.counts = {
            axis: torch.tensor([most], dtype=torch.int32) for axis, most in self.most.items()
        }  # of this step
        self._fitted: tuple[int, ...] = ()  # to so many tokens and logits, so many launches
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
        macros: Mapping[str, Any] = _NO_MACROS,
        *,
        axis: Axis = "tokens",
        tokens: tuple[int, ...] = (),
    ) -> Launch:
        """Append a kernel of `width` work items per token; a variant for each of `tokens` if an item takes several.

        A tensor is passed as its buffer, whole numbers as int, floats as float, None as a null pointer.
        """
        variants = [(count, {**macros, "TOKENS": count}) for count in tokens] or [(1, {**macros})]
        kernels = tuple((count, self.runtime.kernel(source, name, defined)) for count, defined in variants)
        launch = Launch(kernels, width, axis)
        for index, argument in enumerate(arguments):
            launch.set(index, self._argument(argument))
        self.launches.append(launch)
        return launch

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self.buffer(argument)
        if isinstance(argument, int):
            return np.int32(argument)
        return np.float32(argument) if isinstance(argument, float) else argument

    def buffer(self, tensor: Tensor, *, is_constant: bool = False) -> cl.Buffer:
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
        return None if tensor is None else self.buffer(tensor, is_constant=True)

    def offer(self, role: str, launch: Launch, index: int) -> "Offer | None":
        """Return the offer of a launch that writes the buffer of this role; None if it runs before the next op.

        Argument `index` of its kernel is the buffer of quantised records, and the next one their number of planes.
        """
        return None

    def execute(self) -> None:
        """Run all launches, and make what they have written visible to the host."""
        self.begin(self.capacity, self.max_logits)
        self.enqueue(self.launches)
        for tensor in self._of_host:
            self.runtime.memory.to_host(tensor)
        self.runtime.memory.finish()

    def begin(self, num_tokens: int, num_logits: int) -> None:
        """Fit the launches to these counts, and make the host's writes visible to the device."""
        if self._fitted != (num_tokens, num_logits, len(self.launches)):
            self._fitted = num_tokens, num_logits, len(self.launches)
            counts: dict[Axis, int] = {"tokens": num_tokens, "logits": num_logits, "once": 1}
            for axis, count in self.counts.items():
                count[0] = counts[axis]
            for launch in self.launches:
                launch.fit(counts[launch.axis], self.runtime)
        for tensor in self._of_host:
            self.runtime.memory.to_device(tensor)

    def enqueue(self, launches: Iterable[Launch]) -> None:
        queue = self.runtime.queue
        for launch in launches:
            if launch.items[1]:
                cl.enqueue_nd_range_kernel(queue, launch.kernel, launch.items, launch.group)


@final
class Recording(Run):
    """One step being recorded. Hand `step` to `forward`: its arrays are the slots."""

    def __init__(self, runtime: Runtime, capacity: int, max_logits: int) -> None:
        super().__init__(runtime, capacity, max_logits)
        tokens, positions, rows = (host_memory.zeros((capacity,), torch.int64) for _ in range(3))
        self.step = Step(tokens, positions, rows, host_memory.zeros((max_logits,), torch.int64))
        self._workspace: dict[tuple[Any, ...], Tensor] = {}

    def tensor(self, role: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        key = (role, shape, dtype)
        if key not in self._workspace:
            self._workspace[key] = self.runtime.memory.zeros(shape, dtype)
        return self._workspace[key]

    def offer(self, role: str, launch: Launch, index: int) -> "Offer":
        return Offer(self, role, launch, index)


@final
@dataclass(frozen=True)
class Offer:
    """A recorded launch's offer to write quantised records instead of floats: the twin of the activations it makes."""

    recording: Recording
    role: str  # of the buffer of floats
    launch: Launch
    index: int

    def redeem(self, planes: int, size: int) -> Tensor:
        """Return the records, `size` int32 per token, which the launch will write."""
        capacity = self.recording.capacity
        records = self.recording.tensor(f"quantized {self.role}", capacity, size, dtype=torch.int32)
        self.launch.set(self.index, self.recording.buffer(records))
        self.launch.set(self.index + 1, np.int32(planes))
        return records


_active: ContextVar[Recording | None] = ContextVar("infer_opencl_recording", default=None)


@contextmanager
def record(runtime: Runtime, capacity: int, max_logits: int) -> Iterator[Recording]:
    """Append the ops called inside to the recording instead of running them."""
    recording = Recording(runtime, capacity, max_logits)
    token = _active.set(recording)
    try:
        yield recording
    finally:
        _active.reset(token)


@contextmanager
def scope(runtime: Runtime, num_tokens: int, num_logits: int = 0) -> Iterator[Run]:
    """Yield the run that an op's launches go to. An eager run executes at the end."""
    if (recording := _active.get()) is not None:
        yield recording
        return
    run = Run(runtime, num_tokens, num_logits)
    yield run
    run.execute()
