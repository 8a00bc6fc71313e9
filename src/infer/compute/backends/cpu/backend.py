"""The CPU: compiled kernels, one thread pool per process, a step recorded as a table of commands.

The modules that compile and that record are imported when they are first needed.
"""

import mmap
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from types import ModuleType
from typing import final

import numpy as np
import numpy.typing as npt
import torch

from infer.compute.backends.base import Captured, ExpertStore, Forward, KernelStore, Stage, Stages
from infer.compute.backends.cpu import isa, operations
from infer.compute.backends.cpu.compile import addresses
from infer.compute.backends.cpu.compile.kernel import Kernel
from infer.compute.backends.cpu.delta_net.commands import check_net
from infer.compute.backends.cpu.experts.pool_plan import plan_pools
from infer.compute.backends.cpu.host import kernel_cache, shipped_kernels
from infer.compute.backends.cpu.needed_kernels import kernel_kind, needed_kernels
from infer.compute.backends.cpu.ranks.memory_group import MemoryGroup
from infer.compute.backends.cpu.threads import pool
from infer.compute.backends.torch_backend import TorchBackend
from infer.compute.operands.architecture import Layer, ModelOutline
from infer.compute.operands.mixers import GatedDeltaNet
from infer.system import torch_threads
from infer.system.cores import default_num_threads


@final
class CpuBackend(TorchBackend):
    @property
    def kernels(self) -> ModuleType:
        return operations

    def kernel_kind(self, outline: ModelOutline) -> str:
        return kernel_kind(outline)

    def check_layers(self, layers: Iterable[Layer]) -> None:
        for layer in layers:
            if isinstance(layer.mixer, GatedDeltaNet):
                check_net(layer.mixer)

    def open_experts(
        self, outline: ModelOutline, most_bytes: int, name: str, made_of: str, check_unchanged: Callable[[], None]
    ) -> ExpertStore | None:
        plans = plan_pools(outline.architecture, outline.types, most_bytes)
        if not plans:
            return None
        store: ExpertStore = import_module("infer.compute.backends.cpu.experts.expert_store").CpuExpertStore(
            plans, name, made_of, outline.precision, check_unchanged
        )
        return store

    def description(self) -> str:
        used = isa.instruction_set()
        others = [other.name for other in isa.usable_instruction_sets() if other != used]
        also = f" (also {', '.join(others)})" if others else ""
        return f"{used.name}{also}, {default_num_threads()} threads; kernels {self.kernel_source()}"

    def kernel_source(self) -> str:
        trouble = kernel_cache.trouble()
        compiled = f"compiled here, {f'not kept: {trouble}' if trouble else f'kept in {kernel_cache.cache_folder()}'}"
        count = shipped_kernels.num_kernels()
        return f"{count} from the wheel, in {shipped_kernels.folder()}; others {compiled}" if count else compiled

    def instruction_set(self) -> str:
        return isa.instruction_set().name

    def capture(self, forward: Forward, capacity: int, max_logits: int) -> Captured:
        captured: Captured = import_module("infer.compute.backends.cpu.capture.forward").CapturedForward(
            forward, capacity, max_logits
        )
        return captured

    def make_stages(self, stages: Sequence[Stage], capacity: int, *, capture: bool) -> Stages:
        if not capture:
            return super().make_stages(stages, capacity, capture=False)
        captured: Stages = import_module("infer.compute.backends.cpu.capture.forward").CapturedStages(stages, capacity)
        return captured

    def make_group(self, rank: int, size: int, memory: mmap.mmap) -> MemoryGroup:
        return MemoryGroup(rank, size, memory)

    def num_threads(self) -> int:
        return pool.thread_pool().num_threads

    def threads(self) -> AbstractContextManager[None]:
        """Give torch one thread, in the calling thread only.

        torch's threads and our pool's spin against each other, which costs tens of milliseconds per token.
        """
        return torch_threads.one_thread()

    def forbid_forwards(self) -> None:
        pool.forbid_runs()

    def publisher(self, flag: npt.NDArray[np.int64]) -> Callable[[], None]:
        return pool.publisher(flag)

    def compiling(self, models: Iterable[ModelOutline]) -> AbstractContextManager[None]:
        return addresses.compiling(_needed(models))

    def kernel_store(self, models: Iterable[ModelOutline]) -> KernelStore:
        kernels = _needed(models)
        labels = [kernel.label for kernel in addresses.missing_kernels(kernels)]
        kept_in, trouble = kernel_cache.cache_folder(), kernel_cache.trouble()
        if all(shipped_kernels.is_kept(kernel.file_name) for kernel in kernels):
            kept_in = shipped_kernels.folder()
        return KernelStore(isa.instruction_set().name, labels, len(set(kernels)), kept_in, trouble)


def _needed(models: Iterable[ModelOutline]) -> list[Kernel]:
    return [kernel for model in models for kernel in needed_kernels(model, isa.instruction_set())]


def make(device: torch.device) -> CpuBackend:
    return CpuBackend(device)
