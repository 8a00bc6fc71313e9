"""A recorded forward with the sampler's commands after it, so that no token leaves compiled code to be chosen.

Whatever a run needs is written before it, so one that an exception kept from its end leaves nothing to the next.

Chain      forward, await_mask, scan, narrow,                walked once per token, each the next one's input
           choose, advance
Verifier   forward, await_mask; scan, narrow,                the rest walked once per entry: a row's entries are its
           choose, accept                                    line behind the last known token and one behind each draft
"""

import ctypes
from collections.abc import Callable, Generator, Sequence
from itertools import pairwise
from typing import Any, final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from infer.backends.base import Chained, Verified
from infer.backends.cpu import sampling
from infer.backends.cpu.compiled import compiled_address
from infer.backends.cpu.recording import Recording
from infer.backends.cpu.records import SAMPLE, WALK
from infer.backends.cpu.sample_rows import bind
from infer.backends.cpu.state import Words, field_index, field_offset, words_of
from infer.backends.cpu.table import BARRIER, Command, DispatchTable, Walk
from infer.backends.cpu.threads import team
from infer.operands.step import Masks, Part, StepEnd, TokenIds
from infer.sampling.columns import Rows
from infer.sampling.history import History

State = npt.NDArray[Any]
_STEPS = 64  # of a chain, that it has room for from the beginning
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int64)
_SAMPLE = {name: field_index(SAMPLE, name) for name in SAMPLE.fields or ()}
_STOP = _SAMPLE["stop"]
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
        self._room = _Room(_STEPS, len(rows))
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
    ) -> Chained:
        if count > len(self._room.generated):
            self._room = _Room(count, len(self.rows))
        room, words, stops = self._room, words_of(self._arguments), np.array(stop_ids, np.int64)
        for name, value in (
            ("generated", room.generated_at),
            ("stamps", room.stamps_at),
            ("num_generated", 0),
            ("stop", 0),
            ("stop_ids", stops.ctypes.data),
            ("num_stop_ids", len(stops)),
            ("follow", 0),
        ):
            words[_SAMPLE[name]] = value
        self._ended[:] = 0
        self._walk.words[_REPEATS] = count
        _bind_masks(words, masks)
        follower = None if masks is None else Follower(masks.follower(room.token_ids, count), words)
        if follower is not None:
            words[_SAMPLE["follow"]] = follower.address
        team().run(self._walk, state, num_threads)
        if follower is not None:
            follower.close()
        num_steps = words[_SAMPLE["num_generated"]]
        stamps = room.stamps[: 2 * num_steps]
        ends = [
            StepEnd(forward / 1e9, sampling / 1e9) for forward, sampling in zip(stamps[::2], stamps[1::2], strict=True)
        ]
        return Chained(room.generated[:num_steps].copy(), ends)


@final
class _Room:
    """For the tokens and times of so many steps. Python reads single integers as `ctypes` has them: its code is warm
    from the call of a follower, where numpy's index takes ten times as long."""

    def __init__(self, num_steps: int, num_rows: int) -> None:
        self.generated = np.zeros((num_steps, num_rows), np.int64)
        self.generated_at = self.generated.ctypes.data
        self.token_ids: TokenIds = (ctypes.c_int64 * self.generated.size).from_buffer(self.generated.data)
        self.stamps: TokenIds = (ctypes.c_int64 * (2 * num_steps))()
        self.stamps_at = ctypes.addressof(self.stamps)


def _bind_masks(arguments: Words, masks: Masks | None) -> None:
    arguments[_SAMPLE["allowed"]] = 0 if masks is None else masks.words.data_ptr()
    arguments[_SAMPLE["mask_ready"]] = 0 if masks is None else masks.is_ready.ctypes.data


@final
class Follower:
    """A function of Python's as compiled code calls it, in the thread that began the walk; False stops that.

    The chain ends unless the function has returned: compiled code sets `stop` before the call, and only True clears it.
    A generator, as an interrupt that came while compiled code ran is raised where Python goes on: here within a `try`.
    In a plain function that would be before its first line, and ctypes drops what a callback raises.
    """

    def __init__(self, follow: Callable[[int], bool], words: Words) -> None:
        self._error: BaseException | None = None
        self._steps = self._run(follow, words)
        next(self._steps)
        self._callback = _CALLBACK(self._steps.send)
        self.address = ctypes.cast(self._callback, ctypes.c_void_p).value or 0

    def close(self) -> None:
        """After the walk: raises what was raised within."""
        self._steps.close()
        if self._error is not None:
            raise self._error

    def _run(self, follow: Callable[[int], bool], words: Words) -> Generator[None, int, None]:
        try:
            while True:
                if follow((yield)):
                    words[_STOP] = 0
        except GeneratorExit:
            return
        except BaseException as error:
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
        (self._stamps,) = _integers(1, self._max_entries + 1)
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
            ("stamps", self._stamps),
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
    ) -> Verified:
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
        num_rows, stamps = len(parts), [stamp / 1e9 for stamp in self._stamps[: self._words[_SAMPLE["entry"]] + 1]]
        found = [self._generated[row : num_rows * count : num_rows] for row, count in enumerate(self._counts)]
        return Verified(found, [StepEnd(*pair) for pair in pairwise(stamps)])


def _integers(count: int, size: int) -> list[Words]:
    return [(ctypes.c_int64 * size)() for _ in range(count)]
