"""What a backend is: all that differs by device. Above `ops` nobody names a device's kernels, threads or captures."""

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from infer.errors import InvalidRequestError
from infer.operands.group import Group
from infer.operands.outline import ModelOutline
from infer.operands.step import Chunk, Interrupt, Masks, Step, StepEnd
from infer.outputs import TokenLogprob
from infer.sampling.columns import SamplingColumns
from infer.sampling.history import History
from infer.system.available_memory import available_memory_bytes

Precision = Literal["exact", "fast"]
Forward = Callable[[Step], Tensor]


class Generated(NamedTuple):
    """The tokens sampled after each chunk, of which the last may be the code of a failed row. When each step ended, or
    each entry of a step that verifies drafts. The tokens' log-probabilities, where a row asks for them."""

    token_ids: list[list[int]]
    ends: list[StepEnd]
    logprobs: list[list[TokenLogprob]]


class Recorded(ABC):
    """A forward that was recorded once. What it computes is what the same ops compute one by one, to the bit."""

    @abstractmethod
    def run(self, step: Step) -> Float[Tensor, "logits vocab"]:
        """The logits asked for, in a buffer that the next run may overwrite."""


class Captured(Recorded):
    """One that samples as well, without a return to Python."""

    capacity: int  # tokens that one replay holds
    max_logits: int

    @abstractmethod
    def takes(self, chunks: Sequence[Chunk], columns: SamplingColumns) -> bool:
        """Whether they fit one replay, and can be sampled so with these parameters."""

    @abstractmethod
    def run_multi_step(
        self,
        chunks: Sequence[Chunk],
        starts: Sequence[int],
        count: int,
        columns: SamplingColumns,
        history: History | None = None,
        stop_ids: Sequence[int] = (),
        masks: Masks | None = None,
        interrupt: Interrupt | None = None,
    ) -> Generated:
        """Up to `count` steps without a return to Python, from chunks of one token each, at their positions; all are
        sampled after.

        Fewer if every row met one of stop_ids, or any thread sets `interrupt`; the last may hold a negative code, where
        a row failed. `history` has seen the step's tokens and sees what is sampled. `masks` are the first step's;
        `masks.advance` sees each.
        """

    @abstractmethod
    def run_verified(
        self,
        chunks: Sequence[Chunk],
        starts: Sequence[int],
        columns: SamplingColumns,
        history: History | None = None,
        masks: Masks | None = None,
    ) -> Generated:
        """Chunks from their positions on. For each with logits what is sampled after it: those of its drafts that were
        right, and the token after them."""

    def _has_room(self, chunks: Sequence[Chunk]) -> bool:
        num_tokens = sum([len(chunk.token_ids) for chunk in chunks])
        return num_tokens <= self.capacity and sum([chunk.num_logits for chunk in chunks]) <= self.max_logits

    def follow(self, chunks: Sequence[Chunk], starts: Sequence[int], count: int) -> int:
        """The steps that rank 0 of a group runs as a multi-step: how many they were. It tells what was sampled."""
        raise InvalidRequestError("a group runs no multi-steps here")

    @abstractmethod
    def profile(self, step: Step) -> list[tuple[str, int]]:
        """Each command's label and the cycles spent in it."""


def check_multi_step(chunks: Sequence[Chunk], columns: SamplingColumns) -> None:
    if len(chunks) != len(columns) or any(not len(chunk.token_ids) == chunk.num_logits == 1 for chunk in chunks):
        raise InvalidRequestError(f"a multi-step takes one token with logits for each of {len(columns)} rows")


def check_verified(chunks: Sequence[Chunk], columns: SamplingColumns) -> None:
    if len(chunks) != len(columns):
        raise InvalidRequestError(f"a step takes a chunk for each of {len(columns)} rows, got {len(chunks)}")


class KernelStore(NamedTuple):
    """The kernels of models that are not kept yet, by name; where they are kept, and why they cannot be."""

    instruction_set: str
    missing: list[str]
    num_kernels: int
    folder: Path | None
    trouble: str | None


class Backend(ABC):
    """A device's kernels, memory, threads and captures. What a method does here is right where a device has nothing
    of the kind."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    @abstractmethod
    def kernels(self) -> Any:
        """A module, or an object: has every op under its name in `ops`, and agrees with `backends.reference`."""

    @abstractmethod
    def description(self) -> str:
        """What of the device decides speed, in one line: for reports."""

    def instruction_set(self) -> str | None:
        """Its name, where kernels can be compiled for several."""
        return None

    @property
    @abstractmethod
    def computes_on_host(self) -> bool:
        """Whether a forward keeps the cores busy that Python runs on."""

    @abstractmethod
    def activation_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """What a forward computes in, where weights are asked for in `dtype` (None: as they are stored)."""

    @abstractmethod
    def kv_type(self, dtype: torch.dtype | None, stored: str = "F32") -> str:
        """How keys and values are stored if nothing else is asked for. `stored` is the type of the keys' matrix in the
        file."""

    @abstractmethod
    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeroed memory for a cache."""

    def available_bytes(self) -> int | None:
        """How much of the memory that models lie in can still be taken; None where that is not known."""
        return available_memory_bytes()

    def give_back(self, memory: Tensor, first: int, count: int) -> None:
        """What `zeros` made: entries [first, first + count) of the first axis are lost, and their memory is the
        system's again as far as it can be."""
        return

    def to_host(self, memory: Tensor, entries: Sequence[int]) -> None:
        """Before the host reads entries of the first axis of what `zeros` made: they are as the device wrote them."""
        return

    def to_device(self, memory: Tensor, entries: Sequence[int]) -> None:
        """After the host has written them: the device reads them as they are."""
        return

    def capture(self, forward: Forward, capacity: int, max_logits: int) -> Recorded | None:
        """`forward` recorded for up to so many tokens and logits at once.

        The tensors that it reads and writes (weights, cache) must stay where they are. Recording runs no kernel.
        """
        return None

    def make_group(self, rank: int, size: int, memory: mmap.mmap) -> Group:
        """A rank of a group whose processes share this memory, which is zero at first."""
        raise InvalidRequestError(f"ranks share memory on a CPU, not on {self.device}")

    def num_threads(self) -> int:
        """How many threads a forward computes with."""
        return torch.get_num_threads()

    def threads(self) -> AbstractContextManager[None]:
        """To be held around forwards and sampling."""
        return nullcontext()

    def forbid_forwards(self) -> None:
        """For a thread that forwards wait for: an op that it calls raises InferError instead of waiting for ever."""
        return

    def publisher(self, flag: npt.NDArray[np.int64]) -> Callable[[], None]:
        """What sets a flag that a forward may wait for: it then sees all that was written before."""
        return partial(flag.fill, 1)

    def synchronize(self) -> None:
        """Return when what the device was given is done: around timed regions."""
        return

    def compiling(self, models: Iterable[ModelOutline]) -> AbstractContextManager[None]:
        """Compile meanwhile what is missing of these models' kernels; at the end all are there."""
        return nullcontext()

    def kernel_store(self, models: Iterable[ModelOutline]) -> KernelStore | None:
        """What is kept of these models' kernels; None where kernels are not compiled ahead."""
        return None
