"""Demands for steps as plain values, and the plan of a step of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from infer.engine.step.scheduler import MAX_STEPS, Plan, Scheduler


@final
@dataclass
class Demand:
    """A `scheduler.Demand` without a sequence, and the numbers of steps that its sequence would report."""

    num_schedulable: int
    num_drafts: int = 0
    max_steps: int = 1
    useful_steps: int = MAX_STEPS
    steps_to_draft: int = MAX_STEPS
    num_computed: int = 0
    entry: int = 0
    is_streamed: bool = False
    checkpoints: tuple[int, ...] = ()


def plan_of(scheduler: Scheduler, demands: Sequence[Demand], step_tokens: int) -> Plan:
    max_steps, to_draft = min(each.max_steps for each in demands), [each.steps_to_draft for each in demands]
    return scheduler.plan(demands, step_tokens, max_steps, steps_to_draft=to_draft)
