"""`check_gpu`'s section on memory: the bytes that a model takes on the device, compared with the estimate.

It also measures the seconds in which a step of each size is recorded when it first occurs, because a request waits.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch

from gpu_models import SHAPES, at_context, make_model, make_runner, random_ids
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.operands.step import Chunk
from infer.compute.operands.weights import StoredWeight
from infer.engine.runner.runner import Runner
from infer.models.families import make_architecture
from infer.models.memory.memory_budget import MemoryBudget
from infer.models.memory.memory_estimate import LoadSettings
from infer.models.tensors import expected_shapes


def measure_memory(device: torch.device, is_tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield bytes after the load, with a cache, and after steps of all sizes. Each number is without the bytes
    before it.
    """
    shape, rows, context = ("tiny", 2, 64) if is_tiny else ("Llama-3.2-1B", 64, 4096)
    for type_ in ("Q4_0",) if is_tiny else ("Q4_K", "BF16"):
        before = _used(device)
        model = make_model(shape, type_, device, context, shares_layers=True)
        loaded = _used(device)
        runner = make_runner(model, rows, context)
        ready = _used(device)
        yield from _first_steps(runner, type_, (1,) if is_tiny else (1, 8, 64), 3 if is_tiny else 512)
        run = _used(device)
        expected = _estimate(shape, type_, context, rows)
        found = {"weights": loaded - before, "cache": ready - loaded, "workspace": run - ready}
        for name, measured in found.items():
            yield {"type": type_, "part": name, "bytes": measured, "estimated": getattr(expected, name)}
        peak = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
        yield {"type": type_, "part": "most that torch reserved", "bytes": peak}
        del model, runner
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _used(device: torch.device) -> int:
    """Return the bytes that are taken on the device, also by other libraries than torch: graphs, contexts."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _estimate(shape: str, type_: str, context: int, rows: int) -> Any:
    architecture = make_architecture(SHAPES[shape])
    tensors = {
        name: StoredWeight(type_ if len(size) == 2 else "F32", size, torch.empty(0))
        for name, size in expected_shapes(architecture).items()
    }
    load = LoadSettings(device="cuda")
    return MemoryBudget.of(architecture, tensors, load, CacheSettings(), num_tokens=context, num_rows=rows)


def _first_steps(runner: Runner, type_: str, row_counts: tuple[int, ...], prompt: int) -> Iterator[dict[str, Any]]:
    """Yield the seconds of the first and of the second step of each size."""
    for rows, size in (*((rows, 1) for rows in row_counts), (1, prompt)):
        for slot in range(rows):
            at_context(runner, slot, 0)
            runner.cache.reserve(slot, size)
        chunks = [Chunk(slot, random_ids(size, slot, 96)) for slot in range(rows)]
        seconds = list[float]()
        with torch.inference_mode(), runner.model.backend.threads():
            for _ in range(2):
                started = time.perf_counter()
                runner.forward(chunks)
                runner.model.backend.synchronize()
                seconds.append(time.perf_counter() - started)
        yield {"type": type_, "rows": rows, "tokens": rows * size, "first_seconds": seconds[0], "seconds": seconds[1]}
