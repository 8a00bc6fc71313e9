"""Check, profile and time the kernels of a CUDA GPU: every op from `embed` up, and models on every path.

    python benchmarks/check_gpu.py --all --out FOLDER               every section, within ten minutes
    python benchmarks/check_gpu.py --sections sampler "weights 1"   some of the sections
    python benchmarks/check_gpu.py --device cpu --tiny --all        the same in Triton's interpreter, without a GPU

Needs torch, triton, numpy and jaxtyping, and `src` in PYTHONPATH. Each section is a process of its own with a time
limit, because a fault on a device ends all that a process has there. FOLDER/results.jsonl has a line per section, from
the moment at which the section ended; FOLDER/SECTION.jsonl has each result from the moment at which it was known.
`--model FILE.gguf` adds a section with the text of a real model. This makes one of 55 MB:

    infer quantize smollm2 FILE.gguf --type Q4_0 --pure --requantize --token-embedding-type Q4_0 --tensor-type ffn=Q2_0

 Ends with 1 if a result is wrong or a section failed.
"""

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness import REPORTS, make_parser, say, write_report
from section_runs import Result, Section, run_sections

SECONDS = 570.0  # for all sections: ten minutes with the start and processes that cannot be killed
CHECK_SECONDS = 200.0
TYPES_PER_SECTION, NUM_WEIGHT_SECTIONS = 3, 10  # a section compiles the kernels of three types in about a minute

# Whole models come first, because they have not run on a GPU yet: what they show is worth most if the time ends. Then
# the timings run, each alone. Products, attention and the sampler were right on an H200. So they are last, and in
# parallel, because they mostly wait for a compiler.
SECTIONS = (
    Section("machine", 90),
    Section("models", 100, False),
    Section("models, poisoned", 100, False, {"INFER_POISON": "1"}),
    Section("models, sanitized", 100, False),
    Section("file", 100, False),
    Section("answers", 100, False),
    Section("several GPUs", 100, False),
    Section("profile, Q4_K", 60),
    Section("profile, BF16", 60),
    Section("models, time", 90),
    Section("contexts, time", 60),
    Section("memory", 50),
    Section("sweeps, time", 60),
    Section("products, time", 40),
    Section("sampler, time", 80),
    *(Section(f"weights {number + 1}", CHECK_SECONDS, False) for number in range(NUM_WEIGHT_SECTIONS)),
    Section("attention", CHECK_SECONDS, False),
    Section("sampler", CHECK_SECONDS, False),
    Section("sums", 120, False),
)


def chosen_sections(names: Iterable[str], device: str, model: Path | None) -> list[Section]:
    """Return the sections with these names, in order. A section that cannot run here has the reason."""
    found, wanted = list[Section](), set(names)
    for section in SECTIONS:
        if section.name not in wanted:
            continue
        if device == "cpu":
            section = section._replace(environment={**section.environment, "TRITON_INTERPRET": "1"})
        if section.name == "models, sanitized":
            tool = None if device == "cpu" else shutil.which("compute-sanitizer")
            section = section._replace(
                prefix=("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"),
                skipped="" if tool else "compute-sanitizer is not here",
            )
        if section.name in ("file", "answers") and model is None:
            section = section._replace(skipped="no --model is given")
        found.append(section)
    return found


def command_of(section: Section, seconds: float, options: argparse.Namespace) -> list[str]:
    program = str(Path(__file__).with_name("gpu_sections.py"))
    command = [sys.executable, "-W", "ignore", program, section.name, "--device", options.device]
    command += ["--seconds", f"{seconds:.0f}"]
    command += ["--tiny"] if options.tiny or section.name == "models, sanitized" else []
    return command + (["--model", str(options.model)] if options.model else [])


def print_report(report: Result) -> None:
    results = report["results"]
    counts = f"{len(results)} results, {report['wrong']} wrong"
    print(f"{report['section']:18} {report['seconds']:6.1f} s, {counts}", report["trouble"], flush=True)
    for result in results:
        if not result.get("is_right", False):
            print("   ", *(_shown(*each) for each in result.items()), flush=True)


def _shown(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return f"{name}: {len(value)} entries"
    return f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}"


def run_all(options: argparse.Namespace, names: Sequence[str], folder: Path) -> list[Result]:
    """Run the sections, print their reports, and return these."""
    reports = list[Result]()
    sections = chosen_sections(names, options.device, options.model)
    at_once = max(1, (os.cpu_count() or 1) // 2)
    for report in run_sections(
        sections, lambda section, seconds: command_of(section, seconds, options), folder,
        seconds=SECONDS, num_at_once=at_once,
    ):  # fmt: skip
        reports.append(report)
        print_report(report)
        if report["section"] == "machine" and _has_no_gpu(report):
            say("there is no CUDA GPU: --device cpu --tiny checks the kernels in Triton's interpreter")
            break
    return reports


def _has_no_gpu(report: Result) -> bool:
    return any(result.get("num_gpus") == 0 for result in report["results"])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu with --tiny (cuda)")
    names = [section.name for section in SECTIONS]
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--all", action="store_const", const=names, dest="sections", help="run every section")
    which.add_argument("--sections", nargs="+", choices=names, metavar="NAME", help=f"of {'; '.join(names)}")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, for the interpreter")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for the results (benchmarks/reports/gpu-TIME)")
    parser.add_argument("--model", type=Path, metavar="FILE", help="a GGUF file, for the section `file`")
    return parser.parse_args(arguments)


def _end(*_: Any) -> None:
    sys.exit(143)  # the exit kills the sections' processes


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, _end)
    folder = options.out or REPORTS / f"gpu-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    names = dict.fromkeys(["machine", *options.sections])  # no section runs if this one finds no GPU
    reports = run_all(options, list(names), folder)
    write_report(options, sections=reports)
    print(f"results: {folder / 'results.jsonl'}")
    if _has_no_gpu(reports[0]):
        return 2
    return int(any(report["wrong"] or (report["trouble"] and not report["is_skipped"]) for report in reports))


if __name__ == "__main__":
    sys.exit(main())
