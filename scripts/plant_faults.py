"""Plant faults in copies of the sources, one at a time, and run the tests that must fail with each.

    python scripts/plant_faults.py                   every fault of tests/data/planted-faults.toml
    python scripts/plant_faults.py K1 K3 --jobs 2    these faults, two at a time
    python scripts/plant_faults.py --promises        run only those tests that `make test` runs
    python scripts/plant_faults.py --check           plant nothing: each fault must still apply

The working tree is never changed. A fault is `killed` if one of its tests fails, and has `survived` if all pass. Exit
status 1 if a fault survived, 2 if a fault does not apply or pytest could not run its tests.
"""

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FAULTS = ROOT / "tests" / "data" / "planted-faults.toml"
FOLDERS = ("src", "tests", "benchmarks", "scripts", "docs", "deploy", "examples", ".ci", ".github")
COPIED = (*FOLDERS, ".dockerignore", "CHANGELOG.md", "Dockerfile", "LICENSE", "Makefile", "README.md", "pyproject.toml")
SECONDS = 600
_TESTS_FAILED = 1  # pytest's exit status; from 2 on, it has no verdict
_NO_TESTS = (4, 5)  # `make test` leaves out the file, or all of its tests that are named


class Fault(NamedTuple):
    """A fault: `new` replaces `old`, which occurs once in `file`, a path below src/infer."""

    id: str
    about: str
    file: str
    old: str
    new: str
    tests: Sequence[str]  # pytest's names, below tests/

    @property
    def path(self) -> Path:
        return Path("src", "infer", self.file)


def read_faults(path: Path = FAULTS) -> list[Fault]:
    return [Fault(**each) for each in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]]


def problem_of(fault: Fault, root: Path = ROOT) -> str | None:
    """Return one line that says why the fault cannot be planted, or None."""
    path = root / fault.path
    if not path.is_file():
        return f"{fault.id}: {fault.path} does not exist"
    count = path.read_text(encoding="utf-8").count(fault.old)
    if count != 1:
        return f"{fault.id}: the old text occurs {count} times in {fault.path}, must occur once: {fault.old!r}"
    if fault.old == fault.new:
        return f"{fault.id}: the new text is the old one"
    if not fault.tests:
        return f"{fault.id}: no test is named"
    missing = [test for test in fault.tests if not _is_defined(test, root)]
    return f"{fault.id}: {missing[0]} does not exist" if missing else None


def _is_defined(test: str, root: Path) -> bool:
    file, *names = test.split("::")
    path = root / "tests" / file
    return path.is_file() and all(
        f"def {name.partition('[')[0]}(" in path.read_text(encoding="utf-8") for name in names
    )


def verdict_of(fault: Fault, root: Path, extent: str = "") -> tuple[str, str]:
    """Return `killed`, `survived` or `error`, and the last lines of pytest. `root` is a copy, and is restored."""
    path = root / fault.path
    clean = path.read_text(encoding="utf-8")
    path.write_text(clean.replace(fault.old, fault.new), encoding="utf-8")
    try:
        return _run_tests(fault.tests, root, extent)
    finally:
        path.write_text(clean, encoding="utf-8")


def _run_tests(tests: Sequence[str], root: Path, extent: str) -> tuple[str, str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line"]
    names = [f"tests/{test}" for test in tests]
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "", "INFER_TESTS": extent}
    try:
        done = subprocess.run(
            [*command, *names], cwd=root, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "killed", f"no end within {SECONDS} s"
    lines = (done.stdout + done.stderr).strip().splitlines()[-4:]
    if extent and done.returncode in _NO_TESTS and "ERROR tests/" not in done.stdout:
        return "survived", "make test runs none of its tests"
    if done.returncode in (0, _TESTS_FAILED):
        return ("killed" if done.returncode else "survived"), "\n".join(lines)
    return "error", "\n".join([f"pytest's exit status is {done.returncode}", *lines])


def copy_sources(root: Path, to: Path) -> Path:
    to.mkdir()
    ignored = shutil.ignore_patterns("*.egg-info")
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=ignored)
        elif source.exists():
            shutil.copy2(source, to / name)
    return to


def plant(faults: Sequence[Fault], num_jobs: int, root: Path = ROOT, extent: str = "") -> dict[str, str]:
    """Return the verdict on each fault, by its id. Print each one as soon as it is known."""
    verdicts = dict[str, str]()
    with tempfile.TemporaryDirectory(prefix="infer-faults-") as scratch, ThreadPoolExecutor(num_jobs) as pool:
        copies = queue.SimpleQueue[Path]()
        for number in range(num_jobs):
            copies.put(copy_sources(root, Path(scratch, str(number))))

        def run(fault: Fault) -> None:
            copy = copies.get()
            try:
                verdicts[fault.id], told = verdict_of(fault, copy, extent)
            finally:
                copies.put(copy)
            print(f"{verdicts[fault.id]:<9} {fault.id:<5} {fault.about}", flush=True)
            if verdicts[fault.id] != "killed":
                print(told, file=sys.stderr, flush=True)

        list(pool.map(run, faults))
    return verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", help="default: all")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time, default 1")
    parser.add_argument("--promises", action="store_true", help="run only those tests that `make test` runs")
    parser.add_argument("--check", action="store_true", help="plant nothing: each fault must still apply")
    parser.add_argument("--faults", type=Path, default=FAULTS, help="another list of faults")
    options = parser.parse_args(arguments)
    faults = read_faults(options.faults)
    if unknown := set(options.ids) - {fault.id for fault in faults}:
        parser.error(f"no fault has the id {', '.join(sorted(unknown))}")
    chosen = [fault for fault in faults if not options.ids or fault.id in options.ids]
    problems = [problem for fault in chosen if (problem := problem_of(fault)) is not None]
    for problem in problems:
        print(f"no longer applies: {problem}", file=sys.stderr)
    if problems or options.check:
        return 2 if problems else 0
    extent = "promises" if options.promises else ""
    verdicts = list(plant(chosen, max(1, options.jobs), extent=extent).values())
    print(", ".join(f"{verdicts.count(each)} {each}" for each in ("killed", "survived", "error")))
    return 2 if "error" in verdicts else int("survived" in verdicts)


if __name__ == "__main__":
    sys.exit(main())
