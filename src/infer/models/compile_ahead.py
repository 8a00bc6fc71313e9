"""Compilation of a backend's kernels from a model's headers. Needs no torch, so it can begin while torch is loaded."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from infer.compute.backends.before_load import begin_compiling
from infer.compute.operands.architecture import Architecture, ModelOutline
from infer.errors import InferError
from infer.files.tensors.tensor_info import TensorInfo
from infer.model_settings import ModelSettings
from infer.models.families import open_network
from infer.models.memory.memory_estimate import LoadSettings, kv_type_of, loaded_types


def make_outline(
    architecture: Architecture, tensors: Mapping[str, TensorInfo], settings: ModelSettings
) -> ModelOutline:
    """Return the outline of a model that is loaded with these settings."""
    load = LoadSettings.of(settings)
    kv_type = kv_type_of(architecture, tensors, load, settings.cache)
    return ModelOutline(
        architecture,
        loaded_types(architecture, tensors, load),
        kv_type,
        load.precision,
        settings.experts_memory is not None,
    )


@contextmanager
def compiling_ahead(model: str, settings: ModelSettings) -> Iterator[None]:
    """Start to compile a model's kernels on a machine without these kernels, while the model loads in this context.

    Does nothing for a model that the load will refuse.
    """
    with ExitStack() as begun:
        with suppress(InferError, OSError):
            begun.enter_context(begin_compiling(settings.device, partial(_outline_of, model, settings)))
        yield


def _outline_of(model: str, settings: ModelSettings) -> ModelOutline:
    checkpoint, architecture = open_network(model)
    return make_outline(architecture, checkpoint.tensors, settings)
