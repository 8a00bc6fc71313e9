"""Collect importance matrices: run texts through a model, and sum the squares of what each matrix is multiplied with.

The definition is that of llama.cpp's llama-imatrix: each chunk of a text begins anew, and every token of it counts. The
network runs in float32 on the reference backend, whose ops report their inputs.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from infer.cli.bench.text_quality import cut
from infer.compute import ops
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.operands.limits import MAX_STEP_TEXTS
from infer.compute.operands.mixers import GatedDeltaNet
from infer.compute.operands.step import Chunk, Step
from infer.engine.runner.caches import make_cache
from infer.engine.runner.text_encoder import TextEncoder
from infer.errors import InvalidRequestError, ModelError, UnsupportedModelError
from infer.files import Checkpoint, open_checkpoint
from infer.files.config import architecture_in_gguf
from infer.files.gguf.importance_matrix import ImportanceMatrix, InputSquares
from infer.model_settings import ModelSettings
from infer.models.families import make_architecture
from infer.models.from_checkpoint import load_checked, load_tokenizer, threads_if_loaded
from infer.models.gguf_export.delta_nets import DELTA_NET_OUTPUT, output_columns
from infer.models.gguf_export.places import PlaceInGGUF, place_in_gguf
from infer.models.load import OnProgress
from infer.models.transformer import Transformer
from infer.text.tokenizer import Tokenizer

_STEP_TOKENS = 2048  # for which matrices are dequantised once
_EXPERT = re.compile(r"\.mlp\.experts\.([0-9]+)\.")


@final
class _SquaresByTensor:
    """Adds up the inputs of matrices. Our matrices that are one tensor of a GGUF file have the same inputs."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._found = checkpoint, dict[str, InputSquares]()
        self._inputs, self._squares = torch.empty(0), torch.empty(0)  # the last ones
        self._places = _places(checkpoint)
        self._num_matrices: dict[str, int] = {}
        for place in self._places.values():
            self._num_matrices[place.tensor] = max(self._num_matrices.get(place.tensor, 0), place.matrix + 1)

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
