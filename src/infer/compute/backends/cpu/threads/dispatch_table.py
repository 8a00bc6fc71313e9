"""The dispatch table: a flat array of commands, for the compiled dispatch loop.

    row: address of the command's code | address of its arguments | barrier after it

Labels (`L0.attend`) and the objects that the arguments point to are kept in cold lists beside it. Commands divide
their work by the number of threads, or as units that threads take (`work_stealing`). Threads wait for each other as
`barrier` describes. If thread 0 has waited too long for the others, it dismisses them at a barrier and computes their
parts itself.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from infer.compute.backends.cpu.thread_records import BARRIER as BARRIER
from infer.compute.backends.cpu.thread_records import BARRIER_IF_MANY as BARRIER_IF_MANY
from infer.compute.backends.cpu.thread_records import BARRIER_IF_MERGED as BARRIER_IF_MERGED
from infer.compute.backends.cpu.thread_records import NO_BARRIER as NO_BARRIER
from infer.compute.backends.cpu.thread_records import READ_BARRIER as READ_BARRIER
from infer.compute.backends.cpu.thread_records import TABLE, fields_of
from infer.errors import InvalidRequestError

Value = int | float | Tensor
_DTYPES = torch.float32, torch.int64, torch.uint8


@final
class Arguments:
    """Arguments of a command: a record, and all that it points to."""

    def __init__(self, record: np.dtype, **fields: Value | Sequence[Value]) -> None:
        self.record_type, self.record = record, np.zeros(1, record)
        self.keeps: list[object] = []
        self.set(**fields)

    @property
    def address(self) -> int:
        return int(self.record.ctypes.data)

    def set(self, **fields: Value | Sequence[Value]) -> None:
        """Set fields. A tensor sets its address.

        Raises InvalidRequestError for a tensor that is not contiguous, or whose elements kernels do not read.
        """
        for name, value in fields.items():
            values = value if isinstance(value, Sequence) else [value]
            self.record[name] = [self._number(name, value) for value in values]

    def _number(self, name: str, value: Value) -> int | float:
        if not isinstance(value, Tensor):
            return value
        if value.dtype not in _DTYPES or not value.is_contiguous():
            raise InvalidRequestError(f"the CPU kernels take contiguous float32, got {name} of {value.dtype}")
        self.keeps.append(value)
        return value.data_ptr()


@final
@dataclass
class Command:
    """One row of a table: code, arguments, and the objects that they keep alive."""

    function: int
    arguments: npt.NDArray[Any]
    barrier: int
    label: str
    keeps: tuple[Any, ...] = ()


_serials = itertools.count()


@final
class DispatchTable:
    """A finished table, which a pool of threads runs. The rows of the table `before`, if there is one, come first."""

    def __init__(self, commands: Sequence[Command], before: Self | None = None) -> None:
        self._commands, self._before = list(commands), before
        rows = [(c.function, c.arguments.ctypes.data, c.barrier) for c in commands]
        self.rows = np.array(rows, dtype=np.int64).reshape(-1, 3)
        if before is not None:
            self.rows = np.concatenate([before.rows, self.rows])
        self.arguments = np.zeros(1, TABLE)
        self.fields, self.address = fields_of(self.arguments), self.arguments.ctypes.data
        self.fields.rows, self.fields.num_rows, self.fields.repeats = self.rows.ctypes.data, len(self.rows), 1
        self.serial = next(_serials)
