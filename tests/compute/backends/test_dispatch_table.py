"""Commands: how they are linked, and the table and loop that dispatch them, with barriers, repeats and a profile.

Kernels are LLVM's text: addresses are integers to the end, and functions are linked before code is made of them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numba import njit

from infer.compute.backends.cpu import simd
from infer.compute.backends.cpu.compile import compiler
from infer.compute.backends.cpu.compile.addresses import compiled_address
from infer.compute.backends.cpu.simd import load_i64, store_i64
from infer.compute.backends.cpu.thread_records import STATE
from infer.compute.backends.cpu.threads import dispatch_table
from infer.compute.backends.cpu.threads.dispatch_table import BARRIER, Command, DispatchTable
from infer.compute.backends.cpu.threads.pool import ThreadPool, aligned

TALLY = np.dtype([("count", np.int64), ("stop", np.int64), ("last", np.int64)])


def make_tally() -> Callable[..., None]:
    """Return a command with which thread 0 counts, and sets `stop` at the last repeat."""

    def tally(args, state, thread, num_threads):  # type: ignore[no-untyped-def]
        if thread == 0:
            args.count += 1
            if args.count == args.last:
                simd.store_i64(args.stop, 1)

    return tally


@pytest.fixture(scope="module")
def three() -> Iterator[ThreadPool]:
    three = ThreadPool(3)
    yield three
    three.close()


class Tally:
    def __init__(self, barriers: list[int]) -> None:
        self.arguments, self.stop, self.state = np.zeros(1, TALLY), np.zeros(1, np.int64), aligned(1, STATE)
        self.arguments["stop"] = self.stop.ctypes.data
        address = compiled_address("test_dispatch_table:make_tally", TALLY)
        self.commands = [Command(address, self.arguments, barrier, "tally") for barrier in barriers]
        self.table = DispatchTable(self.commands)
        self.table.arguments["stop"] = self.stop.ctypes.data

    @property
    def count(self) -> int:
        return int(self.arguments["count"][0])


def test_each_row_has_its_commands_code_arguments_and_barrier() -> None:
    tally = Tally([dispatch_table.NO_BARRIER, BARRIER, dispatch_table.BARRIER_IF_MANY])
    for row, command in zip(tally.table.rows.tolist(), tally.commands, strict=True):
        assert row == [command.function, command.arguments.ctypes.data, command.barrier]


def test_an_empty_table_has_no_effect(three: ThreadPool) -> None:
    table, state = DispatchTable([]), aligned(1, STATE)
    three.run(table, state, 3)
    assert table.rows.shape == (0, 3)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize(("num_tokens", "num_barriers"), [(1, 2), (2, 3)])
def test_threads_meet_at_the_barriers_that_the_number_of_tokens_asks_for(
    three: ThreadPool, num_threads: int, num_tokens: int, num_barriers: int
) -> None:
    tally = Tally([dispatch_table.NO_BARRIER, BARRIER, dispatch_table.BARRIER_IF_MANY, BARRIER])
    tally.state["num_tokens"] = num_tokens
    tally.table.arguments["repeats"] = 5
    three.run(tally.table, tally.state, num_threads)
    assert tally.count == 20
    meetings = 5 * (num_barriers + 1)  # at the last barrier of a repeat, all threads check `stop`
    assert tally.state["released"][0] == (meetings if num_threads > 1 else 0)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_stop_ends_the_chain_after_its_repeat(three: ThreadPool, num_threads: int) -> None:
    tally = Tally([BARRIER, BARRIER])
    tally.arguments["last"], tally.table.arguments["repeats"] = 5, 100
    three.run(tally.table, tally.state, num_threads)
    assert (tally.count, tally.table.arguments["completed"][0]) == (6, 3)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_repeats_may_begin_after_the_first_rows(three: ThreadPool, num_threads: int) -> None:
    before = Tally([BARRIER, BARRIER])
    after = Tally([BARRIER])
    table = DispatchTable(after.commands, before.table)
    table.arguments["repeats"], table.arguments["again"] = 5, 2
    three.run(table, after.state, num_threads)
    assert (before.count, after.count, table.arguments["completed"][0]) == (2, 5, 1)
    table.arguments["again"] = 0
    three.run(table, after.state, num_threads)
    assert (before.count, after.count, table.arguments["completed"][0]) == (12, 10, 5)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_profile_has_a_time_for_every_command(three: ThreadPool, num_threads: int) -> None:
    tally = Tally([BARRIER, dispatch_table.NO_BARRIER, dispatch_table.BARRIER_IF_MANY])
    times = np.zeros(len(tally.commands), np.int64)
    tally.table.arguments["times"] = times.ctypes.data
    three.run(tally.table, tally.state, num_threads)
    assert (times > 0).all()


COPY = np.dtype([("to", np.int64), ("source", np.int64), ("stride", np.int64), ("count", np.int64)])


@njit
def copy_some(to, source, stride, count):  # type: ignore[no-untyped-def]
    """Run a loop whose addresses code generation moves to their uses. LLVM calls them `sunkaddr`."""
    for i in range(count):
        if load_i64(source + stride * i) != 7:
            store_i64(to + stride * i + 8, load_i64(source + stride * i + 16))


def make_copy() -> Callable[..., None]:
    def copy(args, state, thread, num_threads):  # type: ignore[no-untyped-def]
        copy_some(args.to, args.source, args.stride, args.count)

    return copy


@pytest.fixture(scope="module")
def modules() -> dict[str, str]:
    """Return the text of each module that was linked into the command `copy`, by name, and of the command."""
    linked: dict[str, str] = {}
    take = compiler._Library._get_module_for_linking

    def note(library: Any) -> Any:
        module = take(library)
        linked.setdefault(library.name, str(module))
        return module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler._Library, "_get_module_for_linking", note)
        compiler.compile_command("copy", make_copy, COPY)
    linked["copy"] = str(compiler._kept[-1]._library._final_module)
    return linked


def test_no_address_is_split_into_a_pointer_and_an_offset_by_guess(modules: dict[str, str]) -> None:
    moved = [line for line in modules["copy"].splitlines() if "sunkaddr" in line.partition("=")[0]]
    assert moved
    assert not [line for line in moved if "getelementptr" in line]


def test_functions_are_linked_before_code_is_made_of_them(modules: dict[str, str]) -> None:
    assert "copy_some" in modules
    assert not [name for name, text in modules.items() if name != "copy" and "sunkaddr" in text]
