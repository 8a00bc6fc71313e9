"""`check_gpu`'s sections that profile steps of Llama-3.2-1B's shape: the time of each kernel, and of the gaps.

A step is a replay of its recording. Steps of up to 64 tokens decode rows of one token each. A larger step reads a
prompt. The cache of a context is reserved but not computed: its pages are zeros, which take as long to read as values.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gpu_models import at_context, make_model, make_runner, random_ids
from infer.compute.operands.step import Chunk
from infer.engine.runner.runner import Runner

TOKENS, CONTEXTS, MOST_ROWS = (1, 8, 9, 16, 17, 64, 512), (64, 1024, 8192), 64
REPLAYS = 20
MOST_LETTERS = 60  # letters of a kernel's name: torch's names are whole signatures


@final
class Launch(NamedTuple):
    name: str
    start: float  # in microseconds
    duration: float


def profile_steps(device: torch.device, is_tiny: bool, type_: str) -> Iterator[dict[str, Any]]:
    """Yield the profile of a step for each context and number of tokens. Decoding with little context comes first."""
    shape, tokens, contexts, most_rows, replays = (
        ("tiny", (1, 2, 5), (4,), 2, 1) if is_tiny else ("Llama-3.2-1B", TOKENS, CONTEXTS, MOST_ROWS, REPLAYS)
    )
    capacity = contexts[-1] + tokens[-1]
    type_ = "Q4_0" if is_tiny and type_ == "Q4_K" else type_  # its blocks are as small as the tiny model's rows
    model = make_model(shape, type_, device, capacity, shares_layers=True)
    runner = make_runner(model, most_rows, capacity)
    with torch.inference_mode(), model.backend.threads():
        for context in contexts:
            for count in tokens:
                chunks = _chunks(runner, count, context, most_rows)
                what = {"type": type_, "tokens": count, "rows": len(chunks), "context": context}
                yield what | _profile(runner, chunks, device, replays)


def _chunks(runner: Runner, num_tokens: int, context: int, most_rows: int) -> list[Chunk]:
    rows = num_tokens if num_tokens <= most_rows else 1
    size = num_tokens // rows
    for slot in range(rows):
        at_context(runner, slot, context)
        runner.cache.reserve(slot, size)
    return [Chunk(slot, random_ids(size, slot, 96)) for slot in range(rows)]


def _profile(runner: Runner, chunks: Sequence[Chunk], device: torch.device, replays: int) -> dict[str, Any]:
    def step() -> None:
        runner.forward(chunks)

    started = time.perf_counter()
    step()  # compiles and records
    runner.model.backend.synchronize()
    first = time.perf_counter() - started
    _step_microseconds(runner, step, replays)  # until the clocks have risen
    host, whole = _step_microseconds(runner, step, replays)
    launches = profiled(step, device, replays, runner.model.backend.synchronize)
    return {"first_seconds": first, "step_us": whole, "host_us": host, **summary(launches, replays)}


def _step_microseconds(runner: Runner, step: Callable[[], None], replays: int) -> tuple[float, float]:
    """Return the microseconds until a step is submitted, and until it has run, as means of the replays."""
    started = time.perf_counter()
    for _ in range(replays):
        step()
    submitted = time.perf_counter()
    runner.model.backend.synchronize()
    ended = time.perf_counter()
    return (submitted - started) / replays * 1e6, (ended - started) / replays * 1e6


def profiled(
    step: Callable[[], None], device: torch.device, replays: int, synchronize: Callable[[], None]
) -> list[Launch]:
    """Return the launches on the device during `replays` replays, in the order of their starts."""
    activity, wanted = (
        (ProfilerActivity.CUDA, DeviceType.CUDA) if device.type == "cuda" else (ProfilerActivity.CPU, DeviceType.CPU)
    )
    with profile(activities=[activity]) as found:
        for _ in range(replays):
            step()
        synchronize()
    events = [event for event in found.events() or () if event.device_type == wanted and not event.is_user_annotation]
    launches = [Launch(each.name, each.time_range.start, each.time_range.elapsed_us()) for each in events]
    return sorted(launches, key=lambda launch: launch.start)


def summary(launches: Sequence[Launch], replays: int) -> dict[str, Any]:
    """Return the microseconds per step with and without a running kernel, and each kernel's share.

    A kernel's `gap_us` is the median of the time between the end of the launches before it and its start.
    """
    durations, gaps = dict[str, list[float]](), dict[str, list[float]]()
    busy, idle, ended = 0.0, 0.0, launches[0].start if launches else 0.0
    for name, start, duration in launches:
        gap, end = max(0.0, start - ended), start + duration
        durations.setdefault(name[:MOST_LETTERS], []).append(duration)
        gaps.setdefault(name[:MOST_LETTERS], []).append(gap)
        idle += gap
        busy += max(0.0, end - max(start, ended))
        ended = max(ended, end)
    kernels = {
        name: {
            "per_step": len(each) / replays,
            "mean_us": statistics.mean(each),
            "step_us": sum(each) / replays,
            "gap_us": statistics.median(gaps[name]),
        }
        for name, each in sorted(durations.items(), key=lambda pair: -sum(pair[1]))
    }
    return {
        "launches": len(launches) / replays,
        "busy_us": busy / replays,
        "idle_us": idle / replays,
        "kernels": kernels,
    }
