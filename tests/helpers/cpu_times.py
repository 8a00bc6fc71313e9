"""A plugin of pytest that prints the CPU time of each file of tests: `pytest -p cpu_times tests`.

It counts the user and system time of the worker and of the processes that it has waited for. A fixture, an import or a
kernel that is compiled counts for the test that comes first. CPU_TIMES=FILE also writes a line for each test.
"""

import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

NUM_SHOWN = 40

_by_test = Counter[str]()
_before = 0.0


def cpu_seconds() -> float:
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to each phase of a test the CPU time since the end of the phase before."""
    global _before
    report, now = (yield), cpu_seconds()
    report.user_properties = [*report.user_properties, ("cpu", now - _before)]
    _before = now
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _by_test[report.nodeid] += sum(value for name, value in report.user_properties if name == "cpu")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    by_file, number = Counter[str](), Counter[str]()
    for test, seconds in _by_test.items():
        by_file[test.partition("::")[0]] += seconds
        number[test.partition("::")[0]] += 1
    terminalreporter.section(f"{sum(by_file.values()):.0f} s of CPU time in {len(_by_test)} tests")
    for file, seconds in by_file.most_common(NUM_SHOWN):
        terminalreporter.write_line(f"{seconds:8.1f} s  {number[file]:4} tests  {file}")
    if path := os.environ.get("CPU_TIMES"):
        lines = [f"{seconds:.3f} {test}\n" for test, seconds in _by_test.most_common()]
        Path(path).write_text("".join(lines), encoding="utf-8")
