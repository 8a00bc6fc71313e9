"""Claims about the steps that CUDA and OpenCL submit ahead, with a fake device that only counts."""

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from infer.compute.backends.device_steps import DeviceSteps, Header, Steps
from infer.compute.operands.step import Interrupt, Masks

NUM_ROWS, LAST = 2, 6  # the sixth step is the last one


class Device:
    """A queue that works only when the host waits. Row r of step s gets the token 10 s + r."""

    def __init__(self, group: int, *, interrupted_at: int = 0) -> None:
        self.group, self.interrupt, self.interrupted_at = group, Interrupt(0), interrupted_at
        self.submitted, self.waits, self.words = 0, list[int](), list[int]()
        self.ids = (ctypes.c_int64 * (20 * NUM_ROWS))()

    def enqueue_sampler(self, words: Tensor | None) -> None:
        self.words += [] if words is None else [int(words[0, 0])]
        for row in range(NUM_ROWS):
            self.ids[self.submitted * NUM_ROWS + row] = 10 * self.submitted + row
        self.submitted += 1

    def mark(self) -> Callable[[], bool]:
        done = self.submitted

        def is_over() -> bool:
            self.waits.append(self.submitted - done)
            self.interrupt.value = int(0 < self.interrupted_at <= done)
            return done >= LAST

        return is_over

    def look(self) -> Header:
        return Header(min(self.submitted, LAST), self.submitted >= LAST)

    def run(self, count: int, masks: Masks | None = None) -> Steps:
        steps = DeviceSteps(self.group, lambda: None, self.enqueue_sampler, self.mark, self.look, self.ids)
        return steps.run(count, NUM_ROWS, masks, self.interrupt)


def tokens(num_steps: int) -> list[list[int]]:
    return [[10 * step + row for step in range(num_steps)] for row in range(NUM_ROWS)]


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("count", [1, 5, 6, 19])
def test_steps_end_at_the_last_one_with_one_group_submitted_ahead(group: int, count: int) -> None:
    device = Device(group)
    found = device.run(count)
    assert found.token_ids == tokens(min(count, LAST))
    ends = [end.sampling for end in found.ends]
    assert (len(ends), ends) == (min(count, LAST), sorted(ends))
    assert set(device.waits) <= set(range(1, group + 1))  # the device always has work
    assert device.submitted <= -(-LAST // group) * group + group


def test_an_interrupt_ends_the_steps_with_those_that_are_submitted() -> None:
    device = Device(1, interrupted_at=2)
    assert (device.run(19).token_ids, device.submitted) == (tokens(3), 3)


def test_masks_are_awaited_between_the_forward_and_the_sampler_of_each_step() -> None:
    device, calls = Device(4), list[str]()
    words = torch.zeros(NUM_ROWS, 1, dtype=torch.int32)

    def advance(ids: object, count: int, done: int) -> bool:
        calls.append(f"advance {done} of {count}")
        words[0, 0] = done
        return done < 3

    masks = Masks(words, np.ones(1, np.int64), lambda: calls.append("wait"), advance)
    assert device.run(9, masks).token_ids == tokens(3)
    assert calls == ["wait", "advance 1 of 9", "wait", "advance 2 of 9", "wait", "advance 3 of 9"]
    assert device.words == [0, 1, 2]
    assert Device(1).run(9, Masks(words, masks.is_ready, masks.wait, lambda *_: True)).token_ids == tokens(LAST)
