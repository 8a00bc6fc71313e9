"""Memory that a model needs on a device, by each backend's own rules: arithmetic on headers, without torch."""

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
    """Sizes of a step: up to `tokens` tokens and `logits` lines of logits, for rows of up to `context` tokens."""

    context: int
    tokens: int
    logits: int
    precision: str  # of the activations: exact or fast
    num_threads: int


@runtime_checkable
class MemoryRules(Protocol):
    def matrix_bytes(self, type: str, rows: int, columns: int) -> int:
        """Return the bytes of a matrix of a GGML type in the kernels' form."""

    def step_bytes(
        self, architecture: Architecture, types: Mapping[str, str], sizes: StepSizes, num_logits: int
    ) -> int:
        """Return the bytes of a recorded step's buffers if `num_logits` lines of logits are used.

        `types` are the loaded matrices' types, by name.
        """


def memory_rules(device: str = "cpu") -> MemoryRules:
    return cast(MemoryRules, import_module(_MODULE_BY_DEVICE[device]))
