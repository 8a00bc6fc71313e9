"""Build a wheel of the tracked files, and try it in an empty folder.

    python scripts/check_wheel.py

The wheel must have each tracked file of `src/infer`, and no other. From the unpacked wheel, `infer serve` must answer
with the page, the page's files and a token, and OpenCL's kernels must be readable. Needs setuptools and pip, and no
network. The exit status is 1 if a check fails.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "tests" / "data" / "old" / "model"
SECONDS = 300.0
PAGE_SUFFIXES = (".css", ".html", ".js", ".svg")
READ_KERNELS = """
import sys
from infer.compute.backends.opencl.runtime import _text
print(sum(len(_text(name)) for name in sys.argv[1:]))
"""
_open = build_opener(ProxyHandler({})).open


def tracked_files() -> dict[str, Path]:
    """Return the tracked files of the package, by their names in a wheel."""
    listed = subprocess.run(["git", "ls-files", "-z", "src/infer"], cwd=ROOT, check=True, capture_output=True)
    names = listed.stdout.decode().split("\0")
    return {name.removeprefix("src/"): ROOT / name for name in names if name and (ROOT / name).exists()}


def build_wheel(files: dict[str, Path], folder: Path) -> Path:
    """Build a wheel in a copy of the sources, so that nothing is written beside them and old builds add nothing."""
    copied = {f"src/{name}": path for name, path in files.items()}
    copied |= {name: ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE")}
    for name, path in copied.items():
        (folder / "sources" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "sources" / name).write_bytes(path.read_bytes())
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, "./sources"], cwd=folder, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_files(wheel: Path, files: dict[str, Path]) -> None:
    """Raise AssertionError unless the wheel has these files with their bytes, and only its metadata besides."""
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert found == set(files), f"the wheel differs from the tracked files in {sorted(found ^ set(files))}"
        changed = [name for name, path in files.items() if archive.read(name) != path.read_bytes()]
    assert not changed, f"the wheel has other bytes of {changed}"


@contextmanager
def serving(environment: dict[str, str], folder: Path) -> Iterator[str]:
    """Serve the tiny model within the context, and yield the server's address when it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "infer", "serve", str(MODEL), "--port", str(port), "--served-model-name", "tiny"]
    process = subprocess.Popen([*command, "--quiet", "--no-access-log"], cwd=folder, env=environment)
    try:
        wait_until_ready(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=SECONDS)


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError), _open(f"{url}/ready", timeout=SECONDS):
            return
        time.sleep(0.2)
    raise AssertionError(f"the server is not ready: its exit status is {process.poll()}")


def check_server(url: str, files: dict[str, Path]) -> None:
    """Raise AssertionError unless the server has all files of the page, and generates a token."""
    page = {path.name: path for path in files.values() if path.suffix in PAGE_SUFFIXES}
    assert "index.html" in page
    for name, path in page.items():
        with _open(f"{url}/{'' if name == 'index.html' else f'page/{name}'}", timeout=SECONDS) as answer:
            assert answer.read() == path.read_bytes(), f"the server sends other bytes of {name}"
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1}).encode()
    with _open(f"{url}/v1/completions", data=body, timeout=SECONDS) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 1


def run_python(code: str, arguments: list[str], environment: dict[str, str], folder: Path) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder, files = Path(name), tracked_files()
        wheel = build_wheel(files, folder)
        empty, unpacked = folder / "empty", folder / "unpacked"
        empty.mkdir()
        zipfile.ZipFile(wheel).extractall(unpacked)
        environment = {**os.environ, "PYTHONPATH": str(unpacked), "PYTHONDONTWRITEBYTECODE": "1"}
        kernels = [path for path in files.values() if path.suffix == ".cl"]
        try:
            check_files(wheel, files)
            found = run_python("import infer; print(infer.__file__)", [], environment, empty)
            assert Path(found).is_relative_to(unpacked), f"infer was imported from {found}"
            read = run_python(READ_KERNELS, [path.name for path in kernels], environment, empty)
            assert int(read) == sum(len(path.read_text()) for path in kernels) > 0
            with serving(environment, empty) as url:
                check_server(url, files)
        except AssertionError as error:
            print(f"{wheel.name}: {error}", file=sys.stderr)
            return 1
    print(f"{wheel.name}: {len(files)} files, {len(kernels)} files of kernels for OpenCL, and the server answers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
