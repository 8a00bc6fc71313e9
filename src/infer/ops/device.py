"""Which backend serves a device. A new device is a folder in `backends/` and a line here."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

from infer.backends.base import Backend

# Each module has `make(device)`.
MODULE_BY_NAME = {
    "cpu": "infer.backends.cpu.backend",
    "cuda": "infer.backends.cuda.backend",
    "reference": "infer.backends.torch_backend",
}
_forced: ContextVar[str | None] = ContextVar("infer_backend", default=None)


@contextmanager
def using(name: str) -> Iterator[None]:
    """Run with the backend of this name whatever the device: for tests that compare them."""
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def backend_of(device: torch.device) -> Backend:
    """On CUDA it is plain torch where Triton is not installed."""
    name = _forced.get()
    if name is None:
        name = "reference" if device.type == "cuda" and not _has_triton() else device.type
    return _backend(name, device)


def set_num_threads(num_threads: int) -> None:
    """How many threads the CPU's kernels run on, from now on."""
    import_module("infer.backends.cpu.threads").set_num_threads(num_threads)


@cache
def _backend(name: str, device: torch.device) -> Backend:
    backend: Backend = import_module(MODULE_BY_NAME[name]).make(device)
    return backend


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
