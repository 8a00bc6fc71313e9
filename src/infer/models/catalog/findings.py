"""A finding of `infer doctor`, which every check returns."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["network", "ids", "vocabulary", "template", "converter", "not finite", "zeros", "scales", "outlier"]


@dataclass(frozen=True)
class Finding:
    """One fault of a model's files: its place, the value with the rule that it breaks, and the fix."""

    kind: Kind
    place: str  # the tensor or the key, by its name in the file
    problem: str
    fix: str
    requantise: str = ""  # the tensor that must be quantised again

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}: {self.fix}"
