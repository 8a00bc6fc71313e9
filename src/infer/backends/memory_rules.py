"""What a model takes in a device's memory, by each backend's own rules: arithmetic on headers, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast, final, runtime_checkable

from infer.operands.architecture import Architecture

# Each module is a `MemoryRules`. A device with other kernels has a line of its own.
_MODULE_BY_DEVICE = {"cpu": "infer.backends.cpu.workspace", "cuda": "infer.backends.gpu_memory"}


@final
@dataclass(frozen=True)
class StepSizes:
    """A step of up to `tokens` tokens and `logits` lines of logits, of rows of up to `context` tokens."""

    context: int
    tokens: int
    logits: int
    precision: str  # of the activations: exact or fast
    num_threads: int


@runtime_checkable
class MemoryRules(Protocol):
    def matrix_bytes(self, type: str, rows: int, columns: int) -> int:
        """A matrix of a GGML type as the kernels hold it."""

    def step_bytes(
        self, architecture: Architecture, types: Mapping[str, str], sizes: StepSizes, num_logits: int
    ) -> int:
        """The buffers of a step that is recorded, of which `num_logits` lines of logits are used.

        `types` are those of the loaded matrices, by name.
        """


def memory_rules(device: str = "cpu") -> MemoryRules:
    return cast(MemoryRules, import_module(_MODULE_BY_DEVICE[device]))
