"""What all rows of a run have in common. No torch: the process that writes needs none."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from infer.engine.request_options import RequestOptions


class Line(NamedTuple):
    """What is written for a row."""

    row_id: str
    text: str
    has_failed: bool


Write = Callable[[Line], None]


@final
@dataclass(frozen=True)
class BatchSettings:
    """`values` of `SamplingParams` are for rows that have none of their own; `model` is its name in the lines."""

    model: str
    seed: int
    batch_size: int
    values: Mapping[str, Any]
    options: RequestOptions
