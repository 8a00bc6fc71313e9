"""The interface of a backend: everything that differs by device.

Above `ops`, no module names a device's kernels, threads or captures.
"""

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from infer.compute.operands.architecture import Layer, ModelOutline
from infer.compute.operands.group import Group
from infer.compute.operands.limits import HOST_STEP, StepLimits
from infer.compute.operands.step import Chunk, Interrupt, Masks, Step, StepEnd
from infer.compute.operands.weights import ExpertFrames, Weight
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.history import History
from infer.errors import InvalidRequestError
from infer.outputs import TokenLogprob
from infer.system.available_memory import available_memory_bytes

Precision = Literal["exact", "fast"]
Forward = Callable[[Step], Tensor]
Stage = Callable[[Tensor | None, Step], Tensor]  # (residual stream before it, None for the first; step) → after it


class Generated(NamedTuple):
    """Tokens sampled after each chunk, the time at which each step ended, and log-probabilities where a row asks for
    them.

    The last token of a row may be the code of its failure. For a step that verifies drafts, `ends` has one time per
    entry.
    """

    token_ids: list[list[int]]
    ends: list[StepEnd]
    logprobs: list[list[TokenLogprob]]


@final
class PendingStep:
    """A step that was launched. Until it has ended, another step may be launched behind it."""

    def __init__(self, generated: Generated | Callable[[], Generated], *, is_running: bool = False) -> None:
        """Take the tokens of a step that has ended, or the function that waits for them.

        With `is_running` the device runs the step.
        """
        self._generated, self.is_running = generated, is_running

    def wait(self) -> Generated:
        """Wait until the step has ended, and return its tokens. Another call returns them again."""
        if callable(self._generated):
            self._generated, self.is_running = self._generated(), False  # the function refers to memory
        return self._generated


@final
class SampledStep(NamedTuple):
    """A step after which tokens are sampled: chunks, and the position of the first token of each.

    Entry i of `columns` belongs to chunk i. `history` has seen the step's tokens, and sees those that are sampled.
    """

    chunks: Sequence[Chunk]
    starts: Sequence[int]
    columns: SamplingColumns
    history: History | None = None
    masks: Masks | None = None

    def check(self) -> None:
        """Raise InvalidRequestError if there is not one chunk per row."""
        if len(self.chunks) != len(self.columns):
            raise InvalidRequestError(
                f"a step takes a chunk for each of {len(self.columns)} rows, got {len(self.chunks)}"
            )

    def check_multi_step(self) -> None:
        """Raise InvalidRequestError if there is not one token per row."""
        is_single = all(len(chunk.token_ids) == chunk.num_logits == 1 for chunk in self.chunks)
        if len(self.chunks) != len(self.columns) or not is_single:
            raise InvalidRequestError(f"a multi-step takes one token with logits for each of {len(self.columns)} rows")


class Recorded(ABC):
    """A forward that was recorded once. Its results equal those of the same ops run one by one, to the bit."""

    @abstractmethod
    def run(self, step: Step) -> Float[Tensor, "logits vocab"]:
        """Return the requested logits, in a buffer that the next run may overwrite."""


class Stages(ABC):
    """A forward in stages, of which each may be run for many steps before the next."""

    @abstractmethod
    def run(self, first: int, end: int, x: Tensor | None, step: Step) -> Float[Tensor, "tokens hidden"]:
        """Run stages [first, end) for a step. x is the residual stream before them.

        Returns that after them, in a buffer that the next run may overwrite.
        """


