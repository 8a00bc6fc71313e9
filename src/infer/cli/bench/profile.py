"""Measure the time of a step with the counters of the recorded table, and count its costs, per operation and layer.

Cycles are converted to seconds with the clock's time for the same runs of the dispatch loop. Of operations, only those
of products count: a multiplication with its addition counts as two. Scales, exponentials, gates and norms are not
counted. Of bytes, those of matrices and of the cache count.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, final

import torch

from infer.cli.bench.memory_probe import MemoryProbe
from infer.cli.bench.speed import (
    Workload,
    make_prompt,
    measured_model,
    projections_by_kind,
    token_bytes,
    weight_bytes_by_kind,
)
from infer.compute.kvcache.groups import read_bytes
from infer.compute.operands.architecture import Architecture
from infer.compute.operands.limits import STATE_TOKENS
from infer.compute.operands.mixers import Attention, GatedDeltaNet, Mixer, ShortConv
from infer.engine.runner.runner import Runner
from infer.llm import LLM
from infer.models.load import OnProgress
from infer.models.transformer import Transformer

CALIBRATION_TOKENS = 256  # tokens of a step that is long compared with Python's overhead
PREFILL_STEPS, DECODE_STEPS = 3, 32
_Cycles = list[tuple[str, int]]  # per command of a step: label and cycles
NORMS = ("normalize", "post_norm")  # kinds of commands that are shown as one
_FLOAT_BYTES = 4
_KINDS: dict[type[Mixer], str] = {Attention: "attend", ShortConv: "conv", GatedDeltaNet: "delta_net"}


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
    llm: LLM, workload: Workload, on_progress: OnProgress = lambda done, total: None, *, read_bytes: int | None = None
) -> tuple[Profile, Profile]:
    """Return the profiles of the prefill and of a decode step, without its sampling.

    Bandwidth is measured as in `measure`. Raises InvalidRequestError for a device whose steps are not recorded as a
    table.
    """
    model, num_parts = measured_model(llm), PREFILL_STEPS + DECODE_STEPS
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
    num_bytes = Counter[str]()
    if num_tokens == 1:
        num_bytes.update(weight_bytes_by_kind(model) | mixer_bytes(model.architecture, model.kv_type, context))
    flops = flops_by_kind(model, num_tokens, context)
    operations = [StepOperation(each, calls[each], seconds[each], num_bytes[each], flops[each]) for each in calls]
    return Profile(name, num_tokens, context, tuple(operations), tuple(layers.items()), read_bandwidth)


def split_label(label: str) -> tuple[str, str]:
    """Return layer and kind: `L0.qkv.matmul Q4_1` → (`L0`, `qkv`); `head.normalize` → (`head`, `norm`)."""
    parts = label.split(".", maxsplit=2)
    layer, kind = parts[0], parts[1] if parts[0][0] == "L" and len(parts) == 3 else parts[0]
    return layer, "norm" if parts[-1] in NORMS else kind


def flops_by_kind(model: Transformer, num_tokens: int, context: int) -> Counter[str]:
    """Return a token's share of a step's operations. Only the step's last token is multiplied by the head."""
    flops = mixer_flops(model.architecture, num_tokens, context)
    for kind, found in projections_by_kind(model).items():
        flops[kind] = sum(int(each.used_share * 2 * each.in_features * each.out_features) for each in found)
    flops["head"] //= num_tokens
    return flops


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


def mixer_bytes(architecture: Architecture, kv_type: str, context: int) -> Counter[str]:
    """Return the bytes of the cache that a decode step after `context` tokens moves, by kind.

    Layers with a state count the bytes that they read and the bytes that they write. Attention counts only reads.
    """
    found = Counter[str]()
    for mixer in architecture.mixers:
        if isinstance(mixer, Attention):
            found["attend"] += read_bytes(mixer, kv_type, context)
            continue
        floats = (min(context, mixer.num_taps - 1) + 1) * mixer.num_channels  # inputs of the convolution
        if isinstance(mixer, GatedDeltaNet):
            floats += _delta_net_floats(mixer, context)
        found[_KINDS[type(mixer)]] += _FLOAT_BYTES * floats
    return found


def mixer_flops(architecture: Architecture, num_tokens: int, context: int) -> Counter[str]:
    """Return a token's share of the operations of a step of `num_tokens` tokens after `context` others, by kind."""
    found = Counter[str]()
    positions = range(context, context + num_tokens)
    for mixer in architecture.mixers:
        found[_KINDS[type(mixer)]] += sum(_mixer_flops(mixer, position) for position in positions) // num_tokens
    return found


def _state_size(net: GatedDeltaNet) -> int:
    return net.num_value_heads * net.key_dim * net.value_dim


def _delta_net_floats(net: GatedDeltaNet, position: int) -> int:
    """Return the numbers that the token at a position reads and writes, besides inputs of the convolution.

    The token reads a state and the log of the page's earlier tokens (k, u and log α). It writes its own log entry. The
    first token of a page reads the state and the whole log of the previous page, and writes a state.
    """
    place = position % STATE_TOKENS
    entry = net.num_key_heads * net.key_dim + net.value_features + net.num_value_heads
    read = (_state_size(net) if position else 0) + (place or min(position, STATE_TOKENS)) * entry
    return read + entry + (0 if place else _state_size(net))


def _mixer_flops(mixer: Mixer, position: int) -> int:
    """Return the operations of the token at a position."""
    if isinstance(mixer, Attention):
        num_seen = position + 1 if mixer.window is None else min(position + 1, mixer.window)
        num_seen = num_seen if mixer.chunk is None else position % mixer.chunk + 1
        return 4 * mixer.num_heads * mixer.head_dim * num_seen
    convolution = 2 * mixer.num_taps * mixer.num_channels
    return convolution if isinstance(mixer, ShortConv) else convolution + _delta_rule_flops(mixer, position)


def _delta_rule_flops(net: GatedDeltaNet, position: int) -> int:
    """Return the operations of k and q with the state and with the keys of the log, and of the log's u with both
    results.

    k is multiplied by the keys before its own, and q also by its own. The first token of a page adds the log of the
    previous page to a state.
    """
    place = position % STATE_TOKENS
    with_log = 2 * (2 * place + 1)
    flops = 4 * _state_size(net) + with_log * (net.num_key_heads * net.key_dim + net.value_features)
    return flops + (2 * STATE_TOKENS * _state_size(net) if position and not place else 0)
