"""An OpenCL device: kernels in C, a step recorded as a list of launches, the host's tensors placed on the device."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import final

import torch
from torch import Tensor

from infer.backends import torch_threads
from infer.backends.base import Captured, Forward
from infer.backends.opencl.capture import CapturedForward
from infer.backends.opencl.devices import choose
from infer.backends.opencl.known_product import check_known_product
from infer.backends.opencl.operations import Operations
from infer.backends.opencl.runtime import Runtime
from infer.backends.torch_backend import TorchBackend


@final
class OpenCLBackend(TorchBackend):
    def __init__(self, device: torch.device, name: str) -> None:
        """Open the device that `name`, a part of its platform's name or its own, chooses. Tensors are on `device`, the
        CPU.
        """
        super().__init__(device)
        self._runtime = Runtime(choose(name))
        self._memory = self._runtime.memory
        self._operations = Operations(self._runtime)
        check_known_product(self._runtime, self._operations)

    @property
    def kernels(self) -> Operations:
        return self._operations

    def description(self) -> str:
        device = self._runtime.device
        return f"{self._runtime.name}, {device.max_compute_units} compute units, {device.version.strip()}"

    @property
    def computes_on_host(self) -> bool:
        """True, because the base class then chooses the host's dtypes."""
        return True

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._memory.zeros(shape, dtype)

    def available_bytes(self) -> int | None:
        return super().available_bytes() if self._memory.is_shared else self._memory.available_bytes()

    def to_host(self, memory: Tensor, entries: Sequence[int]) -> None:
        for entry in entries:
            self._memory.to_host(memory, entry, 1)
        self._memory.finish()

    def to_device(self, memory: Tensor, entries: Sequence[int]) -> None:
        for entry in entries:
            self._memory.to_device(memory, entry, 1)
        self._memory.finish()

    def capture(self, forward: Forward, capacity: int, max_logits: int) -> Captured:
        return CapturedForward(self._runtime, forward, capacity, max_logits)

    def num_threads(self) -> int:
        return int(self._runtime.device.max_compute_units)

    def threads(self) -> AbstractContextManager[None]:
        return torch_threads.one_thread()


def make(device: torch.device, name: str = "") -> OpenCLBackend:
    return OpenCLBackend(device, name)
