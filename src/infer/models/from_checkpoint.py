"""Load a network and its tokenizer from a model's files, after checking all settings."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from infer.compute import ops
from infer.compute.kvcache.groups import check_layers
from infer.compute.operands.architecture import Architecture, ModelOutline
from infer.compute.operands.group import Group
from infer.errors import InvalidRequestError, ModelError
from infer.files import Checkpoint, open_checkpoint
from infer.files.tensors.lazy_weights import LazyWeights
from infer.model_settings import ModelSettings
from infer.models.compile_ahead import make_outline
from infer.models.families import make_architecture
from infer.models.load import OnProgress, load_transformer
from infer.models.memory.memory_budget import MemoryBudget, context_length
from infer.models.memory.memory_estimate import LoadSettings
from infer.models.tensors import check_tensors
from infer.models.transformer import Transformer
from infer.models.weight_loader import OnInput
from infer.system.available_memory import give_back_freed
from infer.system.cores import check_num_threads, default_num_threads
from infer.text.tokenizer import Tokenizer


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
    settings = ModelSettings.of(
        {"dtype": dtype, "device": device, "weights": weights, "precision": precision, "max_seq_len": max_seq_len}
    )
    checkpoint = open_checkpoint(model_id)
    tokenizer = load_tokenizer(checkpoint)
    model = load_checked(checkpoint.without_metadata(), tokenizer, settings)
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
    settings: ModelSettings,
    on_progress: OnProgress | None = None,
    *,
    group: Group | None = None,
    on_input: OnInput | None = None,
) -> Transformer:
    """Check the settings against the model, then load the network, or this rank's part if a `group` runs the model.

    `tokenizer` is None if rank 0 has already checked the vocabulary and the memory of all ranks. `on_input` is the same
    as for `load_transformer`. The memory must hold the settings' `pool_pages` pages, or those of one full row.
    """
    architecture, cache = make_architecture(checkpoint.config), settings.cache
    check_layers(cache, architecture.mixers)
    backend = device_backend(settings.device)
    backend.check_kv_type(cache.kv_type)
    context, step = context_length(settings.max_seq_len, architecture, cache), backend.step_limits
    check_tensors(architecture, checkpoint.tensors)
    if tokenizer is not None:
        _check_vocabulary(architecture, tokenizer)
        fitting = _fitting(checkpoint, architecture, backend, settings, 1 if group is None else group.size)
        context, step = fitting.num_tokens, fitting.load.step
        settings = replace(settings, experts_memory=fitting.load.experts_memory)
    outline = make_outline(architecture, checkpoint.tensors, settings)
    with backend.compiling([outline]):
        give_back_freed()
        with backend.threads():
            model = load_transformer(
                architecture,
                LazyWeights(checkpoint.tensors),
                backend=backend,
                dtype=None if settings.dtype == "auto" else getattr(torch, settings.dtype),
                keep_floats_as=settings.weights,
                precision=settings.precision,
                max_seq_len=context,
                step_limits=step,
                on_progress=on_progress,
                group=group,
                on_input=on_input,
                experts=_open_experts(checkpoint, outline, backend, settings),
            )
    checkpoint.check_unchanged()
    give_back_freed()
    return model


def _open_experts(
    checkpoint: Checkpoint, outline: ModelOutline, backend: ops.Backend, settings: ModelSettings
) -> ops.ExpertStore | None:
    """Return the store of the experts if they are to be read from a file."""
    if settings.experts_memory is None:
        return None
    form = f"{settings.weights} {settings.dtype}"
    made_of = f"{checkpoint.fingerprint()} {[file.modified_ns for file in checkpoint.files]} {form}"
    name, check = f"{checkpoint.path.resolve()} {form}", checkpoint.check_unchanged
    store = backend.open_experts(outline, settings.experts_memory, name, made_of, check)
    if store is None:
        warnings.warn("experts_memory has no effect: the model has no experts", stacklevel=5)
    return store


def _check_vocabulary(architecture: Architecture, tokenizer: Tokenizer) -> None:
    """Raise ModelError if a token has no row in the embedding."""
    if tokenizer.vocab_size > architecture.vocab_size:
        raise ModelError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the embedding only {architecture.vocab_size} rows: "
            "they belong to different models"
        )


def _fitting(
    checkpoint: Checkpoint, architecture: Architecture, backend: ops.Backend, settings: ModelSettings, num_ranks: int
) -> MemoryBudget:
    """Return the budget with the steps, the context and the experts that fit in memory, before anything is allocated.

    If no length is given, the context is the part that fits. A smaller one is a warning, and so are experts of which
    only a part is in memory. Raise ModelError if the model does not fit.
    """
    context = context_length(settings.max_seq_len, architecture, settings.cache)
    load = LoadSettings.of(settings, backend.num_threads(), backend.memory_rules)
    budget = MemoryBudget.of(
        architecture, checkpoint.tensors, replace(load, limits=backend.step_limits), settings.cache,
        num_tokens=context, pool_pages=settings.pool_pages,
    )  # fmt: skip
    available, name = backend.available_bytes(), checkpoint.path.name
    if available is not None and not backend.computes_on_host:  # each rank has a memory of its own
        budget, available = replace(budget, num_devices=num_ranks), num_ranks * available
    fitting = budget.with_step_that_fits(available)
    if settings.max_seq_len is None:
        fitting = fitting.with_length_that_fits(available)
    if fitting.num_tokens < budget.num_tokens:
        warnings.warn(
            f"the context is {fitting.num_tokens:,} tokens, not {budget.num_tokens:,}: "
            f"{(available or 0) // 1_000_000:,} MB of memory are available (kv_type q8 or q4 needs less)",
            stacklevel=5,
        )
    if num_ranks == 1:
        fitting = fitting.with_experts_that_fit(available)
    if settings.experts_memory is None and (for_experts := fitting.load.experts_memory) is not None:
        warnings.warn(
            f"{name} needs {budget.model // 1_000_000:,} MB here, but {(available or 0) // 1_000_000:,} MB are "
            f"available: {for_experts // 1_000_000:,} MB of it are for experts, and the others are read from a file "
            "(experts_memory)",
            stacklevel=5,
        )
    fitting.check(name, available)
    return fitting


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
