"""The suites of `infer bench`: the sizes and the sampling of their configs, each of which `speed.measure` measures."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from infer.cli.bench.speed import Workload

_GREEDY = {"temperature": 0.0}
_SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}


class Config(NamedTuple):
    prompt_tokens: int
    new_tokens: int
    sampling: Mapping[str, Any] = _GREEDY


CONFIGS = {
    "short-greedy": Config(64, 64),
    "medium-greedy": Config(256, 256),
    "prefill-heavy": Config(1024, 64),
    "decode-heavy": Config(64, 1024),
    "medium-sampled": Config(256, 256, _SAMPLED),
    "long-context": Config(1024, 1024),
    "medium-full-pipeline": Config(256, 256, {**_SAMPLED, "repetition_penalty": 1.1}),
}
_NUM_CONFIGS: Mapping[str, int] = {"quick": 2, "standard": 5, "full": len(CONFIGS)}  # the first ones


def workloads(suite: str, *, repeats: int, warmups: int, seed: int) -> dict[str, Workload]:
    """Return the workloads of a suite's configs, by name."""
    found = list(CONFIGS.items())[: _NUM_CONFIGS[suite]]
    return {
        name: Workload(
            config.prompt_tokens,
            config.new_tokens,
            repeats=repeats,
            warmups=warmups,
            seed=seed,
            sampling=config.sampling,
        )
        for name, config in found
    }
