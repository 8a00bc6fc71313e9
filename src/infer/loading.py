"""A model's files to the network that runs and its tokenizer, after every setting has been checked."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final, get_args

import torch

from infer import ops
from infer.architecture import Architecture
from infer.cache.memory import available_memory_bytes, give_back_freed
from infer.cache.settings import CacheSettings
from infer.checkpoint import Checkpoint, open_checkpoint
from infer.checkpoint.stored import LazyWeights
from infer.errors import InvalidRequestError, ModelError
from infer.memory import LoadSettings, check_fits
from infer.model.families import make_architecture
from infer.model.load import FloatsAs, OnProgress, load_transformer
from infer.model.shapes import check_tensors, expected_shapes
from infer.model.transformer import Transformer
from infer.ops import Precision
from infer.tokenizer import Tokenizer

DEFAULT_MAX_SEQ_LEN = 8192  # of a model made for more, unless asked for
_RELEASED_BYTES = 8 << 20

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
    """The network alone, for programs that bring their own loop: `(model, config)`."""
    checkpoint = open_checkpoint(model_id)
    tokenizer = load_tokenizer(checkpoint)
    checkpoint = checkpoint.without_metadata()
    model = load_checked(checkpoint, tokenizer, device, dtype, weights, precision, max_seq_len, None)
    return model, model.architecture


def load_tokenizer(
    model: str | Path | Checkpoint, *, chat_template: str | None = None, allow_special: bool = False
) -> Tokenizer:
    """The tokenizer of a model, without its weights. `chat_template` stands in place of the model's own.

    With `allow_special` control tokens that are written in a message are control, not text.
    """
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
    gguf = checkpoint.metadata
    tokenizer = Tokenizer.from_gguf(gguf) if gguf else Tokenizer.from_folder(checkpoint.path)
    tokenizer.allow_special = allow_special
    if chat_template is not None:
        tokenizer.replace_chat_template(chat_template)
    return tokenizer


def load_checked(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    device: str | torch.device,
    dtype: str | torch.dtype,
    weights: str,
    precision: str,
    max_seq_len: int | None,
    on_progress: OnProgress | None,
    cache: CacheSettings | None = None,
) -> Transformer:
    architecture = make_architecture(checkpoint.config)
    cache = cache or CacheSettings()
    cache.check_model(architecture.layers)
    _check_vocabulary(architecture, tokenizer)
    chosen_dtype = _dtype(dtype)
    if chosen_dtype is not None and weights != "auto":
        raise InvalidRequestError(f"dtype={dtype} and weights={weights} contradict each other: give one of them")

    chosen_device, context = _device(device), _context(max_seq_len, architecture, cache)
    keep_floats_as, chosen_precision = (
        _choice("weights", weights, get_args(FloatsAs)),
        _choice("precision", precision, get_args(Precision)),
    )
    if ops.computes_on_host(chosen_device):
        kind = "auto" if chosen_dtype is None else str(chosen_dtype).removeprefix("torch.")
        settings = LoadSettings(kind, weights, precision, ops.num_threads(chosen_device))
        _check_memory(checkpoint, architecture, settings, cache, context)
    give_back_freed()
    with ops.threads_for(chosen_device):
        model = load_transformer(
            architecture,
            LazyWeights(checkpoint.tensors),
            device=chosen_device,
            dtype=chosen_dtype,
            keep_floats_as=keep_floats_as,
            precision=chosen_precision,
            max_seq_len=context,
            on_progress=on_progress,
            on_read=_PageRelease(checkpoint),
        )
    checkpoint.release_pages()
    give_back_freed()
    return model


@final
class _PageRelease:
    """Gives back a file's pages behind what is read, some megabytes at a time."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._num_bytes = checkpoint, 0

    def __call__(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes >= _RELEASED_BYTES:
            self._checkpoint.release_pages()
            self._num_bytes = 0


def _check_vocabulary(architecture: Architecture, tokenizer: Tokenizer) -> None:
    """Special tokens of a larger relative (an image token) may lie beyond the embedding: no text encodes to them."""
    if set(range(architecture.vocab_size, tokenizer.vocab_size)) - tokenizer.special_token_ids:
        raise ModelError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the embedding only {architecture.vocab_size} rows: "
            "they are of different models"
        )


def _check_memory(
    checkpoint: Checkpoint, architecture: Architecture, load: LoadSettings, cache: CacheSettings, num_tokens: int
) -> None:
    """What does not fit is refused before anything is allocated."""
    check_tensors(expected_shapes(architecture), checkpoint.tensors)
    available = available_memory_bytes()
    name, tensors = checkpoint.path.name, checkpoint.tensors
    check_fits(name, architecture, tensors, load, cache, num_tokens=num_tokens, available=available)


def set_num_threads(threads: int) -> None:
    """How many threads the process computes with, in our kernels and in torch's."""
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise InvalidRequestError(f"threads must be a whole number from 1, got {threads!r}")
    torch.set_num_threads(threads)
    ops.set_num_threads(threads)


def _choice(name: str, value: str, choices: Sequence[Any]) -> Any:
    if value not in choices:
        raise InvalidRequestError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return value


def _device(device: str | torch.device) -> torch.device:
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise InvalidRequestError(f"device must be cpu or cuda, got {device!r}") from None
    if chosen.type not in ("cpu", "cuda"):
        raise InvalidRequestError(f"device must be cpu or cuda, got {device!r}")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequestError("device is cuda, but torch sees no CUDA device here: use device='cpu'")
    return chosen


def _dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    if dtype == "auto":
        return None
    chosen = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen not in _DTYPES.values():
        raise InvalidRequestError(f"dtype must be one of auto, {', '.join(_DTYPES)}, got {dtype!r}")
    return chosen


def _context(max_seq_len: int | None, architecture: Architecture, cache: CacheSettings) -> int:
    if max_seq_len is None:
        return min(architecture.max_positions, DEFAULT_MAX_SEQ_LEN)
    if max_seq_len < 2:
        raise InvalidRequestError(
            f"max_seq_len must be from 2 to the model's own {architecture.most_positions}, got {max_seq_len}"
        )
    cache.check_length(max_seq_len, architecture.most_positions)
    return max_seq_len
