"""The sections of `check_gpu`, which runs this program once per section. It prints a line of JSON per result."""

import argparse
import faulthandler
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
import triton

import gpu_attention
import gpu_memory_use
import gpu_models
import gpu_profile
import gpu_sampler
import gpu_sums
import gpu_sweeps
import gpu_weights
import several_gpus
from check_gpu import NUM_WEIGHT_SECTIONS, TYPES_PER_SECTION
from infer.compute.backends import gpus
from infer.compute.backends.cuda.layouts import LAYOUTS

Result = dict[str, Any]
DUMP_SECONDS = 3.0  # before the section is killed, its stacks are written


@final
class Setting(NamedTuple):
    device: torch.device
    is_tiny: bool
    model: Path | None  # a GGUF file


def machine(setting: Setting) -> Iterator[Result]:
    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
    found = list(map(str, gpus.visible_gpus())) if setting.device.type == "cuda" else None
    yield {**versions, "cores": os.cpu_count(), "gpus": found, "num_gpus": None if found is None else len(found)}
    if found:
        yield {"copy_bytes_per_second": gpu_weights.copy_rate(setting.device)}


def weights(setting: Setting, number: int) -> Iterator[Result]:
    types = list(LAYOUTS)[number * TYPES_PER_SECTION : (number + 1) * TYPES_PER_SECTION]
    rows, columns, counts, trials = (5, 256, [1, 9], 1) if setting.is_tiny else (2048, 2048, [1, 2, 8, 16, 512], 120)
    yield from gpu_weights.check_values(setting.device, rows, columns, counts, types)
    yield from gpu_weights.check_invariance(setting.device, rows, columns, counts[-1] + 1, trials, types)


def sampler(setting: Setting) -> Iterator[Result]:
    device = setting.device
    yield from gpu_sampler.check_tokens(device, *((2, [300]) if setting.is_tiny else (16, [1000, 128_256])))
    yield from gpu_sampler.check_logprobs(device, *((2, 300) if setting.is_tiny else (16, 128_256)))


def models_poisoned(setting: Setting) -> Iterator[Result]:
    """Fill allocated memory with NaN, for results and pages of a cache: it must not be read before it is written."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # this fills the memory
    yield from gpu_models.check_paths(setting.device, setting.is_tiny, types=["Q4_0"])


def products_time(setting: Setting) -> Iterator[Result]:
    size = (64, 256, [1, 9]) if setting.is_tiny else (8192, 4096, [1, 4, 64, 512])
    yield from gpu_weights.time_products(
        setting.device, *size, types=gpu_weights.COMMON[: 1 if setting.is_tiny else None]
    )


def sampler_time(setting: Setting) -> Iterator[Result]:
    if setting.device.type != "cuda":
        yield {"skipped": "the sampler is timed by graphs, on a GPU only"}
        return
    for name in gpu_sampler.CONFIGURATIONS:
        yield gpu_sampler.time_configuration(name, setting.device, 64, 128_256, 10)


def of(check: Callable[..., Iterator[Result]], *rest: str) -> Callable[[Setting], Iterator[Result]]:
    return lambda setting: check(setting.device, setting.is_tiny, *rest)


def of_file(check: Callable[..., Iterator[Result]]) -> Callable[[Setting], Iterator[Result]]:
    return lambda setting: check(setting.device, setting.is_tiny, setting.model)


RUN_BY_NAME: dict[str, Callable[[Setting], Iterator[Result]]] = {
    "machine": machine,
    "models": of(gpu_models.check_paths),
    "models, poisoned": models_poisoned,
    "models, sanitized": of(gpu_models.check_paths),
    "file": of_file(gpu_models.check_file),
    "answers": of_file(gpu_models.check_answers),
    "several GPUs": of_file(several_gpus.check_gpus),
    "profile, Q4_K": of(gpu_profile.profile_steps, "Q4_K"),
    "profile, BF16": of(gpu_profile.profile_steps, "BF16"),
    "models, time": of(gpu_models.time_models),
    "contexts, time": of(gpu_models.time_contexts),
    "memory": of(gpu_memory_use.measure_memory),
    "sweeps, time": of(gpu_sweeps.sweep_constants),
    "products, time": products_time,
    "sampler, time": sampler_time,
    **{f"weights {number + 1}": partial(weights, number=number) for number in range(NUM_WEIGHT_SECTIONS)},
    "attention": of(gpu_attention.check_attention),
    "sampler": sampler,
    "sums": of(gpu_sums.compare_sums),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=RUN_BY_NAME)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    faulthandler.dump_traceback_later(max(1.0, options.seconds - DUMP_SECONDS))
    started = time.perf_counter()
    for result in RUN_BY_NAME[options.name](Setting(options.device, options.tiny, options.model)):
        at = round(time.perf_counter() - started, 2)
        print(json.dumps({**result, "at": at}), flush=True)


if __name__ == "__main__":
    main()
