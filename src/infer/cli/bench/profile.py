"""Measure the time of a step, per operation and per layer, with the counters of the recorded table.

Cycles are converted to seconds with the clock's time for the same runs of the dispatch loop.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, final

import torch

from infer.cli.bench.memory_probe import MemoryProbe
from infer.cli.bench.mixer_costs import mixer_bytes, mixer_flops
from infer.cli.bench.speed import (
    OnProgress,
    Workload,
    make_prompt,
    projections_by_kind,
    token_bytes,
    weight_bytes_by_kind,
)
from infer.compute.operands.weights import Projection
from infer.engine.runner.runner import Runner
from infer.llm import LLM
from infer.models.transformer import Transformer

CALIBRATION_TOKENS = 256  # tokens of a step that is long compared with Python's overhead
PREFILL_STEPS, DECODE_STEPS = 3, 32
_Cycles = list[tuple[str, int]]  # per command of a step: label and cycles
NORMS = ("normalize", "post_norm")  # kinds of commands that are shown as one


@final
@dataclass(frozen=True)
class StepOperation:
    """All commands of one kind. Seconds, bytes and floating-point operations are per token.

    A multiplication with its addition counts as two operations.
    """

    kind: str
    calls: int
    seconds: float
    num_bytes: int  # read from memory, or written by layers with a state; 0 if many tokens share the reads
    num_flops: int


@final
@dataclass(frozen=True)
class Profile:
    """One step of `num_tokens` tokens after `context` others.

    Layers are `embed`, `L0` …, `head`, each with its seconds per token.
    """

    name: str
    num_tokens: int
    context: int
    operations: tuple[StepOperation, ...]
    layers: tuple[tuple[str, float], ...]
    read_bandwidth: float  # bytes per second with the same number of threads, measured before and after

    @property
    def seconds(self) -> float:
        """Seconds per token."""
        return sum(operation.seconds for operation in self.operations)

    @property
    def num_calls(self) -> int:
        return sum(operation.calls for operation in self.operations)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": self.seconds}


@torch.inference_mode()
def profile(
    llm: LLM,
    workload: Workload,
    on_progress: OnProgress = lambda done, total: None,
    *,
    read_bytes: int | None = None,
) -> tuple[Profile, Profile]:
    """Return the profiles of the prefill and of a decode step, without its sampling.

    Bandwidth is measured as in `measure`. Raises InvalidRequestError for a device whose steps are not recorded as a
    table.
    """
    model, num_parts = llm.model, PREFILL_STEPS + DECODE_STEPS
    prompt = make_prompt(model, max(workload.prompt_tokens, workload.depth), seed=0)
    prefill_steps, decode_steps = list[_Cycles](), list[_Cycles]()
    with (
        MemoryProbe(model.backend.num_threads(), read_bytes or token_bytes(model, workload.depth)) as memory,
        model.backend.threads(),
    ):
        runner = Runner(model, workload.max_seq_len)
        seconds_per_cycle = _calibrate(runner, prompt[:CALIBRATION_TOKENS])
        for step in range(PREFILL_STEPS):
            prefill_steps.append(runner.profile(prompt[: workload.prompt_tokens]))
            on_progress(step + 1, num_parts)
        runner.extend(0, prompt[: workload.depth])
        rates = [memory.read_rate()]
        for step in range(DECODE_STEPS):
            decode_steps.append(runner.profile(prompt[:1]))
            on_progress(PREFILL_STEPS + step + 1, num_parts)
        rates.append(memory.read_rate())
    prefill, decode = (_seconds_by_label(steps, seconds_per_cycle) for steps in (prefill_steps, decode_steps))
    return (
        summarize(model, "prefill", prefill, workload.prompt_tokens, 0, max(rates)),
        summarize(model, "decode", decode, 1, workload.depth, max(rates)),
    )


def summarize(
    model: Transformer,
    name: str,
    seconds_by_command: Sequence[tuple[str, float]],
    num_tokens: int,
    context: int,
    read_bandwidth: float,
) -> Profile:
    """Return the sums over the commands of a step of `num_tokens` tokens, in the order in which they first run."""
    calls, seconds, layers = Counter[str](), defaultdict[str, float](float), defaultdict[str, float](float)
    for label, spent in seconds_by_command:
        layer, kind = split_label(label)
        calls[kind] += 1
        seconds[kind] += spent / num_tokens
        layers[layer] += spent / num_tokens
    num_bytes: dict[str, int] = {}
    if num_tokens == 1:
        num_bytes = weight_bytes_by_kind(model) | mixer_bytes(model.architecture, model.kv_type, context)
    num_flops = flops_by_kind(model, num_tokens, context)
    operations = [
        StepOperation(kind, calls[kind], seconds[kind], num_bytes.get(kind, 0), num_flops.get(kind, 0))
        for kind in calls
    ]
    return Profile(name, num_tokens, context, tuple(operations), tuple(layers.items()), read_bandwidth)


def split_label(label: str) -> tuple[str, str]:
    """Return layer and kind: `L12.qkv.matmul Q4_1` → (`L12`, `qkv`); `head.normalize` → (`head`, `norm`)."""
    parts = label.split(".", maxsplit=2)
    layer, kind = parts[0], parts[1] if parts[0][0] == "L" and len(parts) == 3 else parts[0]
    return layer, "norm" if parts[-1] in NORMS else kind


def flops_by_kind(model: Transformer, num_tokens: int, context: int) -> dict[str, int]:
    """Return a token's share of a step's operations. Only the step's last token is multiplied by the head."""
    kinds = projections_by_kind(model).items()
    flops = {kind: sum(_flops(each) for each in found) for kind, found in kinds}
    flops["head"] //= num_tokens
    return flops | mixer_flops(model.architecture, num_tokens, context)


def _flops(projection: Projection) -> int:
    return int(projection.used_share * 2 * projection.in_features * projection.out_features)


def _calibrate(runner: Runner, token_ids: Sequence[int]) -> float:
    """Return the seconds per cycle: the smallest of a few, because disturbances only increase the clock's time."""
    rates = []
    for _ in range(PREFILL_STEPS):
        started = time.perf_counter()
        cycles = sum(spent for _, spent in runner.profile(token_ids))
        rates.append((time.perf_counter() - started) / max(cycles, 1))
    return min(rates)


def _seconds_by_label(steps: Sequence[_Cycles], seconds_per_cycle: float) -> list[tuple[str, float]]:
    """Return the label of each command with its median over the steps, in seconds."""
    labels = [label for label, _ in steps[0]]
    cycles = [median(spent) for spent in zip(*([spent for _, spent in step] for step in steps), strict=True)]
    return [(label, spent * seconds_per_cycle) for label, spent in zip(labels, cycles, strict=True)]
