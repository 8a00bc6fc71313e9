"""Compiled kernels on disk: one folder per fingerprint of the sources, the compiler and the machine.

So nothing stale or foreign is ever loaded; `user_cache` decides which folders and files are trusted. A file is written
atomically and contains its digest; processes that start together only write the same bytes twice. Folders that were not
used for a month are removed when a new folder is made.
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
from importlib.util import find_spec
from pathlib import Path

from infer.system.status_line import write_notice
from infer.system.user_cache import base_folder, folder_problem, is_writable, read_own, write_own

MOST_BYTES = 16 << 20  # of a file: the largest kernel is a hundredth of it
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
    """Return a stored kernel's content; None if it is absent or damaged, or if others may write it."""
    folder = cache_folder()
    content = None if folder is None else read_own(folder / name, MOST_BYTES)
    digest, _, rest = (content or b"").partition(b"\n")
    return rest if digest == _digest(rest) else None


def write(name: str, content: bytes) -> None:
    """Store a kernel. The first failure is written to stderr, and `trouble` reports it from then on."""
    folder = cache_folder()
    if folder is not None and (error := write_own(folder / name, _digest(content) + b"\n" + content)) is not None:
        _failures.append(f"{folder} cannot be written ({error.strerror})")
        if len(_failures) == 1 and _found()[1] is None:  # else the line about compiling says so
            write_notice(f"infer: compiled kernels are for this process only: {_failures[0]} (set INFER_CACHE)")


def is_kept(name: str) -> bool:
    """Return True if a kernel is stored under this name. `read` may still refuse the file."""
    folder = cache_folder()
    return folder is not None and (folder / name).is_file()


def is_empty() -> bool:
    """Return True if no kernel of this fingerprint was ever stored."""
    folder = cache_folder()
    return folder is None or not any("." in path.name for path in folder.iterdir())


def trouble() -> str | None:
    """Return the reason why nothing can be stored, in one line; None if there is none."""
    return _failures[-1] if _failures else _found()[1]


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


_failures: list[str] = []


def cache_folder() -> Path | None:
    """Return the folder of this fingerprint's kernels; None if there is no folder that could be trusted."""
    return _found()[0]


@cache
def _found() -> tuple[Path | None, str | None]:
    """Return the folder, if there is one, and the reason why nothing can be stored, if there is one."""
    base = base_folder()
    if base is None:
        return None, "there is no home folder to keep them in"
    folder = base / "kernels" / fingerprint()
    is_new = not folder.is_dir()
    if (problem := folder_problem(folder, base=base)) is not None:
        return None, problem
    if not is_writable(folder):
        return folder, f"{folder} cannot be written"
    with suppress(OSError):
        if is_new:
            prune(folder)
        if time.time() - folder.stat().st_mtime > _TOUCH_SECONDS:
            os.utime(folder)
    return folder, None


def prune(newest: Path) -> None:
    """Remove the folders beside `newest` that were not used for a month, and the oldest if there are many.

    A process that works from a removed folder keeps its loaded kernels, and compiles the others again.
    """
    used = {}
    for folder in newest.parent.iterdir():
        if folder != newest and _FOLDER.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink():
            used[folder] = folder.stat().st_mtime
    latest_first = sorted(used, key=used.__getitem__, reverse=True)
    for rank, folder in enumerate(latest_first):
        if rank >= _MOST_FOLDERS - 1 or time.time() - used[folder] > _UNUSED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


_PACKAGE = Path(__file__).parents[1]
CONSTANTS = (  # modules of other packages whose constants the kernels contain
    "infer.compute.operands.limits",
    "infer.compute.quantization.ggml_grids",
    "infer.compute.quantization.ggml_types",
    "infer.compute.quantization.kv_formats",
    "infer.request_limits",
    "infer.compute.sampling.constants",
    "infer.sampling_params",
)


@cache
def fingerprint() -> str:
    digest = hashlib.sha256(sources_digest().encode())
    compiler = [_version(name) for name in ("numba", "llvmlite", "numpy")]
    system = platform.machine(), platform.mac_ver()[0]  # an older macOS lacks functions that kernels call
    digest.update(repr((compiler, sys.version, *system, *numba_settings())).encode())
    digest.update(_processor().encode())
    return digest.hexdigest()[:16]


@cache
def sources_digest() -> str:
    digest = hashlib.sha256()
    for name, path in sources().items():
        digest.update(name.encode() + path.read_bytes())
    return digest.hexdigest()


def sources() -> dict[str, Path]:
    """Return the files that the kernels are made from, by name. Raises ModuleNotFoundError if a module is missing."""
    found = {path.relative_to(_PACKAGE).as_posix(): path for path in sorted(_PACKAGE.rglob("*.py"))}
    for module in CONSTANTS:
        spec = find_spec(module)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"{module} has no source, so compiled kernels cannot name it", name=module)
        found[module] = Path(spec.origin)
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # it was not installed by a package manager
        return str(import_module(package).__version__)


def _processor() -> str:
    """Return the processor's name and features, as the system reports them or else LLVM."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            first = file.read(1 << 14).partition("\n\n")[0]  # the whole takes 10 ms where processors are many
    except OSError:
        first = ""
    fields = dict(line.partition(":")[::2] for line in first.splitlines())
    known = {name.strip(): value.strip() for name, value in fields.items() if name.strip() in _PROCESSOR}
    if "flags" in known or "Features" in known:
        return repr(sorted(known.items()))
    return str(import_module("infer.compute.backends.cpu.host.host_features").host())


def has_numba_settings() -> bool:
    return any(numba_settings())


def numba_settings() -> tuple[list[tuple[str, str]], bytes]:
    """Return Numba's settings in the environment, and those that it reads in the working directory."""
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith("NUMBA_"))
    try:
        return variables, Path(".numba_config.yaml").read_bytes()
    except OSError:
        return variables, b""
