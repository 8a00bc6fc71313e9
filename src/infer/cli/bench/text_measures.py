"""Measure what a model makes of texts: how well it predicts them, how far another model is from it, what matters in it.

The measures are those of llama.cpp. A text is cut into windows, and each begins anew. For perplexity and divergence,
the second half of a window is predicted, each token from all tokens before it in the window.

An importance matrix has the sums of the squares of what each matrix is multiplied with. Its windows are chunks, of
which every token counts. The network runs in float32 on the reference backend, whose ops report their inputs.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from infer.compute import ops
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.operands.limits import MAX_STEP_TEXTS
from infer.compute.operands.mixers import GatedDeltaNet
from infer.compute.operands.step import Chunk, Step
from infer.engine.runner.hidden_states import TextEncoder
from infer.engine.runner.runner import make_cache
from infer.errors import InvalidRequestError, ModelError, UnsupportedModelError
from infer.files import Checkpoint, open_checkpoint
from infer.files.gguf.forms import architecture_in_gguf
from infer.files.gguf.importance_matrix import ImportanceMatrix, InputSquares
from infer.llm import LLM
from infer.model_settings import ModelSettings
from infer.models.families import make_architecture
from infer.models.from_checkpoint import load_checked, load_tokenizer, threads_if_loaded
from infer.models.gguf_export.tensors import DELTA_NET_OUTPUT, PlaceInGGUF, output_columns, place_in_gguf
from infer.models.load import OnProgress
from infer.models.transformer import Transformer
from infer.text.tokenizer import Tokenizer

_ROWS = 32  # rows of logits that are in float64 at a time
_QUANTILE = 0.99
_LARGEST_LOSS = 700.0  # e to the power of a larger loss is not a float
_UNUSABLE = "its weights are damaged or belong to another model; copy or download the model again"
OnWindow = Callable[[int, int], None]  # windows that are done, and all
_STEP_TOKENS = 2048  # for which matrices are dequantised once
_EXPERT = re.compile(r"\.mlp\.experts\.([0-9]+)\.")


def cut(tokenizer: Tokenizer, ids: Sequence[int], size: int) -> list[list[int]]:
    """Return the whole windows of `size` tokens, each with the token that begins a text if the tokenizer has one.

    That token replaces the window's first token. The tokens after the last whole window are left out.
    """
    windows = [list(ids[start : start + size]) for start in range(0, len(ids) - size + 1, size)]
    if tokenizer.adds_bos and tokenizer.bos_token_id is not None:
        windows = [[tokenizer.bos_token_id, *window[1:]] for window in windows]
    return windows


@final
@dataclass(frozen=True)
class Perplexity:
    """e to the mean negative log-likelihood of `num_tokens` tokens, with its standard error."""

    perplexity: float
    standard_error: float
    num_tokens: int
    num_windows: int
    context: int


@final
@dataclass(frozen=True)
class Divergence:
    """How far the predictions of a model are from those of a reference, over `num_tokens` tokens of a text.

    The Kullback-Leibler divergences are in nats. `same_likeliest` is the share of tokens at which both have the same
    likeliest token. `rms_change` is the root mean square of the change of the right token's probability.
    """

    reference: Perplexity
    other: Perplexity
    mean_kl: float
    median_kl: float
    kl_99: float  # 99 % of the tokens are below it
    largest_kl: float
    same_likeliest: float
    rms_change: float
    largest_logit_error: float
    kl_by_window: tuple[float, ...]  # means
    kl_by_position: tuple[float, ...]  # means over the windows, of the predicted positions in order


class _Scored(NamedTuple):
    """At most `_ROWS` predicted tokens of a window, and the logits that predict them."""

    token_ids: Int[Tensor, "rows"]
    logits: Float[Tensor, "rows vocab"]

    def log_probabilities(self) -> tuple[Float[Tensor, "rows vocab"], Float[Tensor, "rows"]]:
        """Return the float64 log-probabilities of all tokens and of the right ones."""
        found = self.logits.double().log_softmax(-1)
        return found, found.gather(-1, self.token_ids[:, None])[:, 0]


def measure_perplexity(llm: LLM, text: str, context: int, on_window: OnWindow = lambda done, total: None) -> Perplexity:
    """Return the perplexity of a text.

    Args:
        llm: The model.
        text: The text.
        context: Tokens of a window.
        on_window: Called after each window.

    Raises:
        InvalidRequestError: The context does not fit the model, or the text has fewer tokens than a window.
        ModelError: The model's logits are not finite.
    """
    windows, losses = _windows(llm, text, context), list[Tensor]()
    for number, window in enumerate(windows, 1):
        losses += [-scored.log_probabilities()[1] for scored in _scored(llm, window)]
        on_window(number, len(windows))
    return _perplexity(torch.cat(losses), len(windows), context)


def measure_divergence(
    reference: LLM, other: LLM, text: str, context: int, on_window: OnWindow = lambda done, total: None
) -> Divergence:
    """Return how far the predictions of `other` are from those of `reference`.

    Args:
        reference: The model that is taken as right.
        other: A model with the same vocabulary. If one head has rows after the last token of the other, they are left
            out.
        text: The text.
        context: Tokens of a window.
        on_window: Called after each window.

    Raises:
        InvalidRequestError: As `measure_perplexity`, or the models have different vocabularies.
        ModelError: As `measure_perplexity`.
    """
    if reference.tokenizer.token_bytes != other.tokenizer.token_bytes:
        raise InvalidRequestError("the models have different vocabularies: compare models that have the same tokens")
    windows, found = _windows(reference, text, context), list[_Compared]()
    _windows(other, text, context)  # fits its context, too
    for number, window in enumerate(windows, 1):
        found += map(_compared, _scored(reference, window), _scored(other, window))
        on_window(number, len(windows))
    *tensors, errors = zip(*found, strict=True)
    right, others, kl, is_same = map(torch.cat, tensors)
    ordered, by_window = kl.sort().values, kl.view(len(windows), -1)
    return Divergence(
        reference=_perplexity(-right, len(windows), context),
        other=_perplexity(-others, len(windows), context),
        mean_kl=float(kl.mean()),
        median_kl=float(ordered[len(ordered) // 2]),
        kl_99=float(ordered[min(len(ordered) - 1, int(_QUANTILE * len(ordered)))]),
        largest_kl=float(ordered[-1]),
        same_likeliest=float(is_same.double().mean()),
        rms_change=float((others.exp() - right.exp()).square().mean().sqrt()),
        largest_logit_error=max(errors),
        kl_by_window=tuple(by_window.mean(1).tolist()),
        kl_by_position=tuple(by_window.mean(0).tolist()),
    )


def _windows(llm: LLM, text: str, context: int) -> list[list[int]]:
    """Return the windows, each with the token that begins a text if the tokenizer has one."""
    if not 4 <= context <= llm.max_seq_len:
        raise InvalidRequestError(f"context must be from 4 to {llm.max_seq_len}, got {context}", param="context")
    tokenizer = llm.tokenizer
    ids = tokenizer.encode(text)
    if len(ids) < context:
        raise InvalidRequestError(
            f"the text has {len(ids)} tokens, and a window has {context}: give a longer text or a smaller context"
        )
    return cut(tokenizer, ids, context)


def _scored(llm: LLM, window: list[int]) -> Iterator[_Scored]:
    """Return a model's predictions of a window. Raises ModelError if its logits are not finite."""
    first = len(window) // 2 + 1
    logits = llm.logits(window[:-1], last=len(window) - first).cpu()
    if not logits.isfinite().all():
        raise ModelError(f"logits of the model are not finite: {_UNUSABLE}")
    return map(_Scored, torch.split(torch.tensor(window[first:]), _ROWS), torch.split(logits, _ROWS))


