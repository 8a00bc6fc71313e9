"""Small compiled functions behind pointers: every command of the table is one, compiled on first use, kept on disk.

All have the signature `void(arguments*, state*, thread, num_threads)`; what `arguments` holds is a numpy record type
of the kernel's own. A variant's name is its file's name in the cache, and the cache's folder carries a fingerprint of
the sources and the machine, so nothing stale or foreign is ever loaded and processes that start together only write
the same bytes twice.
"""

import hashlib
import os
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from numba import cfunc, types
from numba.core import config
from numba.np.numpy_support import from_dtype

from infer.kernels.cpu.state import STATE

_lock = threading.RLock()
_compiled: dict[str, Any] = {}
_cold_names: list[str] = []


def compiled_address(name: str, make: Callable[[], Callable[..., None]], arguments: np.dtype) -> int:
    """The address of the command `name`, whose Python source `make` returns."""
    with _lock:
        if name not in _compiled:
            _compiled[name] = _compile(name, make(), arguments)
        address: int = _compiled[name].address
        return address


def _compile(name: str, function: Callable[..., None], arguments: np.dtype) -> Any:
    function.__name__ = function.__qualname__ = name
    signature = types.void(
        types.CPointer(from_dtype(arguments)), types.CPointer(from_dtype(STATE)), types.intp, types.intp
    )
    folder = cache_folder()
    if folder is None or not any(folder.rglob(f"*{name}-*.nbi")):
        _announce(name)
    given = config.CACHE_DIR
    config.CACHE_DIR = given if folder is None else str(folder)
    try:
        return cfunc(signature, nopython=True, error_model="numpy", cache=folder is not None)(function)
    except OSError:  # the disk is full, or the folder went away
        return cfunc(signature, nopython=True, error_model="numpy")(function)
    finally:
        config.CACHE_DIR = given
        if _cold_names and sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")


def _announce(name: str) -> None:
    _cold_names.append(name)
    if sys.stderr.isatty():
        sys.stderr.write(f"\rinfer: compiling CPU kernels, once per machine {'▪' * len(_cold_names)} {name}\x1b[K")
    elif len(_cold_names) == 1:
        sys.stderr.write("infer: compiling CPU kernels, once per machine\n")
    sys.stderr.flush()


@cache
def cache_folder() -> Path | None:
    """$INFER_CACHE, else $XDG_CACHE_HOME/infer, else ~/.cache/infer; None where nothing can be written."""
    given = os.environ.get("INFER_CACHE")
    base = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infer"
    folder = base / "kernels" / fingerprint()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


@cache
def fingerprint() -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    machine = (numba.__version__, sys.version, config.CPU_NAME, config.CPU_FEATURES, llvm.get_host_cpu_name())
    digest.update(repr(machine).encode())
    digest.update(llvm.get_host_cpu_features().flatten().encode())
    return digest.hexdigest()[:16]
