"""Measure the speed of a model here: prefill, decode, the time between tokens, the share of the memory's speed.

The limit of decode is the rate at which the same threads read as many bytes as a token does, again and again, between
the repeats. So weights that fit a large cache are compared with that cache, and others with the memory. If decode
itself was faster, it is the limit. Other programs affect both, so a share is valid only within one run.

A suite is a list of configs, each with its sizes and its sampling.
"""

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple, final

from infer.cli.bench.memory_probe import MemoryProbe
from infer.compute.kvcache.groups import read_bytes
from infer.compute.operands.weights import Projection
from infer.llm import LLM
from infer.models.load import OnProgress
from infer.models.transformer import Transformer
from infer.outputs import GenerationTiming, percentile
from infer.sampling_params import SamplingParams

_SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}


@final
@dataclass(frozen=True)
class Workload:
    """The measured work: a prompt, and an answer that begins when `context` tokens are in the cache.

    An answer has exactly `new_tokens` tokens, of which the first belongs to the prefill. Each run has a prompt and a
    seed of its own, which follow from `seed`.
    """

    prompt_tokens: int = 512
    new_tokens: int = 128
    context: int | None = None  # None: as many as the prompt has
    repeats: int = 3
    warmups: int = 2
    seed: int = 42
    sampling: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})  # fields of SamplingParams

    @property
    def name(self) -> str:
        """The name of a config without a suite."""
        size = f"{self.prompt_tokens}/{self.new_tokens}"
        return size if self.depth == self.prompt_tokens else f"{size} at {self.depth}"

    @property
    def depth(self) -> int:
        return self.context or self.prompt_tokens

    @property
    def max_seq_len(self) -> int:
        """The smallest context length with room for the workload."""
        return max(self.prompt_tokens, self.depth) + self.new_tokens


@final
@dataclass(frozen=True)
class StepTime:
    """The time of one decode step: the step number `step` of an answer, after which the cache has `seq_len` tokens."""

    seconds: float
    step: int
    seq_len: int


@final
@dataclass(frozen=True)
class Speed:
    """Medians over the repeats, percentiles over all their steps. Rates are per second, bytes per generated token."""

    workload: Workload
    threads: int
    prefill_tokens_per_second: float
    ttft_s: float
    decode_tokens_per_second: float
    wall_s: float  # of a whole answer, as its caller waits for it
    end_to_end_tokens_per_second: float  # new tokens divided by this time
    inter_token_mean_s: float
    inter_token_p50_s: float
    inter_token_p95_s: float
    inter_token_p99_s: float
    fastest_step: StepTime | None  # None if there was no decode step
    slowest_step: StepTime | None
    weight_bytes: int
    kv_bytes: int  # bytes read, averaged over the answer
    read_bandwidth: float  # the best rate of reading as many bytes by the same threads, or decode's; 0: not measured
    loaded_resident_bytes: int
    peak_resident_bytes: int  # of the process until now
    loaded_gpu_bytes: int | None = None
    peak_gpu_bytes: int | None = None

    @property
    def achieved_bandwidth(self) -> float:
        return (self.weight_bytes + self.kv_bytes) * self.decode_tokens_per_second

    @property
    def bandwidth_share(self) -> float:
        return self.achieved_bandwidth / self.read_bandwidth if self.read_bandwidth else 0.0

    def to_json(self) -> dict[str, Any]:
        shares = {"achieved_bandwidth": self.achieved_bandwidth, "bandwidth_share": self.bandwidth_share}
        return asdict(self) | shares


