"""A recorded forward with the sampler's commands behind it, so that no token leaves compiled code to be chosen.

Chain      forward, scan, narrow, choose, advance            walked once per token, each the next one's input
Verifier   forward, await_mask, then for each entry          walked once: a row's entries are its line behind the
           scan, narrow, choose, accept                      last known token and one behind each of its drafts
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

from infer.kernels.cpu import sampling
from infer.kernels.cpu.compiled import compiled_address
from infer.kernels.cpu.recording import Recording
from infer.kernels.cpu.records import SAMPLE
from infer.kernels.cpu.sample_rows import bind
from infer.kernels.cpu.state import field_offset
from infer.kernels.cpu.table import BARRIER, Command, DispatchTable, Walk
from infer.kernels.cpu.threads import team
from infer.sampling.history import History
from infer.sampling.rows import Rows

State = npt.NDArray[Any]


@final
class Chain:
    """The table with the sampler's commands behind it, for rows of parameters. Walked once per token."""

    def __init__(self, recording: Recording, logits: Tensor, rows: Rows, history: History | None) -> None:
        positions = recording.step.positions.data_ptr()
        self.rows, self.history = rows, history
        self._arguments, keeps = bind(logits, rows, history, None, positions, 1)
        self._ended = np.zeros(len(rows), np.int64)
        self._arguments["ended"] = self._ended.ctypes.data
        advance = compiled_address(".sample_advance:make_advance", SAMPLE)
        self.table = DispatchTable(
            [
                *recording.table.commands,
                *sampling.commands(self._arguments, keeps),
                Command(advance, self._arguments, BARRIER, "sample.advance"),
            ]
        )
        self._walk = Walk(self.table)
        self._walk.arguments["stop"] = self._arguments.ctypes.data + field_offset(SAMPLE, "stop")

    def run(
        self, state: npt.NDArray[Any], count: int, stop_ids: Sequence[int], num_threads: int | None
    ) -> Int[Tensor, "steps rows"]:
        generated, stops = np.zeros((count, len(self.rows)), np.int64), np.array(stop_ids, np.int64)
        arguments = self._arguments
        arguments["generated"], arguments["num_generated"], arguments["stop"] = generated.ctypes.data, 0, 0
        arguments["stop_ids"], arguments["num_stop_ids"] = stops.ctypes.data, len(stops)
        self._ended[:] = 0
        self._walk.arguments["repeats"] = count
        team().run(self._walk, state, num_threads)
        return torch.from_numpy(generated[: int(arguments["num_generated"][0])])


@final
class Verifier:
    """A step that samples some of its rows, and goes on sampling a row while its drafts turn out right."""

    def __init__(
        self, recording: Recording, logits: Tensor, rows: Rows, history: History | None, num_entries: int
    ) -> None:
        self.rows, self.history, self.num_entries = rows, history, num_entries
        num_rows, num_drafts = len(rows), num_entries - 1
        self._positions, self._drafts = np.zeros(num_rows, np.int64), np.zeros((num_rows, max(1, num_drafts)), np.int64)
        self._lines, self._alive, self._num_drafts, self._counts = np.zeros((4, num_rows), np.int64)
        self._generated = np.zeros((num_entries, num_rows), np.int64)
        one, keeps = bind(logits, rows, history, None, self._positions.ctypes.data, 0)
        self._arguments = one.repeat(num_entries)
        self._arguments["entry"] = range(num_entries)
        self._arguments["draft_stride"] = self._drafts.shape[1]
        for name, memory in (
            ("starts", self._lines),
            ("alive", self._alive),
            ("drafts", self._drafts),
            ("num_drafts", self._num_drafts),
            ("counts_sampled", self._counts),
            ("generated", self._generated),
        ):
            self._arguments[name] = memory.ctypes.data
        accept = compiled_address(".sample_advance:make_accept", SAMPLE)
        await_mask = compiled_address(".sample_advance:make_await_mask", SAMPLE)
        entries = []
        for entry in range(num_entries):
            own = self._arguments[entry : entry + 1]
            entries += [*sampling.commands(own, keeps), Command(accept, own, BARRIER, "sample.accept")]
        first = Command(await_mask, self._arguments[:1], BARRIER, "sample.await_mask")
        self.table = DispatchTable([*recording.table.commands, first, *entries])
        self._walk = Walk(self.table)

    def run(
        self,
        state: State,
        positions: Sequence[int],
        drafts: Sequence[Sequence[int]],
        is_wanted: Sequence[bool],
        masks: Int[Tensor, "lines words"] | None,
        mask_ready: npt.NDArray[np.int64] | None,
        num_threads: int | None,
    ) -> list[list[int]]:
        """The tokens of each wanted row: those of its drafts that were right and the one behind them, which may be the
        code of a failed row. `masks` may be filled while this runs, if `mask_ready` tells when it is done."""
        num_drafts = [len(row) for row in drafts]
        lines = [count + 1 if wanted else 0 for count, wanted in zip(num_drafts, is_wanted, strict=True)]
        self._positions[:], self._alive[:], self._num_drafts[:] = positions, is_wanted, num_drafts
        self._lines[:] = list(accumulate(lines, initial=0))[:-1]
        for row, ids in enumerate(drafts):
            self._drafts[row, : len(ids)] = ids
        self._counts[:] = 0
        self._arguments["allowed"] = 0 if masks is None else masks.data_ptr()
        self._arguments["mask_ready"] = 0 if mask_ready is None else mask_ready.ctypes.data
        team().run(self._walk, state, num_threads)
        return [self._generated[:count, row].tolist() for row, count in enumerate(self._counts.tolist())]
