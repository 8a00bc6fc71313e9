"""Small compiled functions behind pointers: every command of the table is one, compiled on first use, kept on disk.

All have the signature `void(arguments*, state*, thread, num_threads)`; what `arguments` holds is a numpy record type
of the kernel's own. A variant's name is its file's name in the cache, and the cache's folder carries a fingerprint of
the sources and the machine, so nothing stale or foreign is ever loaded and processes that start together only write
the same bytes twice.
"""

import ctypes
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
_address_by_name: dict[str, int] = {}
_cold_names: list[str] = []

# The wrapper that Numba puts around a command has a path for errors, which no command takes, and it calls these.
_NEVER_CALLED = frozenset(
    {"NRT_Free", "NRT_MemInfo_call_dtor", "numba_do_raise", "numba_gil_ensure", "numba_gil_release"}
    | {"numba_runtime_build_excinfo_struct", "numba_unpickle"}
)


def compiled_address(name: str, make: Callable[[], Callable[..., None]], arguments: np.dtype) -> int:
    """The address of the command `name`, whose Python source `make` returns."""
    with _lock:
        if name not in _address_by_name:
            _address_by_name[name] = _try_load(name) or _compile(name, make(), arguments)
        return _address_by_name[name]


@cache
def _engine() -> llvm.ExecutionEngine:
    """What links object files into the process. Numba's own loader first sets up its compiler, for 0.6 s."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for symbol in _NEVER_CALLED:
        if not llvm.address_of_symbol(symbol):
            llvm.add_symbol(symbol, ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value)
    machine = llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault", jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


def _try_load(name: str) -> int | None:
    """From the file `NAME.o`: a digest of the rest, the symbol, the object code. None if it is absent or damaged."""
    folder = cache_folder()
    try:
        content = b"" if folder is None else (folder / f"{name}.o").read_bytes()
    except OSError:
        return None
    digest, _, rest = content.partition(b"\n")
    symbol, _, code = rest.partition(b"\n")
    if digest != hashlib.sha256(rest).hexdigest().encode():
        return None
    _engine().add_object_file(llvm.ObjectFileRef.from_data(code))
    _engine().finalize_object()
    return int(_engine().get_function_address(symbol.decode()))


def _compile(name: str, function: Callable[..., None], arguments: np.dtype) -> int:
    _announce(name)
    function.__name__ = function.__qualname__ = name
    signature = types.void(
        types.CPointer(from_dtype(arguments)), types.CPointer(from_dtype(STATE)), types.intp, types.intp
    )
    command = cfunc(signature, nopython=True, error_model="numpy")(function)
    _kept.append(command)
    _save(name, command)
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    return int(command.address)


_kept: list[Any] = []  # code that was compiled here lives as long as its Python object


def _save(name: str, command: Any) -> None:
    folder, library = cache_folder(), command._library
    _, _, (code, _) = library.serialize_using_object_code()
    declared = [function.name for function in library._final_module.functions if function.is_declaration]
    if folder is None or library.has_dynamic_globals or not all(map(_is_found_anywhere, declared)):
        return
    rest = command.native_name.encode() + b"\n" + code
    partial = folder / f"{name}.{os.getpid()}.partial"
    try:
        partial.write_bytes(hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
        partial.replace(folder / f"{name}.o")
    except OSError:  # the disk is full, or the folder went away
        partial.unlink(missing_ok=True)


def _is_found_anywhere(symbol: str) -> bool:
    """Whether another process will find it: LLVM ends a process that loads code with an unknown symbol."""
    if symbol.startswith("llvm.") or symbol in _NEVER_CALLED:
        return True
    try:
        ctypes.CDLL(None)[symbol]
    except AttributeError:
        return False
    return True


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
