"""An OpenCL device whose memory is the host's: kernels in C, a step recorded as a list of launches."""

from contextlib import AbstractContextManager
from typing import final

import torch

from infer.backends import torch_threads
from infer.backends.base import Captured, Forward
from infer.backends.opencl.capture import CapturedForward
from infer.backends.opencl.devices import choose
from infer.backends.opencl.operations import Operations
from infer.backends.opencl.runtime import Runtime
from infer.backends.torch_backend import TorchBackend


@final
class OpenCLBackend(TorchBackend):
    def __init__(self, device: torch.device, name: str) -> None:
        """`name` is a part of the OpenCL device's; tensors lie on `device`, the CPU."""
        super().__init__(device)
        self._runtime = Runtime(choose(name))
        self._operations = Operations(self._runtime)

    @property
    def kernels(self) -> Operations:
        return self._operations

    def description(self) -> str:
        device = self._runtime.device
        return f"{self._runtime.name}, {device.max_compute_units} compute units, {device.version.strip()}"

    @property
    def computes_on_host(self) -> bool:
        """In the host's memory at least."""
        return True

    def capture(self, forward: Forward, capacity: int, max_logits: int) -> Captured:
        return CapturedForward(self._runtime, forward, capacity, max_logits)

    def num_threads(self) -> int:
        return int(self._runtime.device.max_compute_units)

    def threads(self) -> AbstractContextManager[None]:
        return torch_threads.one_thread()


def make(device: torch.device, name: str = "") -> OpenCLBackend:
    return OpenCLBackend(device, name)
