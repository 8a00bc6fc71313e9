"""`infer compile`: compile and store the CPU kernels of a model, from its headers only."""

import time
from itertools import product

import click
import torch

from infer.compute import ops
from infer.compute.quantization.kv_formats import KV_TYPES
from infer.errors import InferError
from infer.files import open_checkpoint
from infer.model_settings import ModelSettings
from infer.models.compile_ahead import make_outline
from infer.models.families import make_architecture
from infer.models.tensors import check_tensors


def run_compile(model: str, *, is_all: bool) -> None:
    """Compile the missing kernels of a model. Raises InferError if they cannot be stored."""
    checkpoint = open_checkpoint(model)
    architecture = make_architecture(checkpoint.config)
    check_tensors(architecture, checkpoint.tensors)

    kinds = product(("exact", "fast"), KV_TYPES) if is_all else [("exact", "auto")]
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
