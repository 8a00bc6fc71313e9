"""A step between its launch and its end, and each sequence's part in it."""

from dataclasses import dataclass
from typing import NamedTuple, final

from infer.compute.operands.step import Chunk, Masks
from infer.compute.ops import PendingStep
from infer.engine.step.scheduler import Plan
from infer.engine.step.sequence import Sequence
from infer.engine.step.step_shares import StepPart


class Work(NamedTuple):
    """One sequence's share of a step."""

    sequence: Sequence
    chunk: Chunk

    @property
    def counts(self) -> bool:
        """False if the sequence ended or lost its slot after the launch. Then the step's results for it are dropped."""
        return any(chunk is self.chunk for chunk in self.sequence.launched)


@final
@dataclass
class LaunchedStep:
    """A step that runs or has ended."""

    plan: Plan
    works: list[Work]
    pending: PendingStep
    masks: Masks | None
    parts: list[StepPart]  # parts of several tenants
    started: float  # time.perf_counter before the step was planned
    is_multi_step: bool
    is_behind: bool  # it was planned while another one ran
    is_kept: bool = False  # the cache has already kept its chunks, because a step is planned while it runs

    @property
    def counts(self) -> bool:
        """True if any sequence still takes part."""
        return any(work.counts for work in self.works)

    @property
    def may_be_followed(self) -> bool:
        """True if the number of tokens that the cache will keep is known before the step's tokens are."""
        is_single = not self.is_multi_step and not any(self.plan.num_drafts)
        return self.pending.is_running and is_single and self.masks is None