class EagerStages(Stages):
    """Stages whose ops are run one by one."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages

    def run(self, first: int, end: int, x: Tensor | None, step: Step) -> Float[Tensor, "tokens hidden"]:
        x = None if x is None else x.clone()
        for stage in self._stages[first:end]:
            x = stage(x, step)
        assert x is not None
        return x


class Captured(Recorded):
    """A recorded forward that also samples, without a return to Python."""

    capacity: int  # tokens that one replay holds
    max_logits: int
    is_followed = False  # True if other ranks can `follow` it; otherwise rank 0 of a group samples after `run`

    def record_ahead(self, selections: Sequence[SamplingColumns]) -> int:
        """Record steps before the first request, so that no request waits for the compilation of kernels.

        Samplers are recorded for the stages of these selections. Return the number of steps, 0 if nothing is compiled.
        """
        return 0

    def record_next(self) -> bool:
        """Record one of the other sizes of steps, while no step runs. Return False if none is left.

        Call after `record_ahead`. So requests wait for fewer recordings.
        """
        return False

    def takes(self, step: SampledStep) -> bool:
        """Return True if the chunks fit one replay."""
        num_tokens = sum([len(chunk.token_ids) for chunk in step.chunks])
        return num_tokens <= self.capacity and sum([chunk.num_logits for chunk in step.chunks]) <= self.max_logits

    @abstractmethod
    def run_multi_step(
        self, step: SampledStep, count: int, stop_ids: Sequence[int] = (), interrupt: Interrupt | None = None
    ) -> Generated:
        """Run up to `count` steps without a return to Python, and sample after each of them.

        Each chunk has one token. Fewer steps run if every row met one of `stop_ids`, or if any thread sets `interrupt`.
        The last token may be a negative code, if a row failed. The masks are the first step's; `advance` of them sees
        each step.
        """

    @abstractmethod
    def launch(self, step: SampledStep, behind: PendingStep | None = None) -> PendingStep:
        """Run a step, and sample after each chunk with logits: its drafts while they are right, then one more token.

        If the device can run steps on its own, the step may still run when this returns. `behind` is the step launched
        last, if it still runs: a chunk may then be one id of `operands.step.sampled_after`. A recording whose steps
        have always ended when `launch` returns never gets `behind`.
        """

    def follow(self, chunks: Sequence[Chunk], starts: Sequence[int], count: int) -> int:
        """Run the steps that rank 0 of a group runs as a multi-step, and return their number. Rank 0 sends the sampled
        tokens.
        """
        raise InvalidRequestError("a group runs no multi-steps here")

    @abstractmethod
    def profile(self, step: Step) -> list[tuple[str, int]]:
        """Return each command's label and the cycles spent in it."""


class LoadedRecords(NamedTuple):
    """A layer's experts that are read from a file: their stacked matrices, and the frames that hold some of them."""

    gate: Weight
    up: Weight
    down: Weight
    frames: ExpertFrames


class ExpertStore(ABC):
    """A model's experts in a file of the user's cache, and memory for some of them."""

    @abstractmethod
    def loading(self) -> AbstractContextManager[None]:
        """Return the context in which all layers are loaded. At its end, the file is complete.

        Raises ModelError if the file cannot be written, or if the weights changed meanwhile.
        """

    @abstractmethod
    def load(self, layer: int, sources: Callable[[int], Sequence[Weight]]) -> LoadedRecords:
        """Return a layer's experts. `sources` returns gate, up and down of an expert, if they must be written.

        Raises InvalidRequestError if the experts are not of one type, and OSError if they cannot be written.
        """

    @property
    @abstractmethod
    def counts(self) -> tuple[int, int]:
        """How often a step needed an expert that was in memory, and how often one was read."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Memory for experts and their tables, in bytes."""

    @property
    @abstractmethod
    def path(self) -> Path:
        """The file with all experts."""


class KernelStore(NamedTuple):
    """Names of the models' kernels that are not stored yet, the folder they are stored in, and the reason if they
    cannot be.
    """

    instruction_set: str
    missing: list[str]
    num_kernels: int
    folder: Path | None
    trouble: str | None


