"""Addresses of compiled kernels: found in memory, loaded from disk, or compiled on first use.

All commands have the signature `void(arguments*, state*, thread, num_threads)`; `arguments` is a numpy record type of
the kernel's own (`records`). A kernel is named by the function that makes its source and its variant. So a kernel on
disk needs neither that module nor the compiler: both are imported when something must be compiled.
"""

import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from infer.compute.backends.cpu.compile import linked_code
from infer.compute.backends.cpu.compile.kernel import Kernel, records_by_name
from infer.compute.backends.cpu.compile.parallel import Compilation, how_often, seconds_of
from infer.compute.backends.cpu.host import kernel_cache, shipped_kernels
from infer.system.status_line import StatusLine, write_notice

_WORTH_SECONDS = 4.0  # of compiling: for less, processes of its own would take longer to start
_SYMBOL = re.compile(rb"[A-Za-z0-9_.$@]+")
_OBJECT_FILES = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\x64\x86", b"\x64\xaa")  # ELF, Mach-O, COFF


_lock = threading.RLock()
_address_by_kernel: dict[Kernel, int] = {}
_under_way: list[Compilation] = []  # the newest last
_compiled_here: list[Kernel] = []
# A child must not inherit the lock from a thread that it has not, nor Numba's in the middle of its work.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def compiled_address(maker: str, arguments: np.dtype[Any], *variant: str | int) -> int:
    """Return the address of a compiled command. It is loaded from disk, or else compiled and stored.

    Args:
        maker: "module:function". The function is the command's Python source. If its name begins with `make_`, it
            returns the source when called with the variant.
        arguments: The type of the record that the command takes.
        variant: Arguments of the maker, such as a type of weights.
    """
    kernel = Kernel(maker, variant)
    with _lock:
        if kernel not in _address_by_kernel:
            _address_by_kernel[kernel] = _try_take(kernel) or _try_load(kernel) or _compile(kernel, arguments)
        return _address_by_kernel[kernel]


def missing_kernels(needed: Iterable[Kernel]) -> list[Kernel]:
    """Return the kernels that are neither loaded nor stored, without the repetitions in `needed`."""
    new = (kernel for kernel in dict.fromkeys(needed) if kernel not in _address_by_kernel)
    stores = kernel_cache, shipped_kernels
    return [kernel for kernel in new if not any(store.is_kept(kernel.file_name) for store in stores)]


@contextmanager
def compiling(needed: Iterable[Kernel]) -> Iterator[None]:
    """Compile the missing kernels, several in parallel, while the context runs. At its end, all kernels are loaded."""
    kernels = missing_kernels(needed)
    announced = {name for compilation in list(_under_way) for name in compilation.file_names}
    with _begun([kernel for kernel in kernels if kernel.file_name not in announced]):
        yield
        for compilation in list(_under_way):
            compilation.finish()
        for kernel in kernels:
            compiled_address(kernel.maker, records_by_name()[kernel.record], *kernel.variant)


@contextmanager
def compiling_ahead(needed: Iterable[Kernel]) -> Iterator[None]:
    """Begin compiling the missing kernels, for a `compiling` within the context. At its end, the rest is cancelled."""
    with _begun(missing_kernels(needed)):
        yield


@contextmanager
def _begun(kernels: Sequence[Kernel]) -> Iterator[None]:
    if sum(map(seconds_of, kernels)) < _WORTH_SECONDS:
        yield
        return
    compilation = Compilation(kernels)
    _under_way.append(compilation)
    try:
        yield
    finally:
        _under_way.remove(compilation)
        compilation.close()


def _try_take(kernel: Kernel) -> int | None:
    """Load the kernel from an active compilation, and return its address. None if no compilation includes it."""
    for compilation in reversed(_under_way):
        answer = compilation.take(kernel.file_name)
        if answer is not None:
            return _load(_keep(kernel, answer.symbol, answer.object_code))
    return None


def _try_load(kernel: Kernel) -> int | None:
    """Load the kernel from the cache or from the package, and return its address; None if that fails."""
    contents = (store.read(kernel.file_name) for store in (kernel_cache, shipped_kernels))
    return next((address for content in contents if content is not None and (address := _load(content))), None)


def _load(content: bytes) -> int | None:
    """Load an image, or an object file that LLVM links, and return its address; None if it is neither."""
    if content.startswith(linked_code.MAGIC):
        return linked_code.try_load(content)
    symbol, _, code = content.partition(b"\n")
    if not _SYMBOL.fullmatch(symbol) or not code.startswith(_OBJECT_FILES):
        return None
    if linked_code.are_used_here():  # LLVM does not survive whatever is no object file
        image = linked_code.try_make(code, symbol.decode())
        return None if image is None else linked_code.try_load(image)
    try:
        return int(import_module("infer.compute.backends.cpu.compile.compiler").link(symbol.decode(), code)) or None
    except RuntimeError:  # LLVM cannot read it
        return None


def _keep(kernel: Kernel, symbol: str, object_code: bytes) -> bytes:
    content = linked_code.try_make(object_code, symbol) or symbol.encode() + b"\n" + object_code
    kernel_cache.write(kernel.file_name, content)
    return content


def _compile(kernel: Kernel, arguments: np.dtype[Any]) -> int:
    """Compile a kernel that was not announced, in this process. The first one writes a notice."""
    if not _compiled_here:
        write_notice(f"infer: compiling CPU kernels, {how_often()}")
    _compiled_here.append(kernel)
    line = StatusLine()
    try:
        line.show(f"infer: compiling the CPU kernel {kernel.label}")
        compiled = import_module("infer.compute.backends.cpu.compile.compiler").compile_command(
            kernel.label, kernel.make, arguments
        )
    finally:
        line.close()
    if compiled.object_code is not None:
        _keep(kernel, compiled.symbol, compiled.object_code)
    return int(compiled.address)
