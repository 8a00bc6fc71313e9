"""Snapshots of an engine, as values: for pictures, statistics, and forecasts of waiting times."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self, final

from infer.engine.step.sequence import Sequence
from infer.engine.step.step_costs import Costs


@final
@dataclass(frozen=True)
class SequenceState:
    """A sequence. It waits if `slot` is None. `num_computed` of its `num_tokens` are in the cache."""

    number: int
    tenant: str
    priority: int
    slot: int | None
    num_prompt_tokens: int
    num_tokens: int
    num_computed: int
    num_reused: int
    num_preemptions: int
    seconds: float  # since its submission

    @classmethod
    def of(cls, sequence: Sequence, now: float) -> Self:
        """Return the state of a sequence. Except `slot` and `seconds`, fields are attributes of the sequence."""
        own = {"slot": sequence.slot if sequence.has_slot else None, "seconds": now - sequence.submitted_at}
        return cls(**own | {each.name: getattr(sequence, each.name) for each in fields(cls) if each.name not in own})


@final
@dataclass(frozen=True)
class PoolState:
    """The pages of a group of layers: used by slots, or free. Some free pages are remembered for their content."""

    num_pages: int
    num_free: int


@final
@dataclass(frozen=True)
class EngineSnapshot:
    """An engine. `costs` are in seconds; `predicted_over_measured` has percentiles 10, 50 and 90 of the last steps."""

    sequences: tuple[SequenceState, ...]
    num_slots: int
    max_running: int
    pools: tuple[PoolState, ...]
    num_steps: int
    num_preemptions: int  # includes active sequences, like the next count
    reused_tokens: int
    costs: Costs
    predicted_over_measured: tuple[float, float, float] | None
    work_by_tenant: Mapping[str, float]  # the tenant with the least is served next
    expected_answer: int  # tokens that are assumed for an answer of unknown length

    @property
    def running(self) -> tuple[SequenceState, ...]:
        return tuple(each for each in self.sequences if each.slot is not None)

    @property
    def waiting(self) -> tuple[SequenceState, ...]:
        return tuple(each for each in self.sequences if each.slot is None)

    def to_json(self) -> dict[str, Any]:
        """Return plain lists, dicts, numbers and strings."""
        return asdict(self) | {"costs": self.costs._asdict()}
