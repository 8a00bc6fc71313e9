"""Recording and replay of work on a device: as CUDA graphs, or on CPU tensors by repeating the work.

Recordings read a step's numbers on the device. Their mirror on the host is copied once per step.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, Self, final

import torch
from torch import Tensor

from infer.compute.operands.step import Step


class Recording(NamedTuple):
    """Work that can be repeated, and the tensor that always receives its result."""

    replay: Callable[[], object]
    result: Tensor


class Event(Protocol):
    """A moment in the order of the device's work."""

    def record(self) -> None:
        """Set the moment to now: after all work submitted to the device so far."""

    def synchronize(self) -> None:
        """Wait until the moment has passed."""

    def seconds_since(self, earlier: Self) -> float:
        """Return the device's time between two moments that have passed."""


class Graphs(ABC):
    """Recordings on a device. With `records_ahead`, kernels are compiled, so some are made before the first request."""

    records_ahead = True

    @abstractmethod
    def record(self, work: Callable[[], Tensor]) -> Recording:
        """Record the work. It runs once before, which must have no lasting effect."""

    @abstractmethod
    def mirror(self, size: int) -> Tensor:
        """Return int64 zeros on the host that can be copied without a wait."""

    @abstractmethod
    def event(self) -> Event: ...

    def submit(self, work: Callable[[], object]) -> None:
        """Let the device do the work after all that was submitted before."""
        work()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy between the device and a mirror, in the order of the device's work and without a wait."""
        self.submit(lambda: target.copy_(source, non_blocking=True))

    @abstractmethod
    def on_device(self) -> AbstractContextManager[None]:
        """Return a context manager to enter around work and replays."""


@final
class CudaGraphs(Graphs):
    """CUDA graphs that share one memory pool. So they must run one after the other. Their results stay in the pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with self.on_device():
            self._pool = torch.cuda.MemPool()
        self._pool_id: Any = self._pool.id
        self._side = torch.cuda.Stream(device)  # a capture wants another stream than the default one

    def record(self, work: Callable[[], Tensor]) -> Recording:
        here, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        self._side.wait_stream(here)
        with torch.cuda.stream(self._side):
            with torch.cuda.use_mem_pool(self._pool, self._device):  # so that the capture reuses the memory
                work()  # compiles kernels, which a capture forbids
            graph.capture_begin(self._pool_id, "thread_local")
            try:
                result = work()
            except BaseException:
                with suppress(RuntimeError):  # "capture invalidated" would hide the cause
                    graph.capture_end()
                raise
            graph.capture_end()
        here.wait_stream(self._side)
        return Recording(graph.replay, result)

    def mirror(self, size: int) -> Tensor:
        with self.on_device():  # pinning opens a context on the current device
            return torch.zeros(size, dtype=torch.int64, pin_memory=True)

    def event(self) -> Event:
        return _CudaEvent(torch.cuda.Event(enable_timing=True))

    def on_device(self) -> AbstractContextManager[None]:
        return torch.cuda.device(self._device)


@final
class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event
        self.record, self.synchronize = event.record, event.synchronize

    def seconds_since(self, earlier: Self) -> float:
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1000


@final
class Repeats(Graphs):
    """Recordings without a device: Triton interprets, and a replay repeats the work."""

    records_ahead = False  # nothing is compiled

    def record(self, work: Callable[[], Tensor]) -> Recording:
        result = work()
        return Recording(lambda: result.copy_(work()), result)

    def mirror(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64)

    def event(self) -> Event:
        return _Now()

    def on_device(self) -> AbstractContextManager[None]:
        return nullcontext()


@final
class _Now:
    def __init__(self) -> None:
        self._seconds = 0.0

    def record(self) -> None:
        self._seconds = time.perf_counter()

    def synchronize(self) -> None:
        return

    def seconds_since(self, earlier: Self) -> float:
        return self._seconds - earlier._seconds


NONE = -1  # the id and the row of a token that is none, and the index of its logits


@final
class StepInputs:
    """Tokens, positions, rows and logit indices, one after the other, each as long as the step's bucket."""

    def __init__(self, capacity: int, max_logits: int, device: torch.device, graphs: Graphs) -> None:
        size = _parts(capacity, max_logits)[-1].stop
        self._graphs, self._mirror, self._copied = graphs, graphs.mirror(size), graphs.event()
        self._capacity = capacity
        self._words, self._device = self._mirror.numpy(), torch.zeros(size, dtype=torch.int64, device=device)

    @property
    def tokens(self) -> Tensor:
        """Memory that every step's tokens begin in. The numbers after the tokens are −1 or more."""
        return self._device[: self._capacity]

    def step(self, num_tokens: int, num_logits: int) -> Step:
        """Return the step that a recording reads. `fill` changes its contents."""
        return Step(*(self._device[part] for part in _parts(num_tokens, num_logits)), is_recorded=True)

    def fill(self, step: Step, num_tokens: int, num_logits: int) -> None:
        """Copy a step of at most this many tokens and logits to the device. The rest is padding."""
        self._copied.synchronize()  # what was copied last: the mirror is free
        values = (step.tokens, step.positions, step.rows, step.logit_indices)
        for part, mine, rest in zip(_parts(num_tokens, num_logits), values, (NONE, 0, NONE, NONE), strict=True):
            words = self._words[part]
            words[: len(mine)], words[len(mine) :] = mine.numpy(), rest
        size = _parts(num_tokens, num_logits)[-1].stop
        self._graphs.copy(self._device[:size], self._mirror[:size])
        self._copied.record()

    def clear(self, num_tokens: int, num_logits: int) -> None:
        """Fill the step with padding tokens only, so that it has no effect."""
        nothing = torch.zeros(0, dtype=torch.int64)
        self.fill(Step(nothing, nothing, nothing, nothing), num_tokens, num_logits)


def _parts(num_tokens: int, num_logits: int) -> list[slice]:
    return aligned_parts([num_tokens] * 3 + [num_logits])


def aligned_parts(sizes: Sequence[int]) -> list[slice]:
    """Return slices of an int64 tensor. Each begins at a multiple of 16 bytes, else Triton compiles a kernel again."""
    starts = accumulate((size + size % 2 for size in sizes), initial=0)
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
