"""The choice of the backend that runs a model. A new device is a folder in `compute/backends/` and a line here."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

from infer.compute.backends import gpus
from infer.compute.backends.base import Backend
from infer.errors import InvalidRequestError
from infer.system.spellings import install_extra

# Each module has `make(device)`.
MODULE_BY_NAME = {
    "cpu": "infer.compute.backends.cpu.backend",
    "cuda": "infer.compute.backends.cuda.backend",
    "opencl": "infer.compute.backends.opencl.backend",
    "reference": "infer.compute.backends.torch_backend",
}
_used: ContextVar[Backend | str | None] = ContextVar("infer_backend", default=None)


@contextmanager
def using(backend: Backend | str) -> Iterator[None]:
    """Run ops on this backend, or on the backend with this name, whatever the device of their tensors."""
    token = _used.set(backend)
    try:
        yield
    finally:
        _used.reset(token)


def backend_of(device: torch.device) -> Backend:
    """Return the backend in use, otherwise the device's own. On CUDA without Triton, that is plain torch."""
    used = _used.get()
    if isinstance(used, Backend):
        return used
    if used is None:
        used = "reference" if device.type == "cuda" and not gpus.has_triton() else device.type
    return _backend(used, device)


def cuda_backend(name: str) -> Backend:
    """Return the backend of cuda or cuda:N: plain torch, with a warning, if Triton is not installed.

    Raises InvalidRequestError if the GPU cannot be used.
    """
    device = torch.device(name)
    if trouble := gpus.trouble_with(device.index):
        raise InvalidRequestError(f"device {name}: {trouble}")
    if not gpus.has_triton():
        warnings.warn("Triton is not installed: plain torch runs on the GPU, slowly (pip install triton)", stacklevel=2)
    return backend_of(device)


def is_gpu_of_use() -> bool:
    """Return True if device="auto" means the GPU."""
    return gpus.is_of_use()


def backend_named(name: str) -> Backend:
    """Return the backend of a device that is not a torch device: opencl, or opencl:part-of-its-name.

    Raises InvalidRequestError if pyopencl is missing or no such device can be used.
    """
    if find_spec("pyopencl") is None:
        raise InvalidRequestError(f"device opencl needs pyopencl: {install_extra('opencl')}")
    return _named(name.partition(":")[2])


def cuda_devices() -> list[str]:
    """Return a description of each GPU, in the order of their indices."""
    return list(map(str, gpus.visible_gpus()))


def opencl_devices() -> list[str]:
    """Return the names of the OpenCL devices, each with the reasons if it cannot be used; none without pyopencl."""
    if find_spec("pyopencl") is None:
        return []
    described: list[str] = import_module("infer.compute.backends.opencl.devices").describe()
    return described


def set_num_threads(num_threads: int, rank: int = 0, num_ranks: int = 1) -> None:
    """Set how many threads the CPU's kernels use, in this process and in the other ranks' processes."""
    import_module("infer.compute.backends.cpu.threads.pool").set_num_threads(num_threads, rank, num_ranks)


@cache
def _backend(name: str, device: torch.device) -> Backend:
    backend: Backend = import_module(MODULE_BY_NAME[name]).make(device)
    return backend


@cache
def _named(part: str) -> Backend:
    backend: Backend = import_module(MODULE_BY_NAME["opencl"]).make(torch.device("cpu"), part)
    return backend
