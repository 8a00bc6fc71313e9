"""An OpenCL device: kernels in C, a step recorded as a list of launches, the host's tensors placed on the device."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import final

import torch
from torch import Tensor

from infer.compute.backends import reference
from infer.compute.backends.base import Forward, Recorded
from infer.compute.backends.opencl.devices import choose
from infer.compute.backends.opencl.launches import RecordedForward
from infer.compute.backends.opencl.operations import Operations
from infer.compute.backends.opencl.runtime import Runtime
from infer.compute.backends.opencl.stored_types import check_kv_type
from infer.compute.backends.torch_backend import TorchBackend
from infer.compute.operands.architecture import Layer, ModelOutline, check_unusual_parts
from infer.compute.operands.weights import Norm, Projection, StoredWeight
from infer.errors import InvalidRequestError
from infer.system import torch_threads

_FEATURES, _ROWS, _TOKENS, _BLOCK, _SCALE = 64, 64, 2, 32, 2.0**-7  # of the known product
_TOLERANCE = 1e-3  # of the largest value; activations in int16 take a thirtieth of this


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

    def kernel_kind(self, outline: ModelOutline) -> str:
        """Return "opencl", not the CPU's kind, because equal bits are tested only on two runtimes."""
        return "opencl"

    def description(self) -> str:
        device = self._runtime.device
        return f"{self._runtime.name}, {device.max_compute_units} compute units, {device.version.strip()}"

    @property
    def memory_rules(self) -> str:
        return "opencl"

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

    def check_layers(self, layers: Iterable[Layer]) -> None:
        check_unusual_parts(layers, "opencl")

    def check_kv_type(self, kv_type: str) -> None:
        check_kv_type(kv_type)

    def capture(self, forward: Forward, capacity: int, max_logits: int) -> Recorded:
        return RecordedForward(self._runtime, forward, capacity, max_logits)

    def num_threads(self) -> int:
        return int(self._runtime.device.max_compute_units)

    def threads(self) -> AbstractContextManager[None]:
        return torch_threads.one_thread()


def make(device: torch.device, name: str = "") -> OpenCLBackend:
    return OpenCLBackend(device, name)


def check_known_product(runtime: Runtime, operations: Operations) -> None:
    """Compute a norm, a product with Q8_0 weights and a SiLU gate, and compare with plain torch on the host.

    A driver with wrong arithmetic would give wrong tokens. Raises InvalidRequestError if the device gives other values,
    or cannot build the kernels.
    """
    stored, norm, x = _known_inputs()
    prepared = operations.prepare(stored, torch.device("cpu"))
    found = operations.norm_gate(x, norm, prepared, "silu").floats
    expected = reference.norm_gate(x, norm, stored, "silu").floats
    difference = float(((found - expected).abs().amax() / expected.abs().amax()).nan_to_num(nan=torch.inf))
    if difference > _TOLERANCE:
        raise InvalidRequestError(
            f"device opencl: {runtime.name} computes a known product wrongly (off by {difference:.1%}), so its tokens "
            "would be wrong: update its driver, use another device (infer models -v lists them), or use --device cpu"
        )


def _known_inputs() -> tuple[Projection, Norm, Tensor]:
    """Return gate and up, a norm, and activations: the same values each time, without a random generator."""
    codes = (torch.arange(2 * _ROWS * _FEATURES) * 37 % 255 - 127).to(torch.int8).view(-1, _BLOCK)
    scales = torch.full((len(codes), 1), _SCALE, dtype=torch.float16).view(torch.uint8)
    blocks = torch.cat([scales, codes.view(torch.uint8)], dim=1).view(2 * _ROWS, -1)
    gate_up = Projection((StoredWeight("Q8_0", (2 * _ROWS, _FEATURES), blocks),))
    x = (torch.arange(_TOKENS * _FEATURES) * 29 % 61 - 30).float().view(_TOKENS, _FEATURES)
    return gate_up, Norm(torch.linspace(0.5, 1.5, _FEATURES), 1e-5), x