def measure(
    llm: LLM, workload: Workload, on_progress: OnProgress = lambda done, total: None, *, read_bytes: int | None = None
) -> Speed:
    """Warm up, then measure the repeats, with the bandwidth before, between and after them.

    `read_bytes` is the number of bytes that the bandwidth's measurement reads. None means as many as a token, and 0
    means that it is not measured.
    """
    loaded, backend = resident_bytes(), llm.model.backend
    gpu_loaded = backend.begin_gpu_peak()
    runs, num_parts = list[_Run](), workload.repeats + 1
    for number in range(workload.warmups):
        _run(llm, workload, number)
    peak = peak_resident_bytes()  # before the buffers for measuring bandwidth
    on_progress(1, num_parts)
    threads, weights = backend.num_threads(), sum(weight_bytes_by_kind(llm.model).values())
    cached = kv_bytes(measured_model(llm), workload.depth + workload.new_tokens // 2)
    with nullcontext() if read_bytes == 0 else MemoryProbe(threads, read_bytes or weights + cached) as memory:
        rates = [memory.read_rate() if memory else 0.0]
        for repeat in range(1, num_parts):
            runs.append(_run(llm, workload, workload.warmups + repeat - 1))
            rates.append(memory.read_rate() if memory else 0.0)
            on_progress(repeat + 1, num_parts)
    steps = [step for run in runs for step in run.steps(workload.depth)]
    times = [step.seconds for step in steps]
    decode_rate = median(run.decode.decode_tokens_per_second or 0.0 for run in runs)
    return Speed(
        workload=workload,
        threads=threads,
        prefill_tokens_per_second=median(workload.prompt_tokens / run.prefill.prefill_time_s for run in runs),
        ttft_s=median(run.prefill.ttft_s for run in runs),
        decode_tokens_per_second=decode_rate,
        wall_s=median(run.wall_s for run in runs),
        end_to_end_tokens_per_second=median(workload.new_tokens / run.wall_s for run in runs),
        inter_token_mean_s=fmean(times) if times else 0.0,
        inter_token_p50_s=percentile(times, 50.0),
        inter_token_p95_s=percentile(times, 95.0),
        inter_token_p99_s=percentile(times, 99.0),
        fastest_step=min(steps, key=lambda step: step.seconds, default=None),
        slowest_step=max(steps, key=lambda step: step.seconds, default=None),
        weight_bytes=weights,
        kv_bytes=cached,
        read_bandwidth=max(*rates, (weights + cached) * decode_rate) if memory else 0.0,
        loaded_resident_bytes=loaded,
        peak_resident_bytes=peak if rates[0] else peak_resident_bytes(),
        loaded_gpu_bytes=gpu_loaded,
        peak_gpu_bytes=backend.peak_gpu_bytes(),
    )


class _Run(NamedTuple):
    """The timings of prefill and decode, which are those of one answer if their lengths agree."""

    prefill: GenerationTiming
    decode: GenerationTiming
    wall_s: float

    def steps(self, depth: int) -> list[StepTime]:
        return [StepTime(spent, step, depth + step) for step, spent in enumerate(self.decode.inter_token_times_s, 1)]


def _run(llm: LLM, workload: Workload, number: int) -> _Run:
    started = time.perf_counter()
    decode = _generate(llm, workload, workload.depth, workload.new_tokens, number)
    wall_s = time.perf_counter() - started
    if workload.depth == workload.prompt_tokens:
        return _Run(decode, decode, wall_s)
    return _Run(_generate(llm, workload, workload.prompt_tokens, 1, number), decode, wall_s)


def _generate(llm: LLM, workload: Workload, prompt_tokens: int, new_tokens: int, number: int) -> GenerationTiming:
    seed = workload.seed + number
    params = SamplingParams(**workload.sampling, max_new_tokens=new_tokens, ignore_eos=True, seed=seed)
    return llm.generate(make_prompt(llm.model, prompt_tokens, seed), params).timing


def make_prompt(model: Transformer, num_tokens: int, seed: int) -> list[int]:
    """Return ids without meaning, which differ for every seed, so that nothing is found in a cache."""
    draw = Random(seed)
    return [draw.randrange(model.architecture.vocab_size) for _ in range(num_tokens)]


# Costs of a token


def projections_by_kind(model: Transformer) -> dict[str, list[Projection]]:
    """Return the matrices by which every token is multiplied, by their names in a profile."""
    by_kind = defaultdict[str, list[Projection]](list)
    for projection in model.projections:
        by_kind[projection.label.rpartition(".")[2]].append(projection)
    return {**by_kind, "head": [model.head]}


def weight_bytes_by_kind(model: Transformer) -> dict[str, int]:
    """Return the bytes that a decode step reads of the matrices, and of its row of the embedding."""
    kinds = projections_by_kind(model).items()
    table = model.embedding.parts[0]
    read = {name: sum(_bytes_per_token(each) for each in found) for name, found in kinds}
    return {"embed": table.num_bytes // table.out_features} | read


def _bytes_per_token(projection: Projection) -> int:
    return int(projection.used_share * sum(part.num_bytes for part in projection.parts))


def measured_model(llm: LLM) -> Transformer:
    """Return the model, whose default type of stored keys and values is the one that was asked for."""
    kv_type = llm.host.settings.cache.kv_type
    return llm.model if kv_type == "auto" else replace(llm.model, kv_type=kv_type)


def kv_bytes(model: Transformer, context: int, kv_type: str = "") -> int:
    """Return the bytes that a decode step reads of a cache with `context` tokens that evicts none."""
    return sum(read_bytes(layer, kv_type or model.kv_type, context) for layer in model.architecture.mixers)


def token_bytes(model: Transformer, context: int, kv_type: str = "") -> int:
    """Return the bytes that a decode step reads, with the model's own kv type if none is given."""
    return sum(weight_bytes_by_kind(model).values()) + kv_bytes(model, context, kv_type)


# Memory


def resident_bytes() -> int:
    """Return the memory that this process uses now, in bytes; the largest so far if the system does not report it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Return the largest memory that this process has used, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


CONFIGS = {
    "short-greedy": Workload(64, 64),
    "medium-greedy": Workload(256, 256),
    "prefill-heavy": Workload(1024, 64),
    "decode-heavy": Workload(64, 1024),
    "medium-sampled": Workload(256, 256, sampling=_SAMPLED),
    "long-context": Workload(1024, 1024),
    "medium-full-pipeline": Workload(256, 256, sampling={**_SAMPLED, "repetition_penalty": 1.1}),
}
_NUM_CONFIGS: Mapping[str, int] = {"quick": 2, "standard": 5, "full": len(CONFIGS)}  # the first ones


def workloads(suite: str, *, repeats: int, warmups: int, seed: int) -> dict[str, Workload]:
    """Return the workloads of a suite's configs, by name."""
    found = list(CONFIGS.items())[: _NUM_CONFIGS[suite]]
    return {name: replace(work, repeats=repeats, warmups=warmups, seed=seed) for name, work in found}
