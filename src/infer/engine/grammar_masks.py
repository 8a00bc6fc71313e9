"""The grammars' masks of a step: filled at once, by another thread while it runs, or between two steps of several."""

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import NamedTuple, final

import numpy as np
import torch

from infer import ops
from infer.engine.running import Mask, Running
from infer.errors import ConstraintError
from infer.operands.step import Masks, Part, TokenIds
from infer.sampling.masks import num_mask_words

HAND_OVER_SECONDS = 300e-6  # what a mask that another thread fills costs besides


@final
class MaskFiller:
    """For the steps of a batch, one after the other. Where all cores compute and masks take less than waking a thread,
    they are filled at once."""

    def __init__(self, device: torch.device) -> None:
        self.backend = ops.backend_of(device)
        self._executor: ThreadPoolExecutor | None = None
        self._owner = 0  # the process that has its thread
        self._seconds_per_line = math.inf  # as last measured
        self._filling: _Filling | None = None  # the last one

    def start(self, active: Sequence[Running], parts: Sequence[Part]) -> Masks | None:
        """Begin with the lines of the constrained rows; None where there are none."""
        filling = self._filling
        if filling is None or not filling.fits(active, parts):
            if not any(_is_wanted(running, part) for running, part in zip(active, parts, strict=True)):
                return None
            filling = self._filling = _Filling(self, active, parts)
        filling.begin()
        return filling.masks

    def learn(self, num_lines: int, seconds: float) -> bool:
        """What filling so many took; whether it is quick enough to do at once."""
        self._seconds_per_line = seconds / num_lines
        return self.backend.computes_on_host and seconds < HAND_OVER_SECONDS

    def run(self, fill: Callable[[], None], num_lines: int) -> Future[None] | None:
        """None where it is done; else the other thread's promise."""
        if self.backend.computes_on_host and self._seconds_per_line * num_lines < HAND_OVER_SECONDS:
            self._measure(fill, num_lines)
            return None
        if self._executor is None or self._owner != os.getpid():
            self._owner = os.getpid()
            self._executor = ThreadPoolExecutor(1, "infer-masks", self.backend.forbid_forwards)
        return self._executor.submit(self._measure, fill, num_lines)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()

    def _measure(self, fill: Callable[[], None], num_lines: int) -> None:
        started = time.thread_time()
        fill()
        self.learn(num_lines, time.thread_time() - started)


class _Job(NamedTuple):
    """A constrained row's lines of one step."""

    row: int
    running: Running
    masks: Sequence[Mask]
    drafts: Sequence[int]

    def advance(self, token_id: int, is_last: bool) -> bool:
        """False also where the grammar raises: a ConstraintError it raises again when the token is accepted."""
        return self.running.attempt(partial(self._try_advance, token_id, is_last), False)

    def _try_advance(self, token_id: int, is_last: bool) -> bool:
        constraint = self.running.constraint
        with suppress(ConstraintError):
            return constraint is not None and constraint.advance(token_id, self.masks[0], is_last)
        return False


@final
class _Filling:
    """The lines of one step, and of those of its multi-step, which take each other's places."""

    def __init__(self, filler: MaskFiller, active: Sequence[Running], parts: Sequence[Part]) -> None:
        self._filler, self._active = filler, list(active)
        counts = [part.num_lines for part in parts]
        ends = np.cumsum(counts).tolist()
        self._has_one_each = all(count == 1 for count in counts)
        self._lines = np.full((ends[-1], num_mask_words(active[0].generation.vocab_size)), -1, np.int32)
        self._is_ready = np.zeros(1, np.int64)
        self._publish = filler.backend.publisher(self._is_ready)
        self.masks = Masks(torch.from_numpy(self._lines), self._is_ready, self._wait, self._advance)
        self._jobs = [
            _Job(row, running, list(self._lines[end - part.num_lines : end]), part.drafts)
            for row, (running, part, end) in enumerate(zip(active, parts, ends, strict=True))
            if _is_wanted(running, part)
        ]
        self._promise: Future[None] | None = None
        self._is_apart = False  # in a multi-step, another thread fills the lines

    def fits(self, active: Sequence[Running], parts: Sequence[Part]) -> bool:
        """Whether it serves this step too: rows that go on token by token."""
        is_done = self._promise is None or self._promise.done()
        is_same = self._has_one_each and self._active == active and all(part.num_lines == 1 for part in parts)
        return is_same and is_done

    def begin(self) -> None:
        self._is_ready[0] = 0
        self._promise = self._filler.run(self._fill, len(self._lines))

    def _wait(self) -> None:
        if self._promise is not None:
            self._promise.result()

    def _advance(self, token_ids: TokenIds, num_steps: int, num_generated: int) -> bool:
        start, is_last = len(self._active) * (num_generated - 1), num_generated == num_steps
        if num_generated == 1:
            self._is_apart = self._promise is not None
        if self._is_apart:
            self._wait()  # it is done: this raises what it raised
            goes_on = all(job.advance(token_ids[start + job.row], True) for job in self._jobs)
            if goes_on and not is_last:
                self.begin()
            return goes_on
        started = time.perf_counter() if num_generated == 1 else 0.0  # the clock alone takes 9 µs here
        for job in self._jobs:
            if not job.advance(token_ids[start + job.row], is_last):
                return False
            job.running.stats.masks_filled += not is_last
        return num_generated > 1 or self._filler.learn(len(self._lines), time.perf_counter() - started)

    def _fill(self) -> None:
        try:
            for job in self._jobs:
                job.running.attempt(partial(job.running.fill, job.masks, job.drafts), None)
        finally:
            self._publish()


def _is_wanted(running: Running, part: Part) -> bool:
    return running.constraint is not None and part.is_wanted
