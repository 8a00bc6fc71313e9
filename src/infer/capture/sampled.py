"""A recorded forward with the sampler's commands behind it, so that no token leaves compiled code to be chosen.

Chain      forward, await_mask, scan, narrow,                walked once per token, each the next one's input
           choose, advance
Verifier   forward, await_mask; scan, narrow,                the rest walked once per entry: a row's entries are its
           choose, accept                                    line behind the last known token and one behind each draft
"""

import ctypes
from collections.abc import Callable, Generator, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from infer.batch import Masks, Part, TokenIds
from infer.kernels.cpu import sampling
from infer.kernels.cpu.compiled import compiled_address
from infer.kernels.cpu.recording import Recording
from infer.kernels.cpu.records import SAMPLE, WALK
from infer.kernels.cpu.sample_rows import bind
from infer.kernels.cpu.state import Words, field_index, field_offset, words_of
from infer.kernels.cpu.table import BARRIER, Command, DispatchTable, Walk
from infer.kernels.cpu.threads import team
from infer.sampling.history import History
from infer.sampling.rows import Rows

State = npt.NDArray[Any]
_STEPS = 64  # of a chain, that it has room for from the beginning
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int64)
_SAMPLE = {name: field_index(SAMPLE, name) for name in SAMPLE.fields or ()}
_REPEATS = field_index(WALK, "repeats")


@final
class Chain:
    """The table with the sampler's commands behind it, for rows of parameters. Walked once per token."""

    def __init__(
        self, recording: Recording, forward: Walk, logits: Tensor, rows: Rows, history: History | None
    ) -> None:
        positions = recording.step.positions.data_ptr()
        self.rows, self.history = rows, history
        self._arguments, keeps = bind(logits, rows, history, None, positions, 1)
        self._ended = np.zeros(len(rows), np.int64)
        self._arguments["ended"] = self._ended.ctypes.data
        self._make_room(_STEPS)
        advance = compiled_address(".sample_advance:make_advance", SAMPLE)
        await_mask = compiled_address(".sample_advance:make_await_mask", SAMPLE)
        table = DispatchTable(
            [
                Command(await_mask, self._arguments, BARRIER, "sample.await_mask"),
                *sampling.commands(self._arguments, keeps),
                Command(advance, self._arguments, BARRIER, "sample.advance"),
            ]
        )
        self._walk = Walk(table, forward)
        self._walk.arguments["stop"] = self._arguments.ctypes.data + field_offset(SAMPLE, "stop")

    def run(
        self, state: State, count: int, stop_ids: Sequence[int], masks: Masks | None, num_threads: int | None
    ) -> npt.NDArray[np.int64]:
        """[steps, rows]: what each row sampled in each step."""
        if count > len(self._generated):
            self._make_room(count)
        arguments, stops = self._arguments, np.array(stop_ids, np.int64)
        arguments["num_generated"], arguments["stop"] = 0, 0
        arguments["stop_ids"], arguments["num_stop_ids"] = stops.ctypes.data, len(stops)
        self._ended[:] = 0
        self._walk.arguments["repeats"] = count
        _bind_masks(words_of(arguments), masks)
        follower = None if masks is None else Follower(masks.follower(self._read_by_python(), count), arguments)
        arguments["follow"] = 0 if follower is None else follower.address
        team().run(self._walk, state, num_threads)
        if follower is not None:
            follower.close()
        return self._generated[: int(arguments["num_generated"][0])].copy()

    def _make_room(self, num_steps: int) -> None:
        self._generated = np.zeros((num_steps, len(self.rows)), np.int64)
        self._arguments["generated"] = self._generated.ctypes.data
        self._token_ids: TokenIds | None = None

    def _read_by_python(self) -> TokenIds:
        """Behind a step: the code of `ctypes` is warm from the call, where numpy's index takes ten times as long."""
        if self._token_ids is None:
            self._token_ids = (ctypes.c_int64 * self._generated.size).from_buffer(self._generated.data)
        return self._token_ids


def _bind_masks(arguments: Words, masks: Masks | None) -> None:
    arguments[_SAMPLE["allowed"]] = 0 if masks is None else masks.words.data_ptr()
    arguments[_SAMPLE["mask_ready"]] = 0 if masks is None else masks.is_ready.ctypes.data


