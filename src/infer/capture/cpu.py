"""A forward recorded once as a table of commands, and run for any step: decode, verify, a batch, a chunk of a prompt.

The table reads the numbers of tokens and of wanted logits, and the step's arrays, from fixed slots when it is walked
(`kernels.cpu.state`); nothing else changes between walks. So there is one recording for a model and its cache, and
what it computes is what the same ops compute one by one, to the bit.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from infer.batch import Step
from infer.errors import InvalidRequestError
from infer.kernels.cpu import sampling
from infer.kernels.cpu.compiled import compiled_address
from infer.kernels.cpu.recording import Recording, record
from infer.kernels.cpu.sample_advance import make_advance
from infer.kernels.cpu.sample_rows import SAMPLE, bind
from infer.kernels.cpu.state import field_offset
from infer.kernels.cpu.table import BARRIER, Command, DispatchTable, Walk
from infer.kernels.cpu.threads import team
from infer.sampling.history import History
from infer.sampling.rows import Rows

Forward = Callable[[Step], Tensor]


@final
class CapturedForward:
    """`forward(step)` → logits, recorded for up to `capacity` tokens at once; longer steps run in pieces.

    The tensors that forward reads and writes (weights, cache) must stay where they are.
    """

    def __init__(self, forward: Forward, capacity: int = 512, wanted_capacity: int = 32) -> None:
        with record(capacity, wanted_capacity) as self._recording:
            self._logits = forward(self._recording.step)
        self.capacity, self.wanted_capacity = capacity, wanted_capacity
        self.table = self._recording.table
        self._walk = Walk(self.table)
        self._chain: Chain | None = None

    def run(self, step: Step, num_threads: int | None = None) -> Float[Tensor, "wanted vocab"]:
        """The wanted logits, in a buffer that the next run overwrites if they fit one piece."""
        pieces = []
        for piece in self._pieces(step):
            self._fill(piece)
            team().run(self._walk, self._recording.state, num_threads)
            pieces.append(self._logits[: len(piece.wanted)])
            if len(piece.tokens) < len(step.tokens):
                pieces[-1] = pieces[-1].clone()
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def run_chain(
        self,
        step: Step,
        count: int,
        rows: Rows,
        history: History | None = None,
        stop_ids: Sequence[int] = (),
        num_threads: int | None = None,
    ) -> Int[Tensor, "steps rows"]:
        """Up to `count` sampled steps without a return to Python, from a step of one token a row, all wanted.

        Fewer if every row met one of stop_ids; the last may hold a negative code, where a row failed. `history` has
        seen the step's tokens and sees what is sampled.
        """
        if len(step.tokens) > self.wanted_capacity:
            raise InvalidRequestError(f"a chain takes up to {self.wanted_capacity} rows, got {len(step.tokens)}")
        if not len(step.tokens) == len(step.wanted) == len(rows):
            raise InvalidRequestError(f"a chain takes one wanted token for each of {len(rows)} rows")
        self._fill(step)
        if self._chain is None or self._chain.rows is not rows or self._chain.history is not history:
            self._chain = Chain(self._recording, self._logits, rows, history)
        return self._chain.run(self._recording.state, count, stop_ids, num_threads)

    def profile(self, step: Step, num_threads: int | None = None) -> list[tuple[str, int]]:
        """Each command's label and the cycles that thread 0 spent in it, barrier included."""
        times = np.zeros(len(self.table.commands), np.int64)
        walk = Walk(self.table)
        walk.arguments["times"] = times.ctypes.data
        for piece in self._pieces(step):
            self._fill(piece)
            team().run(walk, self._recording.state, num_threads)
        return list(zip(self.table.labels, times.tolist(), strict=True))

    def _fill(self, step: Step) -> None:
        slots, state = self._recording.step, self._recording.state
        for name in ("tokens", "positions", "rows", "wanted"):
            values = getattr(step, name)
            getattr(slots, name)[: len(values)] = values
        state["num_tokens"], state["num_wanted"] = len(step.tokens), len(step.wanted)

    def _pieces(self, step: Step) -> Iterator[Step]:
        num_tokens = len(step.tokens)
        if num_tokens <= self.capacity and len(step.wanted) <= self.wanted_capacity:
            yield step
            return
        wanted = step.wanted.tolist()
        if wanted != sorted(wanted):
            raise InvalidRequestError("the wanted tokens of a step longer than the recording must be in order")
        start = 0
        while start < num_tokens:
            end = min(num_tokens, start + self.capacity)
            mine = [index for index in wanted if start <= index < end]
            if len(mine) > self.wanted_capacity:
                mine = mine[: self.wanted_capacity]
                end = mine[-1] + 1
            tokens, positions, rows = (x[start:end] for x in (step.tokens, step.positions, step.rows))
            yield Step(tokens, positions, rows, torch.tensor([index - start for index in mine], dtype=torch.int64))
            start = end


@final
class Chain:
    """The table with the sampler's commands behind it, for rows of parameters. Walked once per token."""

    def __init__(self, recording: Recording, logits: Tensor, rows: Rows, history: History | None) -> None:
        positions = recording.step.positions.data_ptr()
        self.rows, self.history = rows, history
        self._arguments, keeps = bind(logits, rows, history, None, positions, 1)
        self._ended = np.zeros(len(rows), np.int64)
        self._arguments["ended"] = self._ended.ctypes.data
        advance = compiled_address("sample_advance", make_advance, SAMPLE)
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
