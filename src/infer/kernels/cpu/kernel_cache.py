"""Compiled kernels on disk: one folder for each fingerprint of the sources, the compiler and the machine.

So nothing stale or foreign is ever loaded. A file appears whole or not at all, and carries its digest; processes that
start together only write the same bytes twice. Folders that no process has used for a month go when a new one comes.
"""

import hashlib
import os
import platform
import re
import shutil
import sys
import time
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_UNUSED_SECONDS = 30 * 24 * 3600.0
_TOUCH_SECONDS = 24 * 3600.0  # how old the mark of the last use may get
_MOST_FOLDERS = 16
_FOLDER = re.compile(r"[0-9a-f]{16}")
# What /proc/cpuinfo says of a processor that code may depend on: x86, then ARM, then others.
_PROCESSOR = frozenset(
    {"vendor_id", "cpu family", "model", "model name", "stepping", "flags"}
    | {"Features", "CPU implementer", "CPU architecture", "CPU variant", "CPU part"}
    | {"isa", "uarch", "cpu", "machine"}
)


def read(name: str) -> bytes | None:
    """None if it is absent or damaged."""
    folder = cache_folder()
    try:
        content = b"" if folder is None else (folder / name).read_bytes()
    except OSError:
        return None
    digest, _, rest = content.partition(b"\n")
    return rest if digest == _digest(rest) else None


def write(name: str, content: bytes) -> None:
    """No error where it cannot be written."""
    folder = cache_folder()
    if folder is None:
        return
    partial = folder / f"{name}.{os.getpid()}.partial"
    try:
        partial.write_bytes(_digest(content) + b"\n" + content)
        partial.replace(folder / name)
    except OSError:  # the disk is full, the folder is for reading only, or it went away
        with suppress(OSError):
            partial.unlink()


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


@cache
def cache_folder() -> Path | None:
    """$INFER_CACHE, else $XDG_CACHE_HOME/infer, else ~/.cache/infer; None where there is none and none can be made."""
    given = os.environ.get("INFER_CACHE")
    base = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infer"
    folder = base / "kernels" / fingerprint()
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            prune(folder)
    except OSError:
        return None
    with suppress(OSError):  # it may be for reading only
        if time.time() - folder.stat().st_mtime > _TOUCH_SECONDS:
            os.utime(folder)
    return folder


def prune(newest: Path) -> None:
    """Remove the neighbours of a folder that were not used for a month, and the oldest where they are many. A process
    that works from one of them goes on with what it has loaded, and compiles what it has not."""
    used = {}
    for folder in newest.parent.iterdir():
        if folder != newest and _FOLDER.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink():
            used[folder] = folder.stat().st_mtime
    latest_first = sorted(used, key=used.__getitem__, reverse=True)
    for rank, folder in enumerate(latest_first):
        if rank >= _MOST_FOLDERS - 1 or time.time() - used[folder] > _UNUSED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


# Where kernels of this package take constants from.
_CONSTANTS = [
    Path(__file__).parents[2] / name
    for name in ("kv_types.py", "sampling/noise.py", "sampling/weight.py", "sampling/sampler.py")
]


@cache
def fingerprint() -> str:
    digest = hashlib.sha256()
    for source in [*sorted(Path(__file__).parent.glob("*.py")), *_CONSTANTS]:
        digest.update(source.name.encode() + source.read_bytes())
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith("NUMBA_"))
    compiler = [_version(name) for name in ("numba", "llvmlite", "numpy")]
    digest.update(repr((compiler, sys.version, platform.machine(), settings, _numba_file())).encode())
    digest.update(_processor().encode())
    return digest.hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # it was not installed by a package manager
        return str(import_module(package).__version__)


def _numba_file() -> bytes:
    """Settings that Numba reads in the working directory."""
    try:
        return Path(".numba_config.yaml").read_bytes()
    except OSError:
        return b""


def _processor() -> str:
    """Its name and features, as the system tells them or else LLVM."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            first = file.read(1 << 14).partition("\n\n")[0]  # the whole takes 10 ms where processors are many
    except OSError:
        first = ""
    fields = dict(line.partition(":")[::2] for line in first.splitlines())
    known = {name.strip(): value.strip() for name, value in fields.items() if name.strip() in _PROCESSOR}
    if "flags" in known or "Features" in known:
        return repr(sorted(known.items()))
    return str(import_module("infer.kernels.cpu.compiler").host())
