"""`infer --version -v`: describe the machine and its software, for reports of faults or speeds."""

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

import infer
from infer.compute import ops
from infer.system.cores.cores import num_processors, processor_name
from infer.system.memory.available_memory import available_memory_bytes

_PACKAGES = (
    "torch",
    "numba",
    "llvmlite",
    "numpy",
    "tokenizers",
    "safetensors",
    "llguidance",
    "xgrammar",
    "triton",
    "pyopencl",
)
_VARIABLES = ("INFER_ISA", "INFER_CACHE", "INFER_MODELS", "CUDA_VISIBLE_DEVICES", "OCL_ICD_VENDORS", "OMP_NUM_THREADS")


def version_lines() -> Iterator[str]:
    yield f"infer {infer.__version__}"
    yield f"Python {platform.python_version()}, {platform.platform()}"
    yield ", ".join(f"{name} {found}" for name in _PACKAGES if (found := _version(name)))
    yield f"{processor_name()}, {num_processors()} processors, {_memory()}"
    yield from device_lines()
    settings = [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]
    if settings:
        yield " ".join(settings)


def device_lines() -> Iterator[str]:
    """Yield the devices that `--device` may name here."""
    yield f"cpu: {ops.backend_of(torch.device('cpu')).description()}"
    yield from (f"cuda:{index}: {name}" for index, name in enumerate(ops.cuda_devices()))
    yield from (f"opencl: {name}" for name in ops.opencl_devices())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _memory() -> str:
    available = available_memory_bytes()
    return "memory unknown" if available is None else f"{available / 2**30:.1f} GiB of memory available"
