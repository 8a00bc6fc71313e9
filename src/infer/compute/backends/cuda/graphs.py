"""Recording and replay of work on a device: as CUDA graphs, or on CPU tensors by repeating the work."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple, Protocol, Self, final

import torch
from torch import Tensor


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
    """CUDA graphs that share one memory pool: they run one after the other, and results are kept."""

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
