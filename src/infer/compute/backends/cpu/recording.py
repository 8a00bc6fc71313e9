"""Targets of an op's commands: the table of the active recording, or one that runs immediately.

An op uses `Run`. An eager run has fresh buffers and the op's own tensors. A recording has a workspace whose buffers the
layers share (one per role and size), and slots of a fixed capacity for the step's arrays. So one op serves both.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infer.compute.backends.cpu.compile.addresses import compiled_address
from infer.compute.backends.cpu.ranks.memory_group import MemoryGroup
from infer.compute.backends.cpu.thread_records import MAX_THREADS, STATE
from infer.compute.backends.cpu.threads.dispatch_table import Arguments, Command, DispatchTable
from infer.compute.backends.cpu.threads.pool import aligned, thread_pool
from infer.compute.operands.group import Shares
from infer.compute.operands.step import Step
from infer.errors import InvalidRequestError

# Labels of ops that have no projection, and so no layer's name.
_WITHIN_A_LAYER = ("attend", "keys", "conv", "delta_net")


class Run(ABC):
    """A table of commands being made. It may be run with at most `capacity` tokens and `max_logits` logits."""

    def __init__(self, capacity: int, max_logits: int) -> None:
        self.capacity, self.max_logits = capacity, max_logits
        self.commands = list[Command]()
        self.state = aligned(1, STATE)
        self.num_threads = thread_pool().num_threads  # to share work by
        self.max_threads = MAX_THREADS  # to size scratch by: a later pool may be larger
        self.label = ""
        self.checks = list[Callable[[], None]]()

    def enter(self, label: str) -> None:
        """Set the label of the commands that follow."""
        self.label = label

    def check_after(self, check: Callable[[], None]) -> None:
        """Call `check` after each run."""
        if check not in self.checks:
            self.checks.append(check)

    def check(self) -> None:
        """Raise an error if the last run has met one. Its results are not valid then."""
        for check in self.checks:
            check()

    def append(self, name: str, arguments: Arguments, barrier: int, maker: str, *variant: str | int) -> None:
        function = compiled_address(maker, arguments.record_type, *variant)
        self.commands.append(Command(function, arguments.record, barrier, f"{self.label}.{name}", (arguments,)))

    @abstractmethod
    def tensor(self, role: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a buffer for this role, with undefined contents."""

    @abstractmethod
    def columns(self, role: str, rows: int, width: int, shares: Shares | None) -> tuple[Tensor, int]:
        """Return a buffer for `gathered`, and the first of the `width` columns that this rank writes."""

    @abstractmethod
    def gathered(self, own: Tensor, shares: Shares | None) -> Tensor:
        """Return all ranks' columns, after this rank's are written."""

    @abstractmethod
    def offer(
        self, role: str, arguments: Arguments, shares: Shares | None, *, floats: Tensor | None = None
    ) -> "Offer | None":
        """Return the offer of a command that writes the buffer of this role, and that can also write it quantised.

        If `floats` is given, it is the argument `out` of a command that may leave it out. Return None if the command
        runs before the op that reads the buffer.
        """


