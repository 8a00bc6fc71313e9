"""The masks of a step's grammars: the tokens that each sequence may get next.

They are filled before the step, by a thread during the step, or between the steps of a multi-step.
"""

import math
import time
from collections import abc
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, final

import numpy as np
import torch

from infer.compute import ops
from infer.compute.operands.step import Chunk, Masks, StepEnd, TokenIds
from infer.compute.sampling.masks import num_mask_words
from infer.engine.step.sequence import Sequence
from infer.errors import ConstraintError
from infer.text.grammar.constraint import Mask

Works = abc.Sequence[tuple[Sequence, Chunk]]  # the part of a step that belongs to each sequence
HAND_OVER_SECONDS = 300e-6  # extra time of a mask that another thread fills


@final
class MaskFiller:
    """Fills the masks of an engine's steps, one step after the other.

    If all cores compute, and filling masks takes less time than waking a thread, they are filled before the step.
    """

    def __init__(self, backend: ops.Backend) -> None:
        self.backend = backend
        self._executor: ThreadPoolExecutor | None = None
        self._seconds_per_line = math.inf  # the last measurement
        self._filling: Filling | None = None  # the last step's

    def start(self, works: Works) -> "Filling | None":
        """Begin to fill the masks of chunks whose sequences have a grammar. Return None if there are none."""
        filling = self._filling
        if filling is None or not filling.fits(works):
            if not any(sequence.grammar is not None and chunk.has_logits for sequence, chunk in works):
                return None
            filling = self._filling = Filling(self, works)
        filling.begin()
        return filling

    def learn(self, num_logits: int, seconds: float) -> bool:
        """Store how long it took to fill `num_logits` rows, and return True if that needs no other thread."""
        self._seconds_per_line = seconds / num_logits
        return self.backend.computes_on_host and seconds < HAND_OVER_SECONDS

    def run(self, fill: Callable[[], None], num_logits: int) -> Future[None] | None:
        """Fill the masks now and return None, or let the other thread fill them and return its future."""
        if self.backend.computes_on_host and self._seconds_per_line * num_logits < HAND_OVER_SECONDS:
            self._measure(fill, num_logits)
            return None
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "infer-masks", self.backend.forbid_forwards)
        try:
            return self._executor.submit(self._measure, fill, num_logits)
        except RuntimeError:  # the main thread has ended, after which executors accept no work
            self._measure(fill, num_logits)
            return None

    def close(self) -> None:
        """Wait for the last step's masks, and end the thread. The next step begins anew."""
        if self._executor is not None:
            self._executor.shutdown()
        self._executor = self._filling = None

    def _measure(self, fill: Callable[[], None], num_logits: int) -> None:
        started = time.thread_time()
        fill()
        self.learn(num_logits, time.thread_time() - started)


class _Job(NamedTuple):
    """The masks of a sequence with a grammar in one step."""

    row: int
    sequence: Sequence
    masks: abc.Sequence[Mask]
    drafts: abc.Sequence[int]

    def advance(self, token_id: int, is_last: bool) -> bool:
        """Move past a token. Return False if the row ends."""
        grammar = self.sequence.grammar
        try:
            return grammar is not None and grammar.constraint.advance(token_id, self.masks[0], is_last)
        except Exception as error:
            if not isinstance(error, ConstraintError):  # that one is raised again when the token is accepted
                self.sequence.blame(error)
            return False


@final
class Filling:
    """The masks of one step; each step of a multi-step reuses their memory.

    `num_counted` has the number of valid tokens per row whose grammar ended, forced a token or failed in a multi-step.
    The other rows continue as long as fewer than half of the rows are such rows.
    """

    def __init__(self, filler: MaskFiller, works: Works) -> None:
        self._filler, self._sequences = filler, [sequence for sequence, _ in works]
        counts = [chunk.num_logits for _, chunk in works]
        ends = np.cumsum(counts).tolist()
        self._has_one_each = all(count == 1 for count in counts)
        self._lines = np.full((ends[-1], num_mask_words(works[0][0].request.vocab_size)), -1, np.int32)
        self._is_ready = np.zeros(1, np.int64)
        self._publish = filler.backend.publisher(self._is_ready)
        self.masks = Masks(torch.from_numpy(self._lines), self._is_ready, self._wait, self._advance)
        self._jobs = [
            _Job(row, sequence, list(self._lines[end - chunk.num_logits : end]), chunk.drafts)
            for row, ((sequence, chunk), end) in enumerate(zip(works, ends, strict=True))
            if sequence.grammar is not None and chunk.has_logits
        ]
        self.num_counted: dict[int, int] = {}
        self._promise: Future[None] | None = None
        self._is_apart = False  # in a multi-step: True if another thread fills the lines
        self._filled_at = list[float]()  # when another thread had filled the lines of each step
        self._seconds_between = 0.0  # seconds between steps, for advancing grammars

    def fits(self, works: Works) -> bool:
        """Return True if these masks can also serve this step: the same sequences, each with its next token."""
        is_done = self._promise is None or self._promise.done()
        is_same = self._has_one_each and self._sequences == [sequence for sequence, _ in works]
        return is_same and is_done and all(chunk.num_logits == 1 for _, chunk in works)

    def held_up(self, ends: abc.Sequence[StepEnd]) -> float:
        """Return the seconds for which steps waited for masks, or for grammars between them."""
        late = (max(0.0, filled - end.forward) for filled, end in zip(self._filled_at, ends, strict=False))
        return sum(late) + self._seconds_between

    def begin(self) -> None:
        self.num_counted.clear()
        self._filled_at.clear()
        self._seconds_between = 0.0
        self._begin_fill()

    def _begin_fill(self) -> None:
        self._is_ready[0] = 0
        self._promise = self._filler.run(self._fill, len(self._lines))

    def _wait(self) -> None:
        if self._promise is not None:
            self._promise.result()

    def _advance(self, token_ids: TokenIds, num_steps: int, num_generated: int) -> bool:
        start, is_last = len(self._sequences) * (num_generated - 1), num_generated == num_steps
        if num_generated == 1:
            self._is_apart = self._promise is not None
        if self._is_apart:
            self._wait()  # it is done; this raises its exception, if any
        is_timed = self._is_apart or num_generated == 1  # reading the clock costs 9 µs here
        started = time.perf_counter() if is_timed else 0.0
        for job in self._jobs:
            if job.row in self.num_counted:
                continue
            if not job.advance(token_ids[start + job.row], is_last or self._is_apart):
                self.num_counted[job.row] = num_generated
                job.masks[0][:] = -1
            elif not self._is_apart:
                job.sequence.stats.masks_filled += not is_last
        if self._is_apart:
            self._seconds_between += time.perf_counter() - started
        if self.num_counted and 2 * len(self.num_counted) >= len(self._sequences):
            return False
        if self._is_apart:
            if not is_last:
                self._begin_fill()
            return True
        return num_generated > 1 or self._filler.learn(len(self._lines), time.perf_counter() - started)

    def _fill(self) -> None:
        try:
            for job in self._jobs:
                if job.row not in self.num_counted:
                    job.sequence.attempt(partial(job.sequence.fill, job.masks, job.drafts), None)
        finally:
            self._filled_at.append(time.perf_counter())
            self._publish()
