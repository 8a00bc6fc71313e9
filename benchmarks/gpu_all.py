"""`check_gpu --all`: every check and timing of a device in one command, from `embed` up.

Each section is a process of its own, as a fault on a device ends all that a process has there. What one prints, a line
of JSON for each result, is kept as it comes; a section that fails or runs out of time is reported with its last line,
and the next one begins. With `--device cpu --tiny` all of it runs in Triton's interpreter.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

Result = dict[str, Any]
Section = Callable[[torch.device, bool], Iterator[Result]]
SECONDS, CHECK_SECONDS = 470, 200  # for all of it, and for one check: what hangs leaves time for timings


def weights(device: torch.device, is_tiny: bool) -> Iterator[Result]:
    import gpu_weights

    rows, columns, counts, trials = (5, 256, [1, 9], 1) if is_tiny else (2048, 2048, [1, 2, 8, 16, 512], 120)
    yield from gpu_weights.check_values(device, rows, columns, counts)
    yield from gpu_weights.check_invariance(device, rows, columns, counts[-1] + 1, trials)


def attention(device: torch.device, is_tiny: bool) -> Iterator[Result]:
    from gpu_attention import check_attention

    yield from check_attention(device, is_tiny)


def sampler(device: torch.device, is_tiny: bool) -> Iterator[Result]:
    from check_gpu import check_logprobs, check_tokens

    for result in check_tokens(device, *((2, [300]) if is_tiny else (16, [1000, 128_256]))):
        wrong = result["differ_from_torch_on_cpu"] + result["differ_from_torch_on_device"]
        yield {"op": "sampler", **result, "is_right": not wrong}
    for result in check_logprobs(device, *((2, 300) if is_tiny else (16, 128_256))):
        yield {"op": "log-probabilities", **result, "is_right": not result["differ"]}


def models(device: torch.device, is_tiny: bool) -> Iterator[Result]:
    from gpu_models import check_paths

    yield from check_paths(device, is_tiny)


def models_poisoned(device: torch.device, is_tiny: bool) -> Iterator[Result]:
    """Memory that is taken, for results as for pages of a cache, holds NaN: what was never written is never read."""
    from gpu_models import check_paths

    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills it
    yield from check_paths(device, is_tiny, types=["Q4_0"])


def products_time(device: torch.device, is_tiny: bool) -> Iterator[Result]:
    import gpu_weights

    if device.type == "cuda":
        yield from gpu_weights.time_products(device, 8192, 4096, [1, 4, 64, 512])


def sampler_time(device: torch.device, is_tiny: bool) -> Iterator[Result]:
    from check_gpu import CONFIGURATIONS, time_configuration

    if device.type == "cuda":
        for name in CONFIGURATIONS:
            yield time_configuration(name, device, 64, 128_256, 10)


def models_time(device: torch.device, is_tiny: bool) -> Iterator[Result]:
    from gpu_models import time_models

    yield from time_models(device, is_tiny)


def files_time(device: torch.device, is_tiny: bool) -> Iterator[Result]:
    """The packaged models: text after a prompt, alone. In the interpreter a token would take minutes."""
    if is_tiny:
        return
    from infer import LLM, SamplingParams, ops

    params = SamplingParams(temperature=0, max_new_tokens=256)
    for name in ("smollm2", "gemma3-270m"):
        with ops.using("cuda"):
            llm = LLM(name, device=str(device), max_seq_len=512)
        llm.generate("The", params)
        started = time.perf_counter()
        result = llm.generate("The", params)
        count = len(result.token_ids)
        yield {"model": name, "rows": 1, "decode_tokens_per_second": count / (time.perf_counter() - started)}


SECTIONS: Mapping[str, Section] = {
    "weights": weights,
    "attention": attention,
    "sampler": sampler,
    "models": models,
    "models, poisoned": models_poisoned,
    "models, sanitized": models,
    "files, time": files_time,
    "models, time": models_time,
    "products, time": products_time,
    "sampler, time": sampler_time,
}


def run_section(name: str, device: torch.device, is_tiny: bool) -> None:
    for result in SECTIONS[name](device, is_tiny):
        print(json.dumps(result), flush=True)


def run_all(device: torch.device, is_tiny: bool) -> list[Result]:
    """One report for each section: its results, and why it ended early if it did. Checks run beside one another, as
    most of their time is a compiler's; then timings, each alone."""
    run = partial(_report_of, device=device, is_tiny=is_tiny, ends=time.monotonic() + SECONDS)
    checks, timings = ([name for name in SECTIONS if is_timing(name) == which] for which in (False, True))
    reports = list[Result]()
    for names, at_once in ((checks, max(1, (os.cpu_count() or 1) // 2)), (timings, 1)):
        with ThreadPoolExecutor(at_once) as pool:
            for report in pool.map(run, names):
                reports.append(report)
                _print(report)
    return reports


def is_timing(name: str) -> bool:
    return name.endswith("time")


def _print(report: Result) -> None:
    results = report["results"]
    counts = f"{len(results)} results, {report['wrong']} wrong"
    print(f"{report['section']:18} {report['seconds']:6.1f} s, {counts}", report["trouble"], flush=True)
    for result in results:
        if "is_right" not in result or not result["is_right"]:
            print("   ", *result.values(), flush=True)


def _report_of(name: str, device: torch.device, is_tiny: bool, ends: float) -> Result:
    started = time.monotonic()
    left = ends - started
    results, trouble = _in_process(name, device, is_tiny, left if is_timing(name) else min(left, CHECK_SECONDS))
    wrong = sum(not result.get("is_right", True) for result in results)
    seconds = round(time.monotonic() - started, 1)
    return {"section": name, "seconds": seconds, "wrong": wrong, "trouble": trouble, "results": results}


def _in_process(name: str, device: torch.device, is_tiny: bool, seconds: float) -> tuple[list[Result], str]:
    script = Path(__file__).with_name("check_gpu.py")
    command = [sys.executable, str(script), "--section", name, "--device", str(device)]
    command += ["--tiny"] if is_tiny else []
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    if device.type == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    if name.endswith("poisoned"):
        environment["INFER_POISON"] = "1"
    if name.endswith("sanitized"):
        if device.type == "cpu" or shutil.which("compute-sanitizer") is None:
            return [{"skipped": "compute-sanitizer is not here"}], ""
        command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", *command, "--tiny"]
    if seconds <= 0:
        return [], "no time was left"
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=seconds, check=False)
        output, trouble = done.stdout, ""
        if done.returncode:
            trouble = f"ended with {done.returncode}: {(done.stderr.decode().strip().splitlines() or [''])[-1]}"
    except subprocess.TimeoutExpired as error:
        output, trouble = error.stdout or b"", "no time was left"
    return [json.loads(line) for line in re.findall(rb"^{.*}\n", output, re.MULTILINE)], trouble
