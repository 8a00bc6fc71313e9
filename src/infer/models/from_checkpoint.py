"""Load a network and its tokenizer from a model's files, after checking all settings."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from infer.compute import ops
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.groups import check_layers
from infer.compute.operands.architecture import Architecture
from infer.compute.operands.group import Group
from infer.compute.operands.limits import StepLimits
from infer.compute.ops import Precision
from infer.errors import InvalidRequestError, ModelError
from infer.files import Checkpoint, open_checkpoint
from infer.files.tensors.lazy_weights import LazyWeights
from infer.models.compile_ahead import make_outline
from infer.models.families import make_architecture
from infer.models.load import OnProgress, load_transformer
from infer.models.memory.cache_plan import check_fits
from infer.models.memory.context_length import context_length, fitting_length, fitting_step
from infer.models.memory.memory_estimate import LoadSettings
from infer.models.tensors import check_tensors
from infer.models.transformer import Transformer
from infer.models.weight_loader import FloatsAs, OnInput
from infer.system.cores.cores import check_num_threads, default_num_threads
from infer.system.memory.available_memory import give_back_freed
from infer.text.tokenizer import Tokenizer

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_model(
    model_id: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    weights: str = "auto",
    precision: str = "exact",
    max_seq_len: int | None = None,
) -> tuple[Transformer, Architecture]:
    """Load only the network, for programs that bring their own loop.

    Args:
        model_id: A folder, a `.gguf` file, or a name as for `LLM`.
        dtype: As for `LLM`.
        device: As for `LLM`.
        weights: As for `LLM`.
        precision: As for `LLM`.
        max_seq_len: As for `LLM`.

    Returns:
        `(model, config)`.

    Raises:
        InvalidRequestError: An argument breaks a rule.
        ModelError: The model cannot be used, or does not fit in memory.

    Examples:
        >>> network, architecture = load_model("smollm2")
        >>> len(architecture.layers), architecture.vocab_size
        (30, 49152)
    """
    checkpoint = open_checkpoint(model_id)
    tokenizer = load_tokenizer(checkpoint)
    checkpoint = checkpoint.without_metadata()
    model = load_checked(checkpoint, tokenizer, device, dtype, weights, precision, max_seq_len, None)
    return model, model.architecture


def load_tokenizer(
    model: str | Path | Checkpoint, *, chat_template: str | None = None, allow_special: bool = False
) -> Tokenizer:
    """Load the tokenizer of a model, without its weights.

    Args:
        model: A model as for `LLM`, or an open checkpoint.
        chat_template: Template that replaces the model's own.
        allow_special: True if the text of a control token in a message is encoded as the control token, not as text.

    Raises:
        InvalidRequestError: There is no such model, or the template is broken.
        ModelError: The model cannot be used.

    Examples:
        >>> load_tokenizer("smollm2").vocab_size
        49152
    """
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
    gguf = checkpoint.metadata
    table = checkpoint.tensors.get("model.embed_tokens.weight")
    rows = None if table is None else table.shape[0]
    tokenizer = Tokenizer.from_gguf(gguf, rows) if gguf else Tokenizer.from_folder(checkpoint.path, rows)
    tokenizer.allow_special = allow_special
    if chat_template is not None:
        tokenizer.replace_chat_template(chat_template)
    return tokenizer


def load_checked(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer | None,
    device: str | torch.device,
    dtype: str | torch.dtype,
    weights: str,
    precision: str,
    max_seq_len: int | None,
    on_progress: OnProgress | None,
    cache: CacheSettings | None = None,
    group: Group | None = None,
    on_input: OnInput | None = None,
    pool_pages: int | None = None,
) -> Transformer:
    """Check all settings, then load the network. If a `group` runs the model together, load this rank's part.

    `tokenizer` is None if rank 0 has already checked the vocabulary and the memory of all ranks. `on_input` is the same
    as for `load_transformer`. The memory must hold `pool_pages` pages, or those of one full row.
    """
    architecture = make_architecture(checkpoint.config)
    cache = cache or CacheSettings()
    check_layers(cache, architecture.mixers)
    if tokenizer is not None:
        _check_vocabulary(architecture, tokenizer)
    chosen_dtype = _dtype(dtype)
    if chosen_dtype is not None and weights != "auto":
        raise InvalidRequestError(f"dtype={dtype} and weights={weights} contradict each other: give only one of them")

    backend, context = device_backend(device), context_length(max_seq_len, architecture, cache)
    keep_floats_as = _choice("weights", weights, get_args(FloatsAs))
    chosen_precision = _choice("precision", precision, get_args(Precision))
    load = LoadSettings(dtype_name(dtype), weights, precision)
    check_tensors(architecture, checkpoint.tensors)
    step = backend.step_limits
    with backend.compiling([make_outline(architecture, checkpoint.tensors, load, cache)]):
        if tokenizer is not None:
            asked = replace(load, num_threads=backend.num_threads(), device=backend.device.type)
            memory = backend, _available_bytes(backend, group)
            context, step = _fitting(
                checkpoint, architecture, asked, cache, context, *memory, max_seq_len is None, pool_pages
            )
        give_back_freed()
        with backend.threads():
            model = load_transformer(
                architecture,
                LazyWeights(checkpoint.tensors),
                backend=backend,
                dtype=chosen_dtype,
                keep_floats_as=keep_floats_as,
                precision=chosen_precision,
                max_seq_len=context,
                step_limits=step,
                on_progress=on_progress,
                group=group,
                on_input=on_input,
            )
    checkpoint.check_unchanged()
    give_back_freed()
    return model


def _available_bytes(backend: ops.Backend, group: Group | None) -> int | None:
    """Return the available memory of all devices of a model, or None if it is unknown."""
    available = backend.available_bytes()
    if group is None or available is None or backend.computes_on_host:
        return available
    return available * group.size  # each rank has a device of its own


def _check_vocabulary(architecture: Architecture, tokenizer: Tokenizer) -> None:
    """Raise ModelError if a token has no row in the embedding."""
    if tokenizer.vocab_size > architecture.vocab_size:
        raise ModelError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the embedding only {architecture.vocab_size} rows: "
            "they belong to different models"
        )


def _fitting(
    checkpoint: Checkpoint,
    architecture: Architecture,
    load: LoadSettings,
    cache: CacheSettings,
    context: int,
    backend: ops.Backend,
    available: int | None,
    may_shrink: bool,
    pool_pages: int | None,
) -> tuple[int, StepLimits]:
    """Return the context length and the limits of a step that fit in memory, before anything is allocated.

    If the context `may_shrink`, return the part of it that fits, and warn if it is reduced. Raise ModelError if the
    model does not fit.
    """
    name, tensors, step = checkpoint.path.name, checkpoint.tensors, backend.step_limits
    tokens = fitting_step(architecture, tensors, load, cache, num_tokens=context, most=step.tokens, available=available)
    load, found = replace(load, step_tokens=tokens), context
    if may_shrink:
        found = fitting_length(architecture, tensors, load, cache, most=context, available=available)
    if found < context:
        warnings.warn(
            f"the context is {found:,} tokens, not {context:,}: {(available or 0) // 1_000_000:,} MB of memory are "
            "available (kv_type q8 or q4 needs less)",
            stacklevel=5,
        )
    check_fits(name, architecture, tensors, load, cache, num_tokens=found, pool_pages=pool_pages, available=available)
    return found, step._replace(tokens=tokens)


@contextmanager
def threads_if_loaded(threads: int | None, num_ranks: int = 1) -> Iterator[None]:
    """Call `set_num_threads` for rank 0. Undo it if the body of the context raises.

    None is the default number of threads, divided between the ranks.
    """
    if threads is None and num_ranks > 1:
        threads = max(1, default_num_threads() // num_ranks)
    if threads is None:
        yield
        return
    before = torch.get_num_threads(), ops.backend_of(torch.device("cpu")).num_threads()
    try:
        set_num_threads(threads, 0, num_ranks)
        yield
    except BaseException:
        torch.set_num_threads(before[0])
        ops.set_num_threads(before[1])
        raise


def set_num_threads(threads: int, rank: int = 0, num_ranks: int = 1) -> None:
    """Set the number of threads of this process, for our kernels and for torch.

    If `num_ranks` processes share a model, their threads are placed on memory nodes like the threads of one process.
    """
    check_num_threads(threads)
    torch.set_num_threads(threads)
    ops.set_num_threads(threads, rank, num_ranks)


def _choice(name: str, value: str, choices: Sequence[Any]) -> Any:
    if value not in choices:
        raise InvalidRequestError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return value


def device_backend(device: str | torch.device) -> ops.Backend:
    """Return the backend of a device. Raises InvalidRequestError for an unknown or missing device."""
    if device == "auto":
        device = "cuda" if ops.is_gpu_of_use() else "cpu"
    if isinstance(device, str) and device.partition(":")[0] == "opencl":
        return ops.backend_named(device)
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidRequestError(f"device must be cpu, cuda or opencl, got {device!r:.80}") from None
    if chosen.type not in ("cpu", "cuda"):
        raise InvalidRequestError(f"device must be cpu, cuda or opencl, got {device!r}")
    return ops.cuda_backend(str(chosen)) if chosen.type == "cuda" else ops.backend_of(chosen)


def dtype_name(dtype: str | torch.dtype) -> str:
    """Return the name of a dtype for `LLM`: "auto", "float32", ... Raises InvalidRequestError."""
    return "auto" if (chosen := _dtype(dtype)) is None else str(chosen).removeprefix("torch.")


def _dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    if isinstance(dtype, str) and dtype == "auto":
        return None
    chosen = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(chosen, torch.dtype) or chosen not in _DTYPES.values():
        raise InvalidRequestError(f"dtype must be one of auto, {', '.join(_DTYPES)}, got {dtype!r:.80}")
    return chosen