@final
class Follower:
    """A function of Python's as compiled code calls it, in the thread that began the walk; False stops that.

    A generator, as an interrupt that came while compiled code ran is raised where Python goes on: here within a `try`.
    In a plain function that would be before its first line, and ctypes drops what a callback raises.
    """

    def __init__(self, follow: Callable[[int], bool], arguments: State) -> None:
        self._error: BaseException | None = None
        self._steps = self._run(follow, arguments)
        next(self._steps)
        self._callback = _CALLBACK(self._steps.send)
        self.address = ctypes.cast(self._callback, ctypes.c_void_p).value

    def close(self) -> None:
        """Behind the walk: raises what was raised within."""
        self._steps.close()
        if self._error is not None:
            raise self._error

    def _run(self, follow: Callable[[int], bool], arguments: State) -> Generator[None, int, None]:
        try:
            while True:
                if not follow((yield)):
                    arguments["stop"] = 1
        except GeneratorExit:
            return
        except BaseException as error:
            arguments["stop"] = 1
            self._error = error
        yield


@final
class Verifier:
    """A step that samples some of its rows, and goes on sampling a row while its drafts turn out right."""

    def __init__(self, forward: Walk, logits: Tensor, rows: Rows, history: History | None) -> None:
        self.rows, self.history = rows, history
        num_rows, self._max_entries = len(rows), len(logits)
        self._positions, self._lines, self._alive, self._drafted, self._counts = _integers(5, num_rows)
        self._drafts, self._generated = _integers(2, num_rows * self._max_entries)
        self._arguments, keeps = bind(logits, rows, history, None, ctypes.addressof(self._positions), 0)
        self._words = words_of(self._arguments)
        self._words[_SAMPLE["draft_stride"]] = self._max_entries
        for name, memory in (
            ("starts", self._lines),
            ("alive", self._alive),
            ("drafts", self._drafts),
            ("num_drafts", self._drafted),
            ("counts_sampled", self._counts),
            ("generated", self._generated),
        ):
            self._words[_SAMPLE[name]] = ctypes.addressof(memory)
        accept = compiled_address(".sample_advance:make_accept", SAMPLE)
        await_mask = compiled_address(".sample_advance:make_await_mask", SAMPLE)
        table = DispatchTable(
            [
                Command(await_mask, self._arguments, BARRIER, "sample.await_mask"),
                *sampling.commands(self._arguments, keeps),
                Command(accept, self._arguments, BARRIER, "sample.accept"),
            ]
        )
        self._walk = Walk(table, forward)
        self._walk.arguments["again"] = len(forward.rows) + 1
        self._walk.arguments["stop"] = self._arguments.ctypes.data + field_offset(SAMPLE, "stop")

    def run(
        self,
        state: State,
        parts: Sequence[Part],
        starts: Sequence[int],
        masks: Masks | None,
        num_threads: int | None,
    ) -> list[list[int]]:
        """The tokens of each wanted row: those of its drafts that were right and the one behind them, which may be the
        code of a failed row."""
        lines, most = 0, 0
        for row, (part, start) in enumerate(zip(parts, starts, strict=True)):
            num_drafts = part.num_drafts
            self._positions[row], self._lines[row] = start + len(part.token_ids) - num_drafts, lines
            self._alive[row], self._drafted[row], self._counts[row] = part.is_wanted, num_drafts, 0
            if num_drafts:
                at = row * self._max_entries
                self._drafts[at : at + num_drafts] = list(part.drafts)
            lines, most = lines + part.num_lines, max(most, num_drafts)
        self._words[_SAMPLE["entry"]] = self._words[_SAMPLE["stop"]] = 0
        self._walk.words[_REPEATS] = 1 + most
        _bind_masks(self._words, masks)
        team().run(self._walk, state, num_threads)
        num_rows = len(parts)
        return [self._generated[row : num_rows * count : num_rows] for row, count in enumerate(self._counts)]


def _integers(count: int, size: int) -> list[Words]:
    return [(ctypes.c_int64 * size)() for _ in range(count)]
