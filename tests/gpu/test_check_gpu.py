"""Claims about `check_gpu`: a section that fails is reported, and the next one begins."""

import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import check_gpu


def test_sections_that_fail_or_run_out_of_time_are_reported_with_what_they_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, wrong = b'{"op": "embed", "is_right": true}\n', b'{"op": "product", "is_right": false}\n'
    asked = list[str]()

    def run(command: list[str], **options: Any) -> CompletedProcess[bytes]:
        name = command[command.index("--section") + 1]
        asked.append(name)
        if name == "attention":
            return CompletedProcess(
                command, 7, b"a line\n" + right + wrong, b"Traceback\nCUDA error: misaligned address\n"
            )
        if name == "sampler":
            raise subprocess.TimeoutExpired(command, options["timeout"], output=right + b'{"op": "samp')
        return CompletedProcess(command, 0, right, b"")

    monkeypatch.setattr(subprocess, "run", run)
    reports = {report.pop("section"): report for report in check_gpu.run_all(torch.device("cpu"), is_tiny=True)}
    assert list(reports) == list(check_gpu.SECTIONS)
    assert set(asked) == check_gpu.SECTIONS.keys() - {"models, sanitized"}
    timings = [name for name in check_gpu.SECTIONS if check_gpu.is_timing(name)]
    assert asked[-len(timings) :] == timings
    assert reports["attention"]["trouble"] == "ended with 7: CUDA error: misaligned address"
    assert reports["attention"]["wrong"] == 1
    assert len(reports["attention"]["results"]) == 2
    assert reports["sampler"]["trouble"] == "no time was left"
    assert len(reports["sampler"]["results"]) == 1
    assert reports["weights"]["trouble"] == ""
