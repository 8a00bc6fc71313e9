"""Claims about `check_gpu`: if a section hangs, crashes or prints nonsense, the results of the others are kept."""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import section_runs
from section_runs import Result, Section, run_sections

pytestmark = pytest.mark.slow

PATIENCE, HANG = 120.0, 6.0  # seconds that a busy machine may take, and that suffice for the start of Python
RIGHT, WRONG = '{"op": "embed", "is_right": true}', '{"op": "product", "is_right": false}'
CODE: Mapping[str, str] = {
    "right": f"print('{RIGHT}')",
    "wrong": f"print('{RIGHT}'); print('{WRONG}')",
    "crash": f"import os; print('{RIGHT}', flush=True); print('CUDA error: bad address', file=sys.stderr); os._exit(7)",
    "killed": f"import os; print('{RIGHT}', flush=True); os.kill(os.getpid(), 11)",
    "hang": f"import time; print('{RIGHT}', flush=True); print('{RIGHT[:9]}', end='', flush=True); time.sleep(60)",
    "garbage": f"sys.stdout.buffer.write(bytes(range(256)) + b'\\n' + b'[' * 99999 + b'\\n[1]\\n'); print('{RIGHT}')",
    "flood": f"print('{RIGHT}', flush=True)\nwhile True: print('x' * 65536)",
}


def fake_command(section: Section, seconds: float) -> list[str]:
    return [sys.executable, "-S", "-c", f"import sys\n{CODE[section.name]}"]


def results_in(folder: Path) -> list[Result]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def ran(sections: list[Section], folder: Path, command_of: Any = fake_command, **options: Any) -> list[dict[str, Any]]:
    return list(run_sections(sections, command_of, folder, seconds=5 * PATIENCE, **options))


def test_every_section_is_reported_whatever_the_others_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(section_runs, "MOST_BYTES", 1 << 20)
    sections = [Section(name, HANG if name == "hang" else PATIENCE) for name in CODE]
    reports = {report["section"]: report for report in ran(sections, tmp_path)}
    assert (list(reports), results_in(tmp_path)) == (list(CODE), list(reports.values()))
    assert all(report["results"][0] == json.loads(RIGHT) for report in reports.values())
    assert {name: report["wrong"] for name, report in reports.items() if report["wrong"]} == {"wrong": 1}
    troubles = {name: report["trouble"] for name, report in reports.items()}
    assert troubles["right"] == troubles["wrong"] == ""
    assert (troubles["crash"], troubles["killed"]) == ("ended with 7: CUDA error: bad address", "ended with -11: ")
    assert troubles["hang"] == f"took more than {HANG:.0f} s; 1 lines are no results"
    assert re.fullmatch(r"\d+ lines are no results", troubles["garbage"])
    assert troubles["flood"].startswith("printed more than 1 MiB")


def test_all_sections_together_keep_to_their_time(tmp_path: Path) -> None:
    sections = [Section("hang", 30.0), Section("right", PATIENCE)]
    hung, late = run_sections(sections, fake_command, tmp_path, seconds=0.7)
    assert hung["trouble"].startswith("took more than 1 s")
    assert (late["trouble"], late["results"]) == ("no time was left", [])
