"""The smallest device of a third party: plain torch under other names, which counts calls of its kernels."""

from collections import Counter
from types import ModuleType
from typing import Any, final

import torch

from infer.compute.backends import reference
from infer.compute.backends.torch_backend import TorchBackend

NUM_CALLS = Counter[str]()


class CountingKernels(ModuleType):
    def __getattr__(self, name: str) -> Any:
        NUM_CALLS[name] += 1
        return getattr(reference, name)


@final
class FakeBackend(TorchBackend):
    @property
    def kernels(self) -> ModuleType:
        return CountingKernels("fake")

    @property
    def computes_on_host(self) -> bool:
        return True

    def num_threads(self) -> int:
        return 1


def make(device: torch.device) -> FakeBackend:
    return FakeBackend(device)
