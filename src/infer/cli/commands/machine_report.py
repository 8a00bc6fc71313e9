"""`infer --version -v` and `infer compile`: the machine with its software, and the CPU kernels that a model needs."""

import os
import platform
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import product

import click
import torch

import infer
from infer.cli.options.command_options import CompileOptions
from infer.cli.terminal.process_streams import exit_on_signal
from infer.compute import ops
from infer.compute.quantization.kv_formats import KV_TYPES
from infer.errors import InferError
from infer.files import open_checkpoint
from infer.model_settings import ModelSettings
from infer.models.compile_ahead import make_outline
from infer.models.families import make_architecture
from infer.models.tensors import check_tensors
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


@exit_on_signal()
def run_compile(options: CompileOptions) -> None:
    """Compile the missing kernels of a model. Raises InferError if they cannot be stored."""
    model, checkpoint = options.model, open_checkpoint(options.model)
    architecture = make_architecture(checkpoint.config)
    check_tensors(architecture, checkpoint.tensors)

    kinds = product(("exact", "fast"), KV_TYPES) if options.is_all else [("exact", "auto")]
    settings = [ModelSettings.of({"precision": precision, "kv_type": kv_type}) for precision, kv_type in kinds]
    outlines = [make_outline(architecture, checkpoint.tensors, each) for each in settings]
    backend = ops.backend_of(torch.device("cpu"))
    before = backend.kernel_store(outlines)
    assert before is not None
    if not before.missing:
        click.echo(f"{model}: all {before.num_kernels} CPU kernels are already in {before.folder}")
        return
    _check_kept(before)
    started = time.monotonic()
    with backend.compiling(outlines):
        pass
    _check_kept(backend.kernel_store(outlines))
    made = f"{len(before.missing)} of {before.num_kernels} CPU kernels compiled for {before.instruction_set}"
    click.echo(f"{model}: {made} in {time.monotonic() - started:.0f} s, in {before.folder}")


def _check_kept(store: ops.KernelStore | None) -> None:
    if store is not None and store.trouble is not None:
        raise InferError(f"the kernels cannot be stored: {store.trouble}; set INFER_CACHE to a folder of your own")
