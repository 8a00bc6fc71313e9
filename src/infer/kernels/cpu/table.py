"""The dispatch table: a flat array of commands, and the compiled function that walks it.

    row: address of the command's code | address of its arguments | barrier after it: 0 no, 1 yes, 2 if several tokens

Labels (`L12.attend`) and whatever the arguments point to are kept in cold lists beside it.
The barrier counts arrivals: a thread spins for some microseconds, then gives its core away until the others came.
When thread 0 has waited too long for the others, it sends them home at a barrier and does their parts itself.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import numpy.typing as npt
from numba import carray, njit

from infer.kernels.cpu import simd
from infer.kernels.cpu.compiled import compiled_address
from infer.kernels.cpu.simd import load_i64, store_i64
from infer.kernels.cpu.state import STATE, field_offset

NO_BARRIER, BARRIER, BARRIER_IF_MANY = 0, 1, 2
_ROW_BYTES = 24
_NUM_SPINS = 500
_SHARE_SHIFT = 2  # of thread 0's time may go in waits: a quarter


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


WALK = np.dtype(
    [
        ("rows", np.int64),
        ("num_rows", np.int64),
        ("repeats", np.int64),  # how often to walk the table
        ("stop", np.int64),  # address of an int64 that a command sets to end the repeats, or 0
        ("times", np.int64),  # int64 [num_rows]: cycles spent by thread 0 are added here, or 0
        ("walked", np.int64),  # how often it was walked, thanks to `stop` less than `repeats`
        ("patience", np.int64),  # cycles that thread 0 may wait, beyond the share, before it goes on alone; 0: for ever
    ]
)


_serials = itertools.count()


@final
class Walk:
    """A finished table as a team walks it."""

    def __init__(self, table: DispatchTable) -> None:
        self.table, self.rows = table, table.rows()
        self.arguments = np.zeros(1, WALK)
        self.arguments["rows"], self.arguments["num_rows"] = self.rows.ctypes.data, len(self.rows)
        self.arguments["repeats"] = 1
        self.serial = next(_serials)


@njit
def wait_for_all(barrier, arrivals, spins):  # type: ignore[no-untyped-def]
    """Return when the barrier has counted `arrivals`: the cycles lost if that took longer than a spin."""
    simd.atomic_add(barrier, 1)
    for _ in range(spins):
        if simd.atomic_load(barrier) >= arrivals:
            return 0
        simd.pause()
    began = simd.cycles()
    while simd.atomic_load(barrier) < arrivals:
        simd.yield_thread()
    return simd.cycles() - began


_BARRIER_AT, _DISMISSED_AT, _STALLS_AT = (field_offset(STATE, name) for name in ("barrier", "dismissed", "stalls"))


def make_walk() -> Callable[..., None]:
    """Alone, thread 0 still does each command in `num_threads` parts: what a later command reads stays the same."""

    def walk(args_at, state_at, thread, num_threads):  # type: ignore[no-untyped-def]
        args, state = carray(args_at, 1)[0], carray(state_at, 1)[0]
        state_address = simd.address_of(state_at)
        barrier, dismissed = state_address + _BARRIER_AT, state_address + _DISMISSED_AT
        arrivals, stalls, is_alone = 0, 0, num_threads == 1
        first, end, started = thread, thread + 1, simd.cycles()
        for repeat in range(args.repeats):
            for index in range(args.num_rows):
                row = args.rows + _ROW_BYTES * index
                began = simd.cycles() if args.times != 0 else 0
                for part in range(first, end):
                    simd.call_command(load_i64(row), load_i64(row + 8), state_address, part, num_threads)
                flag = load_i64(row + 16)
                if not is_alone and (flag == 1 or (flag == 2 and max(state.num_tokens, state.num_wanted) > 1)):
                    arrivals += num_threads
                    beyond = stalls - args.patience if thread == 0 and args.patience != 0 else 0
                    if beyond > 0 and beyond > (simd.cycles() - started) >> _SHARE_SHIFT:
                        simd.atomic_store(dismissed, arrivals)  # before its own arrival: all see it behind this one
                    stalls += wait_for_all(barrier, arrivals, _NUM_SPINS)
                    if simd.atomic_load(dismissed) == arrivals:
                        is_alone, first, end = True, 0, num_threads
                if args.times != 0 and thread == 0:
                    at = args.times + 8 * index
                    store_i64(at, load_i64(at) + simd.cycles() - began)
                if is_alone and thread != 0:
                    break
            if thread == 0:
                args.walked = repeat + 1
            if is_alone and thread != 0:
                break
            if args.stop != 0:
                is_stopped = load_i64(args.stop) != 0
                if not is_alone:  # nobody begins the next repeat, and sets it anew, before all have looked
                    arrivals += num_threads
                    stalls += wait_for_all(barrier, arrivals, _NUM_SPINS)
                if is_stopped:
                    break
        if stalls != 0:
            simd.atomic_add(state_address + _STALLS_AT, stalls)

    return walk


def walk_address() -> int:
    return compiled_address("walk", make_walk, WALK)