class _Compared(NamedTuple):
    """Some rows of both models: log-probabilities of the right tokens, divergences, if the likeliest is the same."""

    right: Float[Tensor, "rows"]
    other: Float[Tensor, "rows"]
    kl: Float[Tensor, "rows"]
    is_same: Tensor
    largest_logit_error: float


def _compared(reference: _Scored, other: _Scored) -> _Compared:
    """Compare the logits of the tokens that both have: heads may be padded to different sizes after the last token."""
    size = min(reference.logits.shape[1], other.logits.shape[1])
    reference, other = (each._replace(logits=each.logits[:, :size]) for each in (reference, other))
    (expected, right), (found, of_other) = reference.log_probabilities(), other.log_probabilities()
    kl = (expected.exp() * (expected - found)).sum(-1).clamp(min=0)  # rounding makes some less than 0
    is_same = expected.argmax(-1) == found.argmax(-1)
    return _Compared(right, of_other, kl, is_same, float((reference.logits - other.logits).abs().max()))


def _perplexity(losses: Float[Tensor, "tokens"], num_windows: int, context: int) -> Perplexity:
    mean, count = float(losses.mean()), len(losses)
    if mean > _LARGEST_LOSS:
        raise ModelError(f"the model's perplexity must be at most e^{_LARGEST_LOSS:.0f}, got e^{mean:.0f}: {_UNUSABLE}")
    deviation = float(losses.std()) if count > 1 else 0.0
    perplexity = math.exp(mean)
    return Perplexity(perplexity, perplexity * deviation / math.sqrt(count), count, num_windows, context)


