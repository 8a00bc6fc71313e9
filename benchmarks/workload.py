"""What bench_generation runs: prompts of an exact length, and the seven canonical configs in three suites."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SEED = 42
PASSAGE = (
    "The lighthouse keeper wrote down the weather every morning before breakfast. On most days the line was short: "
    "wind from the west, some cloud, the sea grey and busy. But when a storm had passed in the night he took his time, "
    "sharpened the pencil twice, and described how the light had moved across the water. "
)


@dataclass(frozen=True)
class Config:
    """One workload; `sampling` holds what differs from greedy."""

    name: str
    prompt_tokens: int
    new_tokens: int
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})


_SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}

CONFIGS = {
    config.name: config
    for config in (
        Config("short-greedy", 64, 64),
        Config("medium-greedy", 256, 256),
        Config("prefill-heavy", 1024, 64),
        Config("decode-heavy", 64, 1024),
        Config("long-context", 1024, 1024),
        Config("medium-sampled", 256, 256, _SAMPLED),
        Config("medium-full-pipeline", 256, 256, _SAMPLED | {"repetition_penalty": 1.1}),
    )
}

_QUICK = ("short-greedy", "medium-greedy")
SUITES = {
    "quick": _QUICK,
    "standard": (*_QUICK, "prefill-heavy", "decode-heavy", "medium-sampled"),
    "full": tuple(CONFIGS),
}


def make_synthetic_prompt(encode: Callable[[str], list[int]], num_tokens: int) -> list[int]:
    """A passage repeated until it is long enough, cut to exactly `num_tokens` ids."""
    repeats = 1
    while len(token_ids := encode(PASSAGE * repeats)) < num_tokens:
        repeats *= 2
    return token_ids[:num_tokens]
