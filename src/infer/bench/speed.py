"""Measure the speed of a model here: prefill, decode, the time between tokens, the share of the memory's speed.

Bandwidth is measured between the repeats, in the same process, with the same number of threads. Other programs on the
machine affect both, so a share is valid only within one run.
"""

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from random import Random
from statistics import median
from typing import Any, Self, final

import torch

from infer import ops
from infer.errors import InvalidRequestError
from infer.kvcache.page_sizes import read_bytes
from infer.llm import LLM
from infer.model.transformer import Transformer
from infer.operands.weights import Projection
from infer.outputs import GenerationTiming, percentile
from infer.sampling_params import SamplingParams

READ_BYTES = 512 << 20  # read by all threads together, and more by many threads; larger than any cache
BYTES_PER_THREAD, PIECES_PER_THREAD = 32 << 20, 16

OnProgress = Callable[[int, int], None]


@final
@dataclass(frozen=True)
class Workload:
    """The measured work: a prompt, and an answer that begins when `context` tokens are in the cache."""

    prompt_tokens: int = 512
    new_tokens: int = 128
    context: int | None = None  # None: as many as the prompt has
    repeats: int = 3

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "new_tokens", "context", "repeats"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequestError(f"{name} must be at least 1, got {value}")

    @property
    def depth(self) -> int:
        return self.context or self.prompt_tokens

    @property
    def max_seq_len(self) -> int:
        """The smallest context length with room for the workload."""
        return max(self.prompt_tokens, self.depth) + self.new_tokens + 1


@final
@dataclass(frozen=True)
class Speed:
    """Medians over the repeats, percentiles over all their steps. Rates are per second, bytes per generated token."""

    workload: Workload
    threads: int
    prefill_tokens_per_second: float
    ttft_s: float
    decode_tokens_per_second: float
    inter_token_p50_s: float
    inter_token_p95_s: float
    inter_token_p99_s: float
    weight_bytes: int
    kv_bytes: int  # bytes read, averaged over the answer
    read_bandwidth: float  # the best rate at which the same number of threads read memory
    peak_resident_bytes: int

    @property
    def achieved_bandwidth(self) -> float:
        return (self.weight_bytes + self.kv_bytes) * self.decode_tokens_per_second

    @property
    def bandwidth_share(self) -> float:
        return self.achieved_bandwidth / self.read_bandwidth

    def to_json(self) -> dict[str, Any]:
        shares = {"achieved_bandwidth": self.achieved_bandwidth, "bandwidth_share": self.bandwidth_share}
        return asdict(self) | shares


def measure(
    llm: LLM,
    workload: Workload,
    on_progress: OnProgress = lambda done, total: None,
    *,
    read_bytes: int | None = None,
) -> Speed:
    """Warm up once, then measure the repeats, with the bandwidth before, between and after them.

    `read_bytes` is the number of bytes that the bandwidth's measurement reads. None means more than the caches' size.
    """
    prefill, decode = list[GenerationTiming](), list[GenerationTiming]()
    num_parts = workload.repeats + 1
    _run(llm, workload, seed=0)
    peak = peak_resident_bytes()  # before the buffers for measuring bandwidth
    on_progress(1, num_parts)
    threads = llm.model.backend.num_threads()
    with MemoryProbe(threads, read_bytes) as memory:
        rates = [memory.read_rate()]
        for repeat in range(1, num_parts):
            first, second = _run(llm, workload, seed=repeat)
            prefill.append(first)
            decode.append(second)
            rates.append(memory.read_rate())
            on_progress(repeat + 1, num_parts)
    steps = [seconds for timing in decode for seconds in timing.inter_token_times_s]
    return Speed(
        workload=workload,
        threads=threads,
        prefill_tokens_per_second=median(workload.prompt_tokens / timing.prefill_time_s for timing in prefill),
        ttft_s=median(timing.ttft_s for timing in prefill),
        decode_tokens_per_second=median(timing.decode_tokens_per_second or 0.0 for timing in decode),
        inter_token_p50_s=percentile(steps, 50.0),
        inter_token_p95_s=percentile(steps, 95.0),
        inter_token_p99_s=percentile(steps, 99.0),
        weight_bytes=sum(weight_bytes_by_kind(llm.model).values()),
        kv_bytes=kv_bytes(llm.model, workload.depth + workload.new_tokens // 2),
        read_bandwidth=max(rates),
        peak_resident_bytes=peak,
    )


def _run(llm: LLM, workload: Workload, seed: int) -> tuple[GenerationTiming, GenerationTiming]:
    """Return the timings for prefill and decode. One generation gives both if their lengths agree."""
    decode = _generate(llm, workload.depth, workload.new_tokens + 1, seed)
    if workload.depth == workload.prompt_tokens:
        return decode, decode
    return _generate(llm, workload.prompt_tokens, 1, seed), decode


def _generate(llm: LLM, prompt_tokens: int, new_tokens: int, seed: int) -> GenerationTiming:
    params = SamplingParams(temperature=0, max_new_tokens=new_tokens, ignore_eos=True, seed=seed)
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


def kv_bytes(model: Transformer, context: int) -> int:
    """Return the bytes that a decode step reads of a cache with `context` tokens that evicts none."""
    return sum(read_bytes(layer, model.kv_type, context) for layer in model.architecture.mixers)


# Memory


@final
class MemoryProbe:
    """A buffer in pieces, and threads that sum the pieces as fast as memory delivers them.

    Each thread takes the next free piece.
    """

    def __init__(self, threads: int, num_bytes: int | None = None) -> None:
        total = num_bytes or max(READ_BYTES, threads * BYTES_PER_THREAD)
        self._buffer = torch.ones(total // 4)
        self._pieces = self._buffer.chunk(threads * PIECES_PER_THREAD)
        self._threads = ThreadPoolExecutor(threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown()

    def read_rate(self, tries: int = 5) -> float:
        """Return the bytes per second that all threads read together: the best of the tries."""
        rates = []
        with ops.backend_of(torch.device("cpu")).threads():  # one of torch's threads for each of ours
            for _ in range(tries):
                started = time.perf_counter()
                list(self._threads.map(torch.sum, self._pieces))
                rates.append(self._buffer.nbytes / (time.perf_counter() - started))
        return max(rates)


def peak_resident_bytes() -> int:
    """Return the largest memory that this process has used, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
