"""The dispatch table: a flat array of commands, and the compiled function that walks it.

    row: address of the command's code | address of its arguments | barrier after it: 0 no, 1 yes, 2 if several tokens

Labels (`L12.attend`) and whatever the arguments point to are kept in cold lists beside it.
Commands share out their work by the number of threads, or as units that are taken (`units`); threads meet as `barrier`
says. When thread 0 has waited too long for the others, it sends them home at a barrier and does their parts itself.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self, final

import numpy as np
import numpy.typing as npt

from infer.backends.cpu.compiled import compiled_address
from infer.backends.cpu.records import WALK
from infer.backends.cpu.state import words_of

NO_BARRIER, BARRIER, BARRIER_IF_MANY = 0, 1, 2


@final
@dataclass
class Command:
    """One row of a table: code, arguments, and what they keep alive."""

    function: int
    arguments: npt.NDArray[Any]
    barrier: int
    label: str
    keeps: tuple[Any, ...] = ()


@final
@dataclass
class DispatchTable:
    commands: list[Command] = field(default_factory=list)

    def append(self, commands: Sequence[Command]) -> None:
        self.commands.extend(commands)

    def rows(self) -> npt.NDArray[np.int64]:
        """The array that the walker reads."""
        rows = [(c.function, c.arguments.ctypes.data, c.barrier) for c in self.commands]
        return np.array(rows, dtype=np.int64).reshape(-1, 3)

    @property
    def labels(self) -> list[str]:
        return [command.label for command in self.commands]


_serials = itertools.count()


@final
class Walk:
    """A finished table as a team walks it."""

    def __init__(self, table: DispatchTable, before: Self | None = None) -> None:
        """`before` is a walk whose rows come first; the table is the rest."""
        self.table, self.rows, self._before = table, table.rows(), before
        if before is not None:
            self.rows = np.concatenate([before.rows, self.rows])
        self.arguments = np.zeros(1, WALK)
        self.arguments["rows"], self.arguments["num_rows"] = self.rows.ctypes.data, len(self.rows)
        self.arguments["repeats"] = 1
        self.words, self.address = words_of(self.arguments), self.arguments.ctypes.data
        self.serial = next(_serials)


def walk_address() -> int:
    return compiled_address(".walking:make_walk", WALK)