class Backend(ABC):
    """A device's kernels, memory, threads and captures.

    A method's default here is right for a device that has nothing of the kind.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    @abstractmethod
    def kernels(self) -> Any:
        """A module or an object that has every op under its name in `ops`, and agrees with `backends.reference`."""

    @abstractmethod
    def kernel_kind(self, outline: ModelOutline) -> str:
        """Return the name of a model's kernels in fingerprints. Equal names give equal bits."""

    def check_layers(self, layers: Iterable[Layer]) -> None:
        """Raise UnsupportedModelError if the kernels do not compute a part of these layers."""
        return

    def open_experts(
        self, outline: ModelOutline, most_bytes: int, name: str, made_of: str, check_unchanged: Callable[[], None]
    ) -> ExpertStore | None:
        """Return the store of a model's experts, of which at most `most_bytes` are in memory; None if it has none.

        `name` names its file, and `made_of` identifies the weights and how they are converted. `check_unchanged` raises
        ModelError if the weights were written to since then; it is called before the file gets its name. Raises
        InvalidRequestError if that is too little, or if the kernels need all experts in memory.
        """
        raise InvalidRequestError(f"experts_memory works on device='cpu', not on {self.device}: leave it out")

    def check_kv_type(self, kv_type: str) -> None:
        """Raise InvalidRequestError if the kernels do not read keys and values of this type, or "auto"."""
        return

    @property
    def memory_rules(self) -> str:
        """Name of the device in `before_load`, whose rules count its memory."""
        return self.device.type

    @abstractmethod
    def description(self) -> str:
        """Return one line for reports that names the device's properties that decide its speed."""

    def kernel_source(self) -> str:
        """Return the words for reports that say where the machine code of the kernels comes from."""
        return "none of its own"

    def instruction_set(self) -> str | None:
        """Return the instruction set's name; None if kernels are not compiled for one of several."""
        return None

    @property
    @abstractmethod
    def computes_on_host(self) -> bool:
        """True if a forward keeps the cores busy that Python runs on."""

    @property
    def reads_files(self) -> bool:
        """True if kernels read a step's rows of a table that stays in its file."""
        return True

    @property
    def step_limits(self) -> StepLimits:
        """Limits of a step, as `before_load.step_limits` returns them for the device."""
        return HOST_STEP

    @abstractmethod
    def activation_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """Return the dtype that a forward computes in if weights are requested in `dtype` (None: as stored)."""

    @abstractmethod
    def kv_type(self, dtype: torch.dtype | None, stored: str = "F32") -> str:
        """Return the default storage type of keys and values. `stored` is the type of the keys' matrix in the file."""

    @abstractmethod
    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return zeroed memory for a cache."""

    def available_bytes(self) -> int | None:
        """Return how many bytes can still be allocated in the memory that models use; None if that is not known."""
        return available_memory_bytes()

    def begin_gpu_peak(self) -> int | None:
        """Return the bytes allocated on the GPU, and measure `peak_gpu_bytes` from now on. None without a GPU."""
        return None

    def peak_gpu_bytes(self) -> int | None:
        """Return the most bytes that were allocated on the GPU since `begin_gpu_peak`. None without a GPU."""
        return None

    def give_back(self, memory: Tensor, first: int, count: int) -> None:
        """Free entries [first, first + count) of the first axis of memory that `zeros` made.

        Their contents are lost, and their memory returns to the system as far as possible.
        """
        return

    def to_host(self, memory: Tensor, entries: Sequence[int]) -> None:
        """Make entries of the first axis, as the device wrote them, readable by the host. `zeros` made `memory`."""
        return

    def to_device(self, memory: Tensor, entries: Sequence[int]) -> None:
        """Make entries of the first axis, as the host wrote them, readable by the device. `zeros` made `memory`."""
        return

    def capture(self, forward: Forward, capacity: int, max_logits: int) -> Recorded | None:
        """Return `forward` recorded for up to `capacity` tokens and `max_logits` logits per run; None if nothing is
        recorded.

        The tensors that it reads and writes (weights, cache) must stay where they are. Recording runs no kernel.
        """
        return None

    def make_stages(self, stages: Sequence[Stage], capacity: int, *, capture: bool) -> Stages:
        """Return a forward in stages for steps of up to `capacity` tokens, recorded if asked and the device can."""
        return EagerStages(stages)

    def make_group(self, rank: int, size: int, memory: mmap.mmap) -> Group:
        """Return one rank of a group whose processes share this memory, which is zero at first."""
        raise InvalidRequestError(f"ranks share memory on a CPU, not on {self.device}")

    def num_threads(self) -> int:
        """Return how many threads a forward computes with."""
        return torch.get_num_threads()

    def threads(self) -> AbstractContextManager[None]:
        """Return a context manager to enter around forwards and sampling."""
        return nullcontext()

    def forbid_forwards(self) -> None:
        """Make any op that the calling thread runs raise InferError, instead of waiting for ever.

        For a thread that forwards wait for.
        """
        return

    def publisher(self, flag: npt.NDArray[np.int64]) -> Callable[[], None]:
        """Return a function that sets a flag for which a forward may wait.

        The forward then sees everything that was written before.
        """
        return partial(flag.fill, 1)

    def synchronize(self) -> None:
        """Wait until the device has finished all its work. For use around timed regions."""
        return

    def compiling(self, models: Iterable[ModelOutline]) -> AbstractContextManager[None]:
        """Compile the missing kernels of these models while the context runs. When it ends, all kernels exist."""
        return nullcontext()

    def kernel_store(self, models: Iterable[ModelOutline]) -> KernelStore | None:
        """Return the state of these models' stored kernels; None if kernels are not compiled ahead."""
        return None
