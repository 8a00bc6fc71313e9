"""Numba, and LLVM as a linker. Loaded only by processes that must compile, or that cannot map an image.

Numba types each operation on scalars by asking hundreds of templates, and lists the variables of each statement a dozen
times. With the shortcuts here, the kernels of a model compile in a quarter less time, and their code is the same.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final, final

import llvmlite.binding as llvm
import numpy as np
from numba import cfunc, types
from numba.core import base, codegen, ir
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.typed_passes import NopythonRewrites
from numba.core.types.functions import BaseFunction
from numba.core.untyped_passes import InlineClosureLikes

from infer.compute.backends.cpu.compile.linked_code import (
    NEVER_CALLED,
    may_run_code,
    never_called_address,
    symbol_address,
)
from infer.compute.backends.cpu.compile.record_types import RecordAt
from infer.compute.backends.cpu.host.host_features import arm_features
from infer.compute.backends.cpu.thread_records import STATE
from infer.errors import InferError

_Patch = tuple[type, str, Callable[..., Any]]

_SIGNATURES: Final[dict[Any, Any]] = {}  # by function and types of its arguments, with the key of what implements it
_SIZES: Final[dict[str, int]] = {}  # bytes, by the name of LLVM's type
_find_signature, _find_size = BaseFunction.get_call_type, base.BaseContext.get_abi_sizeof


@contextmanager
def shortcuts() -> Iterator[None]:
    """Apply the shortcuts while the context runs, under Numba's lock: other functions are compiled without them."""
    usual = [(owner, name, getattr(owner, name)) for owner, name, _ in _PATCHES]
    try:
        _apply(_PATCHES)
        yield
    finally:
        _apply(usual)


def _apply(patches: list[_Patch]) -> None:
    for owner, name, function in patches:
        setattr(owner, name, function)


def _signature(self: Any, context: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Return the signature of a built-in function for these types.

    The implementation of a signature is the one that was found for it last.
    """
    if keywords:
        return _find_signature(self, context, arguments, keywords)
    key = self.key, arguments
    if key not in _SIGNATURES:
        found: Any = _find_signature(self, context, arguments, keywords)
        _SIGNATURES[key] = found, self._impl_keys[found.args]
    signature, self._impl_keys[signature.args] = _SIGNATURES[key]
    return signature


def _size(self: Any, type_: Any) -> int:
    name = str(type_)
    if name not in _SIZES:
        _SIZES[name] = _find_size(self, type_)
    return _SIZES[name]


def _variables(self: Any, value: Any) -> list[Any]:
    found: list[Any] = []
    _add_variables(value, found)
    return found


def _add_variables(value: Any, found: list[Any]) -> None:
    kind = type(value)
    if kind is ir.Var:
        found.append(value)
    elif kind is tuple or kind is list:
        for each in value:
            _add_variables(each, found)
    elif kind is dict:
        for each in value.values():
            _add_variables(each, found)
    elif isinstance(value, ir.Inst):
        found.extend(value.list_vars())


def _changes_nothing(self: Any, state: Any) -> bool:
    return False


_PATCHES: Final[list[_Patch]] = [
    (BaseFunction, "get_call_type", _signature),
    (base.BaseContext, "get_abi_sizeof", _size),
    (ir.Inst, "_rec_list_vars", _variables),
    (InlineClosureLikes, "run_pass", _changes_nothing),  # functions within functions, comprehensions
    (NopythonRewrites, "run_pass", _changes_nothing),  # expressions of whole arrays
]


# LLVM's code generation splits the sum of an address into a pointer and an offset, and guesses which is which: even
# null may be the pointer, and what is known of that is not true of the sum. As integers they mean nothing.
llvm.set_option("infer", "-addr-sink-using-gep=false")

_kept: list[Any] = []  # code that was compiled here lives as long as its Python object


@final
@dataclass(frozen=True)
class Compiled:
    address: int
    symbol: str
    object_code: bytes | None  # None where another process could not use it


def compile_command(name: str, make: Callable[[], Callable[..., None]], arguments: np.dtype[Any]) -> Compiled:
    signature = types.void(RecordAt(arguments), RecordAt(STATE), types.intp, types.intp)
    if not may_run_code():
        raise InferError(
            "the system does not allow executable memory (mprotect fails), which the CPU kernels need: "
            "allow it (SELinux: execmem; systemd: MemoryDenyWriteExecute=no)"
        )
    function = make()
    function.__name__ = function.__qualname__ = name
    with _linked_at_once(name):
        command = cfunc(signature, nopython=True, error_model="numpy")(function)
    _kept.append(command)
    library = command._library
    declared = [function.name for function in library._final_module.functions if function.is_declaration]
    code = None
    if not library.has_dynamic_globals and all(map(_is_found_anywhere, declared)):
        _, _, (code, _) = library.serialize_using_object_code()
    return Compiled(int(command.address), command.native_name, code)


def _is_found_anywhere(symbol: str) -> bool:
    """Return True if another process will find the symbol: LLVM ends processes that load code with unknown ones."""
    return symbol.startswith("llvm.") or symbol_address(symbol) is not None


class _Library(codegen.JITCodeLibrary):  # type: ignore[misc]
    """A library that links the functions a command calls into it unchanged, and optimises the result once.

    Numba optimises each function, compiles it and links the remains into its callers. That is much slower, and unsafe:
    LLVM's code generation rewrites the addresses in a module that is then optimised again.
    """

    def finalize(self) -> None:
        if self.name == self._codegen.command:
            super().finalize()
            return
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        if self.name == self._codegen.command:
            return int(super().get_pointer_to_function(name))
        self._ensure_finalized()
        return 0  # it has no code of its own

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout


class _Codegen(codegen.JITCPUCodegen):  # type: ignore[misc]
    _library_class = _Library
    command = ""  # the library that gets code

    def _get_host_cpu_features(self) -> str:
        features: str = super()._get_host_cpu_features()
        if import_module("numba.core.config").CPU_FEATURES is not None:
            return features
        return ",".join([*filter(None, [features]), *(f"+{name}" for name in sorted(arm_features()))])

    def set_env(self, env_name: str, env: Any) -> None:
        """Do nothing: no command reads an environment."""


@cache
def _codegen() -> _Codegen:
    return _Codegen("infer")


@contextmanager
def _linked_at_once(command: str) -> Iterator[None]:
    """Make Numba compile with `_Library` in the context. Its lock keeps other threads from compiling meanwhile."""
    context, compiler = cpu_target.target_context, import_module("numba.core.dispatcher")._FunctionCompiler
    customize = compiler._customize_flags

    def without_wrappers(self: Any, flags: Any) -> Any:
        flags = customize(self, flags)
        flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        return flags

    with global_compiler_lock:
        usual = context._internal_codegen
        context._internal_codegen, _codegen().command = _codegen(), command
        compiler._customize_flags = without_wrappers
        try:
            with shortcuts():
                yield
        finally:
            context._internal_codegen = usual
            compiler._customize_flags = customize


def link(symbol: str, code: bytes) -> int:
    """Add an object file to the process, and return the symbol's address. Raises RuntimeError for other files."""
    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return int(engine.get_function_address(symbol))


@cache
def _engine() -> llvm.ExecutionEngine:
    """Return the engine that links object files into the process. Numba's own loader would set up its compiler, for 0.6
    s.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for symbol in NEVER_CALLED:
        if not llvm.address_of_symbol(symbol):
            llvm.add_symbol(symbol, never_called_address())
    machine = llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault", jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
