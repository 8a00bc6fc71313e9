"""CUDA: kernels in Triton where there are some, plain torch for the rest."""

from types import ModuleType
from typing import final

import torch

from infer.backends import cuda
from infer.backends.torch_backend import KV_TYPE_BY_DTYPE, TorchBackend


@final
class CudaBackend(TorchBackend):
    @property
    def kernels(self) -> ModuleType:
        return cuda

    def activation_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """The residual stream is nothing beside the weights: whole."""
        return torch.float32

    def kv_type(self, dtype: torch.dtype | None) -> str:
        """In 16 bits, which cost a mean KL of less than 1e-6, but whole where all is asked for in float32."""
        return "f16" if dtype is None else KV_TYPE_BY_DTYPE[dtype]


def make(device: torch.device) -> CudaBackend:
    return CudaBackend(device)
