"""CUDA: kernels in Triton, steps as CUDA graphs. On CPU tensors, Triton interprets kernels, and graphs are repeats."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import final

import torch

from infer.compute.backends import cuda
from infer.compute.backends.base import Captured, Forward
from infer.compute.backends.cuda.capture import CapturedForward
from infer.compute.backends.cuda.graphs import CudaGraphs, Repeats
from infer.compute.backends.torch_backend import KV_TYPE_BY_DTYPE, TorchBackend
from infer.compute.operands.architecture import Layer, ModelOutline, check_unusual_parts
from infer.compute.operands.limits import GPU_STEP, StepLimits

_COMPUTED_PARTS = frozenset(  # of `unusual_parts`
    {
        "LayerNorm",
        "attention in chunks",
        "attention in parallel to the MLP",
        "attention sinks",
        "experts",
        "feed-forwards without a gate",
        "gated delta nets",
        "layers with a scale",
        "norms of q and k after their rotation",
        "norms of q and k that subtract the mean",
        "norms of values",
        "output gates",
        "per-layer inputs",
        "scaled queries",
        "shared keys",
        "short convolutions",
        "xIELU",
    }
)


@final
class CudaBackend(TorchBackend):
    @property
    def kernels(self) -> ModuleType:
        return cuda

    def kernel_kind(self, outline: ModelOutline) -> str:
        return "cuda"

    @property
    def reads_files(self) -> bool:
        """Return False: a recorded step has no work of the host."""
        return False

    @property
    def step_limits(self) -> StepLimits:
        return GPU_STEP

    def activation_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """Return float32: the residual stream is tiny compared with the weights."""
        return torch.float32

    def kv_type(self, dtype: torch.dtype | None, stored: str = "F32") -> str:
        """Return a 16-bit type, which costs a mean KL of less than 1e-6, unless a dtype is requested for everything.

        A model in BF16 may have keys above 65,504, which are infinite in f16. Its type is bf16.
        """
        if dtype is not None:
            return KV_TYPE_BY_DTYPE[dtype]
        return "bf16" if stored == "BF16" else "f16"

    def check_layers(self, layers: Iterable[Layer]) -> None:
        check_unusual_parts(layers, "cuda", _COMPUTED_PARTS)

    def capture(self, forward: Forward, capacity: int, max_logits: int) -> Captured:
        graphs = Repeats() if self.computes_on_host else CudaGraphs(self.device)
        return CapturedForward(forward, capacity, max_logits, self.device, graphs)

    def threads(self) -> AbstractContextManager[None]:
        """Make the device the current one, because Triton launches on the current device."""
        return nullcontext() if self.computes_on_host else torch.cuda.device(self.device)


def make(device: torch.device) -> CudaBackend:
    """Return the backend of a GPU, the first one if it has no number: torch's pools of memory need one."""
    return CudaBackend(torch.device("cuda", device.index or 0) if device.type == "cuda" else device)
