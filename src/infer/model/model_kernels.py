"""The CPU kernels of a model, from its headers, compiled while torch is still being loaded. No torch."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from infer.backends.cpu import compiled, kernel_cache
from infer.backends.cpu.isa import instruction_set
from infer.backends.cpu.needed_kernels import Needed, needed_kernels
from infer.checkpoint import Checkpoint, open_checkpoint
from infer.errors import InferError
from infer.kvcache.settings import CacheSettings
from infer.model.families import make_architecture
from infer.model.memory import LoadSettings, loaded_types
from infer.model.tensors import check_tensors, expected_shapes
from infer.operands.architecture import Architecture


def kernels_of(
    checkpoint: Checkpoint, architecture: Architecture, load: LoadSettings, cache: CacheSettings, isa: str
) -> Iterator[Needed]:
    """The CPU kernels that a model needs that is loaded in this way, on a machine with these instructions."""
    types = loaded_types(architecture, checkpoint.tensors, load)
    kv_type = load.kv_type if cache.kv_type == "auto" else cache.kv_type
    return needed_kernels(architecture, types, kv_type, load.precision, isa)


@contextmanager
def compiling_ahead(model: str, device: str, load: LoadSettings, cache: CacheSettings) -> Iterator[None]:
    """On a machine that keeps no kernel yet, begin with those of the model, for its load within. Does nothing where
    there are some, for another device, or for a model that the load will refuse."""
    with ExitStack() as begun:
        with suppress(InferError, OSError):
            if device == "cpu" and kernel_cache.is_empty():
                begun.enter_context(compiled.compiling_ahead(_needed_here(model, load, cache)))
        yield


def _needed_here(model: str, load: LoadSettings, cache: CacheSettings) -> list[Needed]:
    checkpoint = open_checkpoint(model)
    architecture = make_architecture(checkpoint.config)
    check_tensors(expected_shapes(architecture), checkpoint.tensors)
    return list(kernels_of(checkpoint, architecture, load, cache, instruction_set()))
