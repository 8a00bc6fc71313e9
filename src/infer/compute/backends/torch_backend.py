"""Plain torch on any device that torch supports: `reference` for every op, nothing captured."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from infer.compute.backends import gpus, host_memory, reference
from infer.compute.backends.base import Backend
from infer.compute.operands.architecture import ModelOutline

KV_TYPE_BY_DTYPE = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


class TorchBackend(Backend):
    """Plain torch on a device, and the base of the other backends."""

    @property
    def kernels(self) -> Any:
        return reference

    def kernel_kind(self, outline: ModelOutline) -> str:
        return f"torch {self.device.type}"

    def description(self) -> str:
        if self.computes_on_host:
            return "plain torch"
        return str(gpus.visible_gpus()[self.device.index or 0])

    @property
    def computes_on_host(self) -> bool:
        return self.device.type == "cpu"

    def activation_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        return torch.float32 if self.computes_on_host else dtype or torch.bfloat16

    def kv_type(self, dtype: torch.dtype | None, stored: str = "F32") -> str:
        """Return the default storage type of keys and values.

        On a CPU it is f16, which costs a mean KL of less than 1e-6, unless float32 is requested for everything.
        """
        if self.computes_on_host and dtype is None:
            return "f16"
        return KV_TYPE_BY_DTYPE[self.activation_dtype(dtype)]

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self.computes_on_host:
            return host_memory.zeros(shape, dtype)
        return torch.zeros(tuple(shape), dtype=dtype, device=self.device)

    def available_bytes(self) -> int | None:
        return super().available_bytes() if self.computes_on_host else gpus.free_bytes(self.device)

    def begin_gpu_peak(self) -> int | None:
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def peak_gpu_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None

    def give_back(self, memory: Tensor, first: int, count: int) -> None:
        if self.computes_on_host:
            host_memory.give_back(memory, first, count)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def make(device: torch.device) -> TorchBackend:
    return TorchBackend(device)
