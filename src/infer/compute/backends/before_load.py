"""Facts of a backend before torch is loaded: limits of a step, memory that a model needs, its kernels.

The last two use a model's headers only.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast, final, runtime_checkable

from infer.compute.operands.architecture import Architecture, ModelOutline
from infer.compute.operands.limits import GPU_STEP, HOST_STEP, StepLimits

# Each module is a `MemoryRules`. A device with other kernels has a line of its own.
_MEMORY_RULES = {"cpu": "infer.compute.backends.cpu.workspace", "cuda": "infer.compute.backends.gpu_memory"}
_MEMORY_RULES |= {"opencl": "infer.compute.backends.opencl.stored_types"}
_STEP_LIMITS = {"cuda": GPU_STEP, "auto": GPU_STEP}  # `Backend.step_limits`, if they are not HOST_STEP
_KERNELS = {"cpu": "infer.compute.backends.cpu.needed_kernels"}  # has `begin_compiling` and `kernel_kind`


@final
@dataclass(frozen=True)
class StepSizes:
    """Sizes of a step: up to `tokens` tokens and `logits` lines of logits, for rows of up to `context` tokens."""

    context: int
    tokens: int
    logits: int
    precision: str  # of the activations: exact or fast
    num_threads: int


@runtime_checkable
class MemoryRules(Protocol):
    IS_TAKEN_AT_ONCE: bool  # True if memory is taken when it is allocated, not when it is first written

    def stored_type(self, type: str) -> str:
        """Return the type in which the device stores a matrix of a GGML type."""

    def matrix_bytes(self, type: str, rows: int, columns: int) -> int:
        """Return the bytes of a matrix of a GGML type in the kernels' form."""

    def table_bytes(self, type: str, rows: int, columns: int) -> int:
        """Return the bytes of a table of which a step reads some rows; 0 if it stays in its file."""

    def expert_store_bytes(self, architecture: Architecture, types: Mapping[str, str], most_bytes: int) -> int:
        """Return the memory of experts that are read from a file, of which `most_bytes` may be in memory.

        Raises InvalidRequestError if that is too little, or if the kernels need all experts in memory.
        """

    def workspace_bytes(
        self, architecture: Architecture, types: Mapping[str, str], sizes: StepSizes, num_logits: int
    ) -> tuple[int, int]:
        """Return the bytes of the buffers that grow with the tokens of a step, and of all other buffers of steps.

        `num_logits` lines of logits are used. `types` are the loaded matrices' types, by name. They are not read where
        memory is taken at once.
        """


def step_limits(device: str) -> StepLimits:
    """Return the limits of a step on a device, with or without an index. For "auto", return the largest limits."""
    return _STEP_LIMITS.get(device.partition(":")[0], HOST_STEP)


def memory_rules(device: str = "cpu") -> MemoryRules:
    return cast(MemoryRules, import_module(_MEMORY_RULES[device]))


def begin_compiling(device: str, make_outline: Callable[[], ModelOutline]) -> AbstractContextManager[None]:
    """Compile a model's kernels while its load runs in the context, if the device stores kernels and has none yet."""
    if device not in _KERNELS:
        return nullcontext()
    begun: AbstractContextManager[None] = import_module(_KERNELS[device]).begin_compiling(make_outline)
    return begun


def kernel_kind(device: str, outline: ModelOutline) -> str:
    """Return the name of a model's kernels, as `Backend.kernel_kind`, or that of the device."""
    return device if device not in _KERNELS else str(import_module(_KERNELS[device]).kernel_kind(outline))
