"""Reports of `infer bench`: the figures of configs as JSON, with the machine and the versions, and their comparison."""

import json
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import infer
from infer.cli.bench.speed import Speed
from infer.cli.option_files import check_writable, refusing
from infer.errors import InvalidRequestError
from infer.llm import LLM
from infer.system.atomic import replacing
from infer.system.cores import processor_name

_FORMAT = "infer-bench"
Report = dict[str, Any]
# Facts that make two reports hard to compare if they differ.
_CONDITIONS = (
    *("model", "device", "gpu_name", "cpu_name", "threads", "instruction_set", "dtype", "weights", "precision"),
    *("kv_type", "seed", "warmups", "trials"),
)
COMPARED = {  # key of a figure → its heading, and True if more is better
    "ttft_median_ms": ("TTFT ms", False),
    "prompt_throughput_median_tps": ("prompt tok/s", True),
    "decode_throughput_median_tps": ("decode tok/s", True),
    "per_step_latency_p50_ms": ("p50 ms", False),
    "per_step_latency_p99_ms": ("p99 ms", False),
}


def make_report(
    llm: LLM, setting: Mapping[str, Any], suite: str | None, speeds: Mapping[str, Speed], skipped: Mapping[str, str]
) -> Report:
    """Return the report of at least one measured config. `skipped` has the reasons of the others."""
    device, first = llm.model.device, next(iter(speeds.values()))
    return {
        "format": _FORMAT,
        "suite": suite,
        **setting,
        "device": str(device),
        "gpu_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cpu_name": processor_name(),
        "threads": first.threads,
        "kv_type": llm.model.kv_type,
        "max_seq_len": llm.max_seq_len,
        "seed": first.workload.seed,
        "warmups": first.workload.warmups,
        "trials": first.workload.repeats,
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "infer_version": infer.__version__,
        "commit": _commit(),
        "python_version": platform.python_version(),
        "torch_version": torch.__version__,
        "cuda_version": torch.version.cuda if device.type == "cuda" else None,
        "numba_version": version("numba"),
        "configs": [{"name": name, **_figures(speed)} for name, speed in speeds.items()],
        "skipped": [{"name": name, "reason": reason} for name, reason in skipped.items()],
    }


def _figures(speed: Speed) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt_tokens": speed.workload.prompt_tokens,
        "generated_tokens": speed.workload.new_tokens,
        "context": speed.workload.depth,
        "sampling": dict(speed.workload.sampling),
        "ttft_median_ms": 1e3 * speed.ttft_s,
        "prompt_throughput_median_tps": speed.prefill_tokens_per_second,
        "decode_throughput_median_tps": speed.decode_tokens_per_second,
        "end_to_end_throughput_median_tps": speed.end_to_end_tokens_per_second,
        "wall_time_median_s": speed.wall_s,
        "per_step_latency_mean_ms": 1e3 * speed.inter_token_mean_s,
        "per_step_latency_p50_ms": 1e3 * speed.inter_token_p50_s,
        "per_step_latency_p95_ms": 1e3 * speed.inter_token_p95_s,
        "per_step_latency_p99_ms": 1e3 * speed.inter_token_p99_s,
    }
    for name, step in (("min", speed.fastest_step), ("max", speed.slowest_step)):
        found[f"per_step_latency_{name}_ms"] = step and 1e3 * step.seconds
        found[f"per_step_latency_{name}_step"] = step and step.step
        found[f"per_step_latency_{name}_seq_len"] = step and step.seq_len
    memory = {
        "post_load_memory_gb": speed.loaded_resident_bytes,
        "peak_memory_gb": speed.peak_resident_bytes,
        "post_load_gpu_memory_gb": speed.loaded_gpu_bytes,
        "peak_gpu_memory_gb": speed.peak_gpu_bytes,
    }
    return found | {name: num_bytes and num_bytes / 1e9 for name, num_bytes in memory.items()}


def _commit() -> str | None:
    """Return the commit of the source tree that runs, or None for an installed package."""
    root = Path(infer.__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "--verify", "HEAD"]
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip() or None
    return None


# Files


def check_report(path: Path | None) -> None:
    """Raise InvalidRequestError if no report can be written there."""
    if path is not None and not path.is_dir():
        check_writable(path, f"the report {path}")


def write_report(path: Path, report: Report) -> Path:
    """Write a report to a file, or to a new file in a folder, and return the file's path."""
    if path.is_dir():
        when = report["timestamp"][:19].translate({ord(each): None for each in "-:"}).replace("T", "-")
        path /= f"bench-{Path(report['model']).name}-{report['suite'] or 'single'}-{when}.json"
    with refusing(f"the report {path} cannot be written"), replacing(path, 0o666) as file:
        file.write(json.dumps(report, indent=1, ensure_ascii=False).encode() + b"\n")
    return path


def read_report(path: Path) -> Report:
    """Return a report of an earlier run. Raises InvalidRequestError if the file is none."""
    found = None
    with refusing(f"the report {path} cannot be read"), suppress(ValueError, RecursionError):
        found = json.loads(path.read_bytes())
    if not isinstance(found, dict) or found.get("format") != _FORMAT or not _are_configs(found.get("configs")):
        raise InvalidRequestError(f"{path} is not a report of infer bench: write one with --report")
    return found


def _are_configs(configs: object) -> bool:
    return isinstance(configs, list) and all(
        isinstance(each, dict)
        and isinstance(each.get("name"), str)
        and all(isinstance(each.get(key), int | float) for key in COMPARED)
        for each in configs
    )


# Comparison


def differences(before: Report, after: Report) -> Iterator[str]:
    """Yield a sentence for each condition in which two reports differ."""
    for name in _CONDITIONS:
        if before.get(name) != after.get(name):
            yield f"{name} differs: {before.get(name)} before, {after.get(name)} now"


def compare(before: Report, after: Report) -> dict[str, dict[str, float | None] | str]:
    """Return, for each config of either report, the ratios of its figures, or a text that says which side lacks it.

    A ratio is the figure now divided by the figure before. It is None if the figure before is 0.
    """
    old, new = ({each["name"]: each for each in report["configs"]} for report in (before, after))
    found: dict[str, dict[str, float | None] | str] = {}
    for name in {**new, **old}:
        if name not in old or name not in new:
            found[name] = "only measured now" if name in new else "only in the report"
        else:
            found[name] = {key: new[name][key] / old[name][key] if old[name][key] else None for key in COMPARED}
    return found