@final
class _SquaresByTensor:
    """Adds up the inputs of matrices. Our matrices that are one tensor of a GGUF file have the same inputs."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._found = checkpoint, dict[str, InputSquares]()
        self._inputs, self._squares = torch.empty(0), torch.empty(0)  # the last ones
        self._places = _places(checkpoint)
        self._num_matrices = Counter(place.tensor for place in self._places.values())

    def add(self, name: str, inputs: Float[Tensor, "rows in"]) -> None:
        """Add the inputs of the matrix that has our name. Raises ModelError if they are not finite."""
        place = self._places.get(name)
        if place is None:
            return
        if inputs is not self._inputs:  # q, k and v have the same ones, and so have gate and up
            self._inputs, self._squares = inputs, inputs.square().sum(0)
            if not self._squares.isfinite().all():
                fix = "the model's weights are damaged, so copy or download it again"
                raise ModelError(f"inputs of {place.tensor!r:.80} are not finite: {fix}")
        if place.tensor not in self._found:
            self._found[place.tensor] = InputSquares.zeros(self._num_matrices[place.tensor], inputs.shape[1])
        total = self._found[place.tensor]
        total.sums[place.matrix] += self._squares.numpy()
        total.counts[place.matrix] += len(inputs)

    def of_file(self) -> dict[str, InputSquares]:
        """Return the squares with their columns in the order of GGUF files."""
        found = dict(self._found)
        if self._checkpoint.metadata:
            return found
        name, layers = architecture_in_gguf(self._checkpoint.config), make_architecture(self._checkpoint.config).layers
        for index, layer in enumerate(layers):
            tensor = f"blk.{index}.{DELTA_NET_OUTPUT}"
            if isinstance(layer.mixer, GatedDeltaNet) and tensor in found:
                order = output_columns(str(name), layer.mixer)
                found[tensor] = InputSquares(found[tensor].sums[:, order], found[tensor].counts)
        return found


def _places(checkpoint: Checkpoint) -> dict[str, PlaceInGGUF]:
    """Return the place of each matrix of a layer, by our names. If several share a place, only the first has it.

    Raises UnsupportedModelError if GGUF has no architecture for the model of a folder.
    """
    architecture, names = architecture_in_gguf(checkpoint.config), dict[PlaceInGGUF, str]()
    if architecture is None and not checkpoint.metadata:
        family = checkpoint.config["model_type"]
        raise UnsupportedModelError(f"{checkpoint.path.name}: GGUF has no architecture for model_type {family!r}")
    for name, info in checkpoint.tensors.items():
        if not name.startswith("model.layers.") or len(info.shape) != 2:
            continue
        if checkpoint.metadata:  # a GGUF file has its own names
            expert = _EXPERT.search(name)
            names.setdefault(PlaceInGGUF(info.name, 0 if expert is None else int(expert[1])), name)
        elif (place := place_in_gguf(name, str(architecture))) is not None:
            names.setdefault(place, name)
    return {name: place for place, name in names.items()}


def collect_importance(
    model: str,
    texts: Iterable[tuple[str, str]],
    *,
    chunk_size: int,
    parse_special: bool = False,
    threads: int | None = None,
    on_chunk: OnProgress = lambda done, total: None,
) -> ImportanceMatrix:
    """Return the importance matrix of a model over texts.

    Args:
        model: A model as `LLM` takes it.
        texts: The name and the text of each dataset. Their tokens follow each other, and those after the last whole
            chunk are left out.
        chunk_size: Tokens of a chunk.
        parse_special: True if the texts of control tokens, as in conversations, are control tokens.
        threads: As for `LLM`.
        on_chunk: Called with the number of chunks that are done, and of all.

    Raises:
        InvalidRequestError: The texts have fewer tokens than a chunk, or a chunk does not fit the model.
        ModelError: The model cannot be used, or makes numbers that are not finite.
    """
    checkpoint = open_checkpoint(model)
    tokenizer = load_tokenizer(checkpoint)
    ids, datasets = list[int](), list[str]()
    for name, text in texts:
        datasets.append(name)
        ids += tokenizer.encode(text, parse_special=parse_special)
    if len(ids) < chunk_size:
        raise InvalidRequestError(
            f"the texts have {len(ids)} tokens, and a chunk has {chunk_size}: give longer texts or a smaller chunk"
        )
    chunks = cut(tokenizer, ids, chunk_size)
    with threads_if_loaded(threads):
        squares = squares_of_inputs(checkpoint, tokenizer, chunks, on_chunk)
    return ImportanceMatrix(squares, tuple(datasets), len(chunks), chunk_size)


@torch.inference_mode()
def squares_of_inputs(
    checkpoint: Checkpoint, tokenizer: Tokenizer | None, chunks: Sequence[Sequence[int]], on_chunk: OnProgress
) -> dict[str, InputSquares]:
    """Return the squares of the inputs of all matrices of layers, by the names of tensors in GGUF files.

    The chunks have equal lengths. `tokenizer` is as for `load_checked`.
    """
    squares, size = _SquaresByTensor(checkpoint), len(chunks[0])
    with ops.using("reference"):
        settings = ModelSettings(max_seq_len=size)
        network = load_checked(checkpoint.without_metadata(), tokenizer, settings, on_input=squares.add)
        run = _encode if network.architecture.reads_whole_texts else _decode
        for done in run(network, chunks, size):
            on_chunk(done, len(chunks))
    return squares.of_file()


def _decode(network: Transformer, chunks: Sequence[Sequence[int]], size: int) -> Iterator[int]:
    """Run chunks of `size` tokens through a decoder, and yield the number of chunks that are done."""
    num_rows, done = max(1, _STEP_TOKENS // size), 0
    cache = make_cache(network, size, num_rows, settings=CacheSettings(kv_type="f32"), step_tokens=size)
    while done < len(chunks):
        some = [Chunk(row, chunk, has_logits=False) for row, chunk in enumerate(chunks[done : done + num_rows])]
        for row in range(len(some)):
            cache.set_rope(row, is_long=network.is_long(size))
            cache.reserve(row, size)
        network.residual(Step.of_chunks(some, [0] * len(some)), cache)
        for row in range(len(some)):
            cache.truncate(row, 0)
        done += len(some)
        yield done


def _encode(network: Transformer, chunks: Sequence[Sequence[int]], size: int) -> Iterator[int]:
    """Run chunks through an encoder, as `_decode` does through a decoder."""
    encoder = TextEncoder(network, "f32", capture=False)
    num_texts = min(max(1, encoder.step_tokens // size), MAX_STEP_TEXTS)
    for start in range(0, len(chunks), num_texts):
        some = chunks[start : start + num_texts]
        for _ in encoder.of(some, [size] * len(some)):
            pass
        yield start + len(some)
