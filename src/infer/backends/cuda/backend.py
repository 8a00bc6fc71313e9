"""CUDA: kernels in Triton where there are some, plain torch for the rest."""

from types import ModuleType
from typing import final

import torch

from infer.backends import cuda
from infer.backends.torch_backend import TorchBackend


@final
class CudaBackend(TorchBackend):
    @property
    def kernels(self) -> ModuleType:
        return cuda


def make(device: torch.device) -> CudaBackend:
    return CudaBackend(device)
