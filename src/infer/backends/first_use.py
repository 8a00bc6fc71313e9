"""Work that a device can begin before torch is loaded, if no model has run on the machine yet. Loads no torch."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module

from infer.operands.outline import ModelOutline

_MODULE_BY_DEVICE = {"cpu": "infer.backends.cpu.needed_kernels"}  # each has `begin_compiling(make_outline)`


def begin_compiling(device: str, make_outline: Callable[[], ModelOutline]) -> AbstractContextManager[None]:
    """Compile a model's kernels while its load runs in the context, if the device stores kernels and has none yet."""
    if device not in _MODULE_BY_DEVICE:
        return nullcontext()
    begun: AbstractContextManager[None] = import_module(_MODULE_BY_DEVICE[device]).begin_compiling(make_outline)
    return begun
