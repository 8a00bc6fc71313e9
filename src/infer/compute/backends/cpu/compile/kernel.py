"""A kernel by name: the function that makes its source, and the variant. Needs neither that module nor a compiler."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

import numpy as np

from infer.compute.backends.cpu import expert_records, records, sample_records, thread_records

_PACKAGE = "infer.compute.backends.cpu"


@final
@dataclass(frozen=True)
class Kernel:
    """A kernel that a module's function makes.

    `maker` is "module:function". The module is relative to `backends.cpu` if it begins with a dot, as in
    ".weights.embed". The function is the source. If its name begins with `make_`, it returns the source when called
    with the variant.
    """

    maker: str
    variant: tuple[str | int, ...] = ()
    record: str = field(default="", compare=False)  # of its arguments, by its name in `records_by_name`
    reason: str = field(default="", compare=False)  # what in a model asks for it

    @property
    def label(self) -> str:
        return "_".join([self.maker.partition(":")[2].removeprefix("make_"), *map(str, self.variant)])

    @cached_property
    def file_name(self) -> str:
        """Name of the kernel's file, which no two kernels share.

        The cache's folder identifies the sources of `backends.cpu`. The name includes the digest of other modules'
        sources (a test's).
        """
        module = self.maker.partition(":")[0]
        if module.startswith("."):
            return f"{module[1:]}.{self.label}"
        spec = find_spec(module)
        source = b"" if spec is None or spec.origin is None else Path(spec.origin).read_bytes()
        return f"{module}.{self.label}-{hashlib.sha256(source).hexdigest()[:16]}"

    def make(self) -> Callable[..., None]:
        module, _, function = self.maker.partition(":")
        made: Any = getattr(import_module(module, _PACKAGE), function)
        source: Callable[..., None] = made(*self.variant) if function.startswith("make_") else made
        return source


def records_by_name() -> dict[str, np.dtype[Any]]:
    """Return every record by its name. A request to a compiling process names the kernel's record."""
    modules = (records, expert_records, sample_records, thread_records)
    return {name: value for each in modules for name, value in vars(each).items() if isinstance(value, np.dtype)}
