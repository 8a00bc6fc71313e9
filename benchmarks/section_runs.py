"""Sections of a check, each in a separate process with a time limit, so that no result is lost.

A section prints a line of JSON per result, into a file of its own. When it has ended, its report is appended to
`results.jsonl`. What a section finds is kept if it crashes, if it is killed, and if this process is killed. A section
that hangs in a driver does not end when it is killed: it is left behind, and the next one begins.
"""

import json
import os
import re
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, final

Result = dict[str, Any]
MOST_BYTES = 1 << 25  # limit of a section's output
KILL_SECONDS = 5.0  # time for a process to end after SIGKILL
POLL_SECONDS = 0.05


@final
class Section(NamedTuple):
    name: str
    seconds: float  # its limit
    is_alone: bool = True  # True for timings, which run alone
    environment: Mapping[str, str] = {}
    prefix: tuple[str, ...] = ()  # a program that runs the section's command
    skipped: str = ""  # the reason why it does not run


def run_sections(
    sections: Sequence[Section],
    command_of: Callable[[Section, float], Sequence[str]],
    folder: Path,
    *,
    seconds: float,
    num_at_once: int = 1,
) -> Iterator[Result]:
    """Run the sections in their order, and yield the report of each one when it ends.

    Neighbours that are not alone run at the same time, `num_at_once` of them. `command_of` is given a section and the
    seconds that it may take. All sections together take `seconds`, and a few more if processes cannot be killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ends, waiting, running = time.monotonic() + seconds, deque(sections), list[_Run]()
    try:
        while waiting or running:
            while waiting and _may_start(waiting[0], running, num_at_once):
                section = waiting.popleft()
                left = min(section.seconds, ends - time.monotonic())
                if section.skipped or left <= 0:
                    yield _keep(folder, _report(section, 0.0, section.skipped or "no time was left"))
                else:
                    running.append(_Run(section, command_of(section, left), folder, left))
            for run in list(running):
                if (report := run.try_report()) is not None:
                    running.remove(run)
                    yield _keep(folder, report)
            time.sleep(POLL_SECONDS if running else 0)
    finally:
        for run in running:
            run.kill()
        for run in running:
            run.wait_until(time.monotonic() + KILL_SECONDS / len(running))


def _may_start(section: Section, running: "Sequence[_Run]", num_at_once: int) -> bool:
    if section.is_alone or any(run.section.is_alone for run in running):
        return not running
    return len(running) < num_at_once


@final
class _Run:
    """A section's process, and the files that it writes. Only `wait_until` waits."""

    def __init__(self, section: Section, command: Sequence[str], folder: Path, seconds: float) -> None:
        self.section, self._started = section, time.monotonic()
        name = re.sub(r"\W+", "-", section.name)
        self._output, self._errors = folder / f"{name}.jsonl", folder / f"{name}.log"
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [*section.prefix, *command],
                env={**os.environ, **section.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,  # so that its children can be killed too
            )
        self._ends, self._trouble = self._started + seconds, ""

    def try_report(self) -> Result | None:
        """Return the report of a section that has ended or cannot be ended, else None."""
        now, status = time.monotonic(), self._process.poll()
        if status is not None:
            self._signal()  # kills remaining children
            return self._report(self._trouble or (f"ended with {status}: {self._last_error()}" if status else ""))
        if not self._trouble:
            if now >= self._ends:
                self._trouble = f"took more than {self._ends - self._started:.0f} s: {self._last_error()}".rstrip(": ")
            elif self._output.stat().st_size + self._errors.stat().st_size > MOST_BYTES:
                self._trouble = f"printed more than {MOST_BYTES >> 20} MiB"
            if self._trouble:
                self.kill()
        elif now > self._ends + KILL_SECONDS:
            return self._report(f"{self._trouble}; process {self._process.pid} does not end and is left behind")
        return None

    def kill(self) -> None:
        self._ends = min(self._ends, time.monotonic())
        self._signal()

    def wait_until(self, deadline: float) -> None:
        """Wait for the end of a killed process, for a limited time."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))

    def _signal(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _last_error(self) -> str:
        with self._errors.open("rb") as errors:
            errors.seek(max(0, os.fstat(errors.fileno()).st_size - 4096))
            lines = errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else ""

    def _report(self, trouble: str) -> Result:
        results, num_others = read_results(self._output)
        if num_others:
            trouble = f"{trouble}; {num_others} lines are no results".removeprefix("; ")
        return _report(self.section, time.monotonic() - self._started, trouble, results)


def read_results(path: Path) -> tuple[list[Result], int]:
    """Return the results of a section's output, and the number of its other lines."""
    with path.open("rb") as output:
        lines = [line for line in output.read(MOST_BYTES).splitlines() if line.strip()]
    results = [result for result in map(_try_result, lines) if result is not None]
    return results, len(lines) - len(results)


def _try_result(line: bytes) -> Result | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _report(section: Section, seconds: float, trouble: str, results: Sequence[Result] = ()) -> Result:
    wrong = sum(not result.get("is_right", True) for result in results)
    return {"section": section.name, "seconds": round(seconds, 1), "wrong": wrong, "is_skipped": bool(section.skipped),
            "trouble": trouble, "results": list(results)}  # fmt: skip


def _keep(folder: Path, report: Result) -> Result:
    with (folder / "results.jsonl").open("a", encoding="utf-8") as results:
        results.write(json.dumps(report) + "\n")
        results.flush()
        os.fsync(results.fileno())
    return report
