"""Check and time the kernels of a CUDA GPU: every op from `embed` up, and models on every path.

    python benchmarks/check_gpu.py --report                         every section, within 8 minutes
    python benchmarks/check_gpu.py --sections sampler weights       some of the sections
    python benchmarks/check_gpu.py --device cpu --tiny              the same in Triton's interpreter, without a GPU

Each section is a process of its own, because a fault on a device ends all that a process has there. A section prints a
line of JSON per result. A section that fails or runs out of time is reported with its last line, and the next one
begins. Ends with 1 if a result is wrong or a section failed.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from harness import make_parser, say, write_report

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
    from gpu_sampler import check_logprobs, check_tokens

    yield from check_tokens(device, *((2, [300]) if is_tiny else (16, [1000, 128_256])))
    yield from check_logprobs(device, *((2, 300) if is_tiny else (16, 128_256)))


def models(device: torch.device, is_tiny: bool) -> Iterator[Result]:
    from gpu_models import check_paths

    yield from check_paths(device, is_tiny)


def models_poisoned(device: torch.device, is_tiny: bool) -> Iterator[Result]:
    """Fill allocated memory with NaN, for results and pages of a cache: it must not be read before it is written."""
    from gpu_models import check_paths

    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills it
    yield from check_paths(device, is_tiny, types=["Q4_0"])


def products_time(device: torch.device, is_tiny: bool) -> Iterator[Result]:
    import gpu_weights

    if device.type == "cuda":
        yield from gpu_weights.time_products(device, 8192, 4096, [1, 4, 64, 512])


def sampler_time(device: torch.device, is_tiny: bool) -> Iterator[Result]:
    from gpu_sampler import CONFIGURATIONS, time_configuration

    if device.type == "cuda":
        for name in CONFIGURATIONS:
            yield time_configuration(name, device, 64, 128_256, 10)


def models_time(device: torch.device, is_tiny: bool) -> Iterator[Result]:
    from gpu_models import time_models

    yield from time_models(device, is_tiny)


SECTIONS: Mapping[str, Section] = {
    "weights": weights,
    "attention": attention,
    "sampler": sampler,
    "models": models,
    "models, poisoned": models_poisoned,
    "models, sanitized": models,
    "models, time": models_time,
    "products, time": products_time,
    "sampler, time": sampler_time,
}


def run_section(name: str, device: torch.device, is_tiny: bool) -> None:
    for result in SECTIONS[name](device, is_tiny):
        print(json.dumps(result), flush=True)


def run_all(device: torch.device, is_tiny: bool, sections: Sequence[str] = tuple(SECTIONS)) -> list[Result]:
    """Return a report per section: its results, and why it ended early if it did.

    Checks run beside one another, because most of their time is a compiler's. Then each timing runs alone.
    """
    run = partial(_report_of, device=device, is_tiny=is_tiny, ends=time.monotonic() + SECONDS)
    checks, timings = ([name for name in sections if is_timing(name) == which] for which in (False, True))
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
    command = [sys.executable, __file__, "--section", name, "--device", str(device)]
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


def describe(device: torch.device) -> dict[str, Any]:
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, interpreted"
    return {"torch": torch.__version__, "triton": triton.__version__, "device": name}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), metavar="NAME",
                        help=f"of {'; '.join(SECTIONS)}")  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, for the interpreter")
    parser.add_argument("--section", help=argparse.SUPPRESS)  # in this process
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        say("there is no CUDA GPU: --device cpu --tiny checks the kernels in Triton's interpreter")
        return 2
    if options.section:
        run_section(options.section, device, options.tiny)
        return 0
    reports = run_all(device, options.tiny, options.sections)
    write_report(options, **describe(device), sections=reports)
    return int(any(report["wrong"] or report["trouble"] for report in reports))


if __name__ == "__main__":
    sys.exit(main())
