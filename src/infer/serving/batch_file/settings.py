"""The settings that all rows of a run share. Loads no torch, because the process that writes the lines needs none."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from infer.engine.step.request_options import RequestOptions


class Line(NamedTuple):
    """The line that is written for a row."""

    row_id: str
    text: str
    has_failed: bool


Write = Callable[[Line], None]


@final
@dataclass(frozen=True)
class BatchSettings:
    """The settings of a run. `model` is the model's name in the lines.

    `values` are fields of `SamplingParams`, for rows that do not set them.
    """

    model: str
    seed: int
    batch_size: int
    values: Mapping[str, Any]
    options: RequestOptions