@final
class EagerRun(Run):
    def tensor(self, role: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def run(self) -> None:
        """Run the commands that were appended since the last run."""
        if self.capacity and self.commands:
            thread_pool().run(DispatchTable(self.commands), self.state)
            self.check()
        self.commands = []

    def columns(self, role: str, rows: int, width: int, shares: Shares | None) -> tuple[Tensor, int]:
        return self.tensor(role, rows, width), 0

    def gathered(self, own: Tensor, shares: Shares | None) -> Tensor:
        if shares is None:
            return own
        self.run()
        return shares.gather(own)

    def offer(self, role: str, arguments: Arguments, shares: Shares | None, *, floats: Tensor | None = None) -> None:
        return None


@final
class Recording(Run):
    """One step being recorded. Hand `step` to `forward`: its arrays are the slots."""

    def __init__(self, capacity: int, max_logits: int) -> None:
        super().__init__(capacity, max_logits)
        tokens, positions, rows = (torch.zeros(capacity, dtype=torch.int64) for _ in range(3))
        self.step = Step(tokens, positions, rows, torch.zeros(max_logits, dtype=torch.int64))
        point_to_step(self.state, self.step)
        self._workspace: dict[tuple[Any, ...], Tensor] = {}
        self._layer = ""
        self.group: MemoryGroup | None = None  # whose other ranks take part

    def tensor(self, role: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        key = (role, shape, dtype)
        if key not in self._workspace:
            raw = aligned(math.prod(shape) * dtype.itemsize, np.dtype(np.uint8))  # pages come when they are written
            self._workspace[key] = torch.from_numpy(raw).view(dtype).view(shape)
        return self._workspace[key]

    def columns(self, role: str, rows: int, width: int, shares: Shares | None) -> tuple[Tensor, int]:
        """Return a buffer for all ranks' columns, in memory that they share, and this rank's first column."""
        if shares is None:
            return self.tensor(role, rows, width), 0
        return self.for_all(shares, role, rows, shares.width, dtype=torch.float32), shares.own[0]

    def for_all(self, shares: Shares | None, role: str, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer for this role, in memory that all ranks share if there are `shares`."""
        if shares is None:
            return self.tensor(role, *shape, dtype=dtype)
        return self._shared(shares).tensor(role, shape, dtype)

    def _shared(self, shares: Shares) -> MemoryGroup:
        if not isinstance(shares.group, MemoryGroup):
            raise InvalidRequestError("ranks that share no memory gather in Python: load with capture=False")
        if self.group is None:
            self.group = shares.group
            self.group.forget_tensors()
        return self.group

    def gathered(self, own: Tensor, shares: Shares | None) -> Tensor:
        if shares is not None:
            self.commands.append(replace(self._shared(shares).barrier(), label=f"{self.label}.barrier"))
        return own

    def offer(self, role: str, arguments: Arguments, shares: Shares | None, *, floats: Tensor | None = None) -> "Offer":
        return Offer(self, role, arguments, shares, floats)

    def enter(self, label: str) -> None:
        """Set the label of the commands that follow. An op without a projection belongs to the layer before it."""
        layer, _, _ = label.rpartition(".")
        self._layer = layer or self._layer
        self.label = f"{self._layer}.{label}" if label in _WITHIN_A_LAYER else label


@final
@dataclass
class Offer:
    """A recorded command's offer to write its result quantised too: the twin of the activations that it writes.

    The op that reads the activations redeems it before the command ever runs. It calls `keep_floats` before it reads
    the floats of activations that have an offer.
    """

    recording: Recording
    role: str  # of the buffer that the command writes
    arguments: Arguments
    shares: Shares | None
    floats: Tensor | None = None  # the command need not write them

    def keep_floats(self) -> None:
        """Let the command write the floats, too, because an op reads them."""
        if self.floats is not None:
            self.arguments.set(out=self.floats)
            self.floats = None

    def redeem(self, form: int, num_bytes: int) -> int | None:
        """Return the address of activation records of this form, which the command will write beside the floats.

        Return None if an op has redeemed the offer in another form.
        """
        record = self.arguments.record
        if record["quantized"] and record["form"] != form:
            return None
        records = self.recording.for_all(self.shares, f"quantized {self.role}", num_bytes, dtype=torch.uint8)
        self.arguments.set(quantized=records, form=form)
        if self.floats is not None:
            self.arguments.set(out=0)
        return records.data_ptr()


_active: ContextVar[Recording | None] = ContextVar("infer_recording", default=None)


@contextmanager
def record(capacity: int, max_logits: int) -> Iterator[Recording]:
    """Append the ops called inside to the recording instead of running them."""
    recording = Recording(capacity, max_logits)
    token = _active.set(recording)
    try:
        yield recording
    finally:
        _active.reset(token)


@contextmanager
def scope(
    label: str,
    num_tokens: int = 0,
    *,
    tokens: Tensor | None = None,
    logit_indices: Tensor | None = None,
    step: Step | None = None,
) -> Iterator[Run]:
    """Yield the run that an op's commands go to. An eager run executes at the end."""
    recording = _active.get()
    if recording is not None:
        _check_slots(recording.step, {"tokens": tokens, "logit_indices": logit_indices})
        _check_slots(recording.step, {} if step is None else arrays_of(step))
        recording.enter(label)
        yield recording
        return
    if step is None:  # no op without one reads positions or rows
        none = torch.zeros(0, dtype=torch.int64)
        tokens = none if tokens is None else tokens
        step = Step(tokens, tokens, tokens, none if logit_indices is None else logit_indices)
    step = Step(*(array.to(torch.int64).contiguous() for array in arrays_of(step).values()))
    run = EagerRun(num_tokens or len(step.tokens), len(step.logit_indices))
    point_to_step(run.state, step)
    run.state["num_tokens"], run.state["num_logits"] = run.capacity, run.max_logits
    run.enter(label)
    yield run
    run.run()


def arrays_of(step: Step) -> dict[str, Tensor]:
    """Return the step's arrays by their names in STATE."""
    return {name: getattr(step, name) for name in ("tokens", "positions", "rows", "logit_indices")}


def point_to_step(state: npt.NDArray[Any], step: Step) -> None:
    for name, array in arrays_of(step).items():
        state[name] = array.data_ptr()


def _check_slots(slots: Step, given: Mapping[str, Tensor | None]) -> None:
    if any(x is not None and x.data_ptr() != getattr(slots, name).data_ptr() for name, x in given.items()):
        raise InvalidRequestError("a forward that is recorded must hand the step's own tensors to ops")
