"""Small compiled functions behind pointers: every command of the table is one, compiled on first use, kept on disk.

All have the signature `void(arguments*, state*, thread, num_threads)`; what `arguments` holds is a numpy record type
of the kernel's own (`records`). A kernel is named by where its source is made and with what, so that what is found on
disk needs neither that source's module nor the compiler: both are imported when something must be compiled.
"""

import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

import numpy as np

from infer.kernels.cpu import images, kernel_cache


@final
@dataclass(frozen=True)
class Kernel:
    """`maker` is "module:function", the module relative to this package if it begins with a dot, as in ".matmul"."""

    maker: str
    variant: tuple[str | int, ...] = ()

    @property
    def label(self) -> str:
        return "_".join([self.maker.partition(":")[2].removeprefix("make_"), *map(str, self.variant)])

    @cached_property
    def file_name(self) -> str:
        """No two kernels share one. The cache's folder stands for the sources of this package; those of other modules
        (a test's) are in the name."""
        module = self.maker.partition(":")[0]
        if module.startswith("."):
            return f"{module[1:]}.{self.label}"
        spec = find_spec(module)
        source = b"" if spec is None or spec.origin is None else Path(spec.origin).read_bytes()
        return f"{module}.{self.label}-{hashlib.sha256(source).hexdigest()[:16]}"

    def make(self) -> Callable[..., None]:
        module, _, function = self.maker.partition(":")
        source: Callable[..., None] = getattr(import_module(module, __package__), function)(*self.variant)
        return source


_lock = threading.RLock()
_address_by_kernel: dict[Kernel, int] = {}
# A child must not inherit the lock from a thread that it has not, nor Numba's in the middle of its work.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def compiled_address(maker: str, arguments: np.dtype[Any], *variant: str | int) -> int:
    """The address of the command whose Python source `maker` ("module:function") returns when called with `variant`."""
    kernel = Kernel(maker, variant)
    with _lock:
        if kernel not in _address_by_kernel:
            _address_by_kernel[kernel] = _try_load(kernel) or _compile(kernel, arguments)
        return _address_by_kernel[kernel]


def _try_load(kernel: Kernel) -> int | None:
    """From the disk: either an image, or an object file that LLVM links."""
    content = kernel_cache.read(kernel.file_name)
    if content is None:
        return None
    if content.startswith(images.MAGIC):
        return images.try_load(content)
    symbol, _, code = content.partition(b"\n")
    return int(import_module("infer.kernels.cpu.compiler").link(symbol.decode(), code))


def _compile(kernel: Kernel, arguments: np.dtype[Any]) -> int:
    compiler = import_module("infer.kernels.cpu.compiler")
    compiled = compiler.compile_command(kernel.label, kernel.make, arguments)
    if compiled.object_code is not None:
        image = images.try_make(compiled.object_code, compiled.symbol)
        kernel_cache.write(kernel.file_name, image or compiled.symbol.encode() + b"\n" + compiled.object_code)
    return int(compiled.address)
