"""The grammars' masks of a step: filled at once or by another thread while it runs, in a chain from step to step."""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import final

import numpy as np
import torch

from infer.batch import Masks, Part, TokenIds
from infer.running import Running
from infer.sampling.rows import num_mask_words

HAND_OVER_SECONDS = 300e-6  # what a mask that another thread fills costs besides


@final
class MaskFiller:
    """For the steps of a batch, one after the other. Where all cores compute and masks take less than waking a thread,
    they are filled at once."""

    def __init__(self, *, fills_at_once: bool) -> None:
        self._fills_at_once = fills_at_once
        self._executor: ThreadPoolExecutor | None = None
        self._seconds_per_line = math.inf  # as last measured

    def start(self, active: Sequence[Running], parts: Sequence[Part]) -> Masks | None:
        """Begin with the lines of the constrained rows; None where there are none."""
        wanted = [
            (index, running)
            for index, running in enumerate(active)
            if running.constraint is not None and parts[index].is_wanted
        ]
        if not wanted:
            return None
        filling = _Filling(self, wanted, parts, num_mask_words(active[0].generation.vocab_size))
        filling.begin()
        return Masks(torch.from_numpy(filling.lines), filling.is_ready, filling.wait, filling.follow)

    def learn(self, num_lines: int, seconds: float) -> bool:
        """What filling so many took; whether it is quick enough to do at once."""
        self._seconds_per_line = seconds / num_lines
        return self._fills_at_once and seconds < HAND_OVER_SECONDS

    def run(self, fill: Callable[[], None], num_lines: int) -> Future[None] | None:
        """None where it is done; else the other thread's promise."""
        if self._fills_at_once and self._seconds_per_line * num_lines < HAND_OVER_SECONDS:
            self._measure(fill, num_lines)
            return None
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="infer-masks")
        return self._executor.submit(self._measure, fill, num_lines)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()

    def _measure(self, fill: Callable[[], None], num_lines: int) -> None:
        started = time.thread_time()
        fill()
        self.learn(num_lines, time.thread_time() - started)


@final
class _Filling:
    """The lines of one step, and of those of its chain, which take each other's places."""

    def __init__(
        self, filler: MaskFiller, wanted: Sequence[tuple[int, Running]], parts: Sequence[Part], num_words: int
    ) -> None:
        ends = np.cumsum([part.num_lines for part in parts]).tolist()
        self.lines = np.full((ends[-1], num_words), -1, np.int32)
        self.is_ready = np.zeros(1, np.int64)
        self._filler = filler
        self._rows = [(index, running, self.lines[ends[index] - 1]) for index, running in wanted]  # of a chain
        self._jobs = [
            (running, self.lines[ends[index] - parts[index].num_lines : ends[index]], parts[index].drafts)
            for index, running in wanted
        ]
        self._promise: Future[None] | None = None
        self._is_quick = True  # whether the last mask was filled at once, and the next one may be

    def begin(self) -> None:
        self.is_ready[0] = 0
        self._promise = self._filler.run(self._fill, len(self.lines))
        self._is_quick = self._promise is None

    def wait(self) -> None:
        if self._promise is not None:
            self._promise.result()

    def follow(self, token_ids: TokenIds, start: int, is_last: bool) -> bool:
        if not self._is_quick:
            return self._follow_apart(token_ids, start, is_last)
        started = time.perf_counter()
        for index, running, line in self._rows:
            if not running.follow(token_ids[start + index], None if is_last else line):
                return False
        if (seconds := time.perf_counter() - started) > HAND_OVER_SECONDS:
            self._is_quick = self._filler.learn(len(self.lines), seconds)
        return True

    def _follow_apart(self, token_ids: TokenIds, start: int, is_last: bool) -> bool:
        self.wait()  # it is done: this raises what it raised
        goes_on = all(running.follow(token_ids[start + index], None) for index, running, _ in self._rows)
        if goes_on and not is_last:
            self.begin()
        return goes_on

    def _fill(self) -> None:
        try:
            for running, masks, drafts in self._jobs:
                running.fill(masks, drafts)
        finally:
            self.is_ready[0] = 1
