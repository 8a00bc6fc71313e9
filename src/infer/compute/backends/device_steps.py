"""Several sampled steps submitted to a device one after the other: forward, then sampler and `advance`.

Without masks there is no wait between two steps: the host reads the result of one group of steps while the next group
runs. A step begun after the last one computes one more token, in reserved positions, and `advance` discards it. With
masks, the host fills them between the forward and the sampler of a step.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, final

from torch import Tensor

from infer.compute.operands.step import Interrupt, Masks, StepEnd, TokenIds

NUM_GENERATED, IS_STOPPED, NUM_STOP_IDS = range(3)  # words of a header, which `advance` reads and writes
_GROUPS_AHEAD = 2


class Header(NamedTuple):
    """State of a multi-step on the device: number of steps that count, and whether no further one does."""

    num_generated: int
    is_stopped: bool


@final
@dataclass(frozen=True)
class DeviceSteps:
    """Submits steps to a device, `group` of them before a result is copied to the host.

    `enqueue_sampler` takes the step's masks. `mark` submits the copy of a header; the function that it returns waits
    for the copy, and returns True if the steps are over. `look` copies the header and the tokens, [steps, rows], to
    `ids`, and waits.
    """

    group: int
    enqueue_forward: Callable[[], object]
    enqueue_sampler: Callable[[Tensor | None], object]
    mark: Callable[[], Callable[[], bool]]
    look: Callable[[], Header]
    ids: TokenIds

    def run(
        self, count: int, num_rows: int, masks: Masks | None, interrupt: Interrupt | None
    ) -> tuple[list[list[int]], list[StepEnd]]:
        """Run up to `count` steps of `num_rows` rows. Return the tokens of each row, and the end of each step."""
        ends = [time.perf_counter()]  # first the start
        if masks is None:
            self._run_ahead(count, interrupt, ends)
        else:
            self._run_masked(count, masks, interrupt, ends)
        num_steps = self.look().num_generated
        _append_ends(ends, num_steps + 1 - len(ends))
        token_ids = [list(self.ids[row : num_steps * num_rows : num_rows]) for row in range(num_rows)]
        return token_ids, [StepEnd(end, end) for end in ends[1 : num_steps + 1]]

    def _run_ahead(self, count: int, interrupt: Interrupt | None, ends: list[float]) -> None:
        under_way = deque[tuple[int, Callable[[], bool]]]()
        for first in range(0, count, self.group):
            size = min(self.group, count - first)
            for _ in range(size):
                self.enqueue_forward()
                self.enqueue_sampler(None)
            under_way.append((size, self.mark()))
            if len(under_way) == _GROUPS_AHEAD:
                size, is_over = under_way.popleft()
                is_stopped = is_over()
                _append_ends(ends, size)
                if is_stopped or _is_set(interrupt):
                    return

    def _run_masked(self, count: int, masks: Masks, interrupt: Interrupt | None, ends: list[float]) -> None:
        """Run steps with masks. `masks.advance` fills the next step's lines, or lets a thread fill them during the
        forward.
        """
        for done in range(1, count + 1):
            self.enqueue_forward()
            masks.wait()
            self.enqueue_sampler(masks.words)
            is_stopped = self.look().is_stopped
            _append_ends(ends, 1)
            if is_stopped or _is_set(interrupt) or not masks.advance(self.ids, count, done):
                return


def _append_ends(ends: list[float], count: int) -> None:
    """Append the ends of `count` steps, the last of which ended now, and which took the same time."""
    last, now = ends[-1], time.perf_counter()
    ends += [last + (now - last) * (index + 1) / count for index in range(count)]


def _is_set(interrupt: Interrupt | None) -> bool:
    return interrupt is not None and interrupt.value != 0
