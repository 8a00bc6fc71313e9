"""Numba, and LLVM as a linker: loaded by processes that must compile, or that cannot map an image."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import llvmlite.binding as llvm
import numpy as np
from numba import cfunc, types
from numba.core import config
from numba.np.numpy_support import from_dtype

from infer.kernels.cpu.images import NEVER_CALLED, never_called_address, symbol_address
from infer.kernels.cpu.state import STATE
from infer.progress import PROGRESS_WIDTH, StatusLine, bar

_COMPILING = "infer: compiling CPU kernels, once per machine"
_USUAL = 20  # kernels of a model whose matrices have two types: what a bar takes for the whole
_kept: list[Any] = []  # code that was compiled here lives as long as its Python object


@final
@dataclass(frozen=True)
class Compiled:
    address: int
    symbol: str
    object_code: bytes | None  # None where another process could not use it


def compile_command(name: str, make: Callable[[], Callable[..., None]], arguments: np.dtype[Any]) -> Compiled:
    signature = types.void(
        types.CPointer(from_dtype(arguments)), types.CPointer(from_dtype(STATE)), types.intp, types.intp
    )
    with _announced():
        function = make()
        function.__name__ = function.__qualname__ = name
        command = cfunc(signature, nopython=True, error_model="numpy")(function)
    _kept.append(command)
    library = command._library
    declared = [function.name for function in library._final_module.functions if function.is_declaration]
    code = None
    if not library.has_dynamic_globals and all(map(_is_found_anywhere, declared)):
        _, _, (code, _) = library.serialize_using_object_code()
    return Compiled(int(command.address), command.native_name, code)


def _is_found_anywhere(symbol: str) -> bool:
    """Whether another process will find it: LLVM ends a process that loads code with an unknown symbol."""
    return symbol.startswith("llvm.") or symbol_address(symbol) is not None


@contextmanager
def _announced() -> Iterator[None]:
    """On a terminal a bar while it lasts, elsewhere one line in all."""
    num_done = len(_kept)
    share = num_done / max(_USUAL, num_done + 1)
    if not sys.stderr.isatty() and not num_done:
        sys.stderr.write(f"{_COMPILING}\n")
        sys.stderr.flush()
    line = StatusLine()
    try:
        line.show(f"{_COMPILING} {bar(share, PROGRESS_WIDTH):<{PROGRESS_WIDTH}} {int(100 * share)} %")
        yield
    finally:
        line.close()


def link(symbol: str, code: bytes) -> int:
    """Add an object file to the process."""
    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return int(engine.get_function_address(symbol))


@cache
def _engine() -> llvm.ExecutionEngine:
    """What links object files into the process. Numba's own loader first sets up its compiler, for 0.6 s."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for symbol in NEVER_CALLED:
        if not llvm.address_of_symbol(symbol):
            llvm.add_symbol(symbol, never_called_address())
    machine = llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault", jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


def host() -> str:
    """The processor as LLVM knows it."""
    return f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"


def target_features() -> frozenset[str]:
    """The features that Numba compiles for."""
    if config.CPU_FEATURES is not None:
        return frozenset(name[1:] for name in config.CPU_FEATURES.split(",") if name.startswith("+"))
    if config.CPU_NAME not in (None, "host"):
        return frozenset()
    return frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)
