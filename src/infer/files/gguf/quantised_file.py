"""Write a model as a GGUF file of another type, some rows of a tensor at a time.

The source is a GGUF file, or any other source of metadata and tensors in the same form (`QuantisableModel`). Threads
quantise the next pieces while one piece is written. So only a few pieces are in memory, for a model of any size.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infer.compute.quantization.file_types import (
    FILE_TYPES,
    NEED_A_MATRIX,
    Mixture,
    Traits,
    may_quantise,
    part_of,
    sorting_key,
    with_whole_blocks,
)
from infer.compute.quantization.ggml_blocks import dequantize
from infer.compute.quantization.ggml_types import BLOCK_TYPES
from infer.compute.quantization.quantisers import quantise
from infer.errors import InvalidRequestError, ModelError
from infer.files.gguf.forms import form_of
from infer.files.gguf.gguf import GGUFFile, TypedValue
from infer.files.gguf.gguf_writer import TensorPlan, write_gguf
from infer.files.tensors.lazy_weights import stored_rows
from infer.system.torch_threads import one_thread

QUANTISATION_VERSION = 2  # version of ggml's block types
_PIECE_VALUES = 1 << 20

Importance = Mapping[str, NDArray[np.float32]]  # by the tensor's name: [columns], or the columns of all experts


@final
@dataclass(frozen=True)
class SourceTensor:
    """A tensor of the source under its name in GGUF.

    `read(first, last)` returns rows, counted over all axes except the last: floats, or the bytes of blocks. Any thread
    may call it. It raises ModelError if reading fails.
    """

    name: str
    type: str
    shape: tuple[int, ...]  # rows first
    read: Callable[[int, int], Tensor]

    @property
    def num_rows(self) -> int:
        return prod(self.shape[:-1])


class QuantisableModel(NamedTuple):
    """The metadata and the tensors of a source."""

    values: Mapping[str, TypedValue]
    tensors: Sequence[SourceTensor]


def model_of_gguf(file: GGUFFile) -> QuantisableModel:
    """Return a GGUF file as a source. The parts of a split model become one file."""
    values = {key: value for key, value in file.typed_values.items() if not key.startswith("split.")}
    matrices = [replace(info, shape=(prod(info.shape[:-1]), info.shape[-1])) for info in file.tensors.values()]
    sources = zip(file.tensors.values(), map(stored_rows, matrices), strict=True)
    return QuantisableModel(values, [SourceTensor(info.name, info.type, info.shape, read) for info, read in sources])


@final
@dataclass(frozen=True)
class QuantisationRequest:
    """The wanted types.

    Attributes:
        file_type: A name of `FILE_TYPES`.
        tensor_types: Patterns (regular expressions) of tensors' names, each with the type of these tensors. The first
            matching pattern counts.
        output_type: Type of the output matrix.
        embedding_type: Type of the token embedding.
        is_pure: All other tensors get the file type's main type, without a mixture.
        allows_requantising: Quantised tensors may get another type.
        importance: Mean square of the inputs of matrices.
        importance_path: The name of the importance matrix, for the metadata.
    """

    file_type: str
    tensor_types: Sequence[tuple[str, str]] = ()
    output_type: str | None = None
    embedding_type: str | None = None
    is_pure: bool = False
    allows_requantising: bool = False
    importance: Importance = field(default_factory=dict, repr=False)
    importance_path: str | None = None


def choose_types(model: QuantisableModel, request: QuantisationRequest) -> dict[str, str]:
    """Return the type of each tensor, by its name.

    Raises:
        InvalidRequestError: A pattern matches no tensor, or a type needs an importance matrix that was not given.
        ModelError: A tensor is already quantised and would get another type.
    """
    by_name = {tensor.name: tensor for tensor in model.tensors}
    num_values = sum(part_of(name) == "v" for name in by_name)
    mixture = Mixture(request.file_type, _traits(model, request), num_values)
    patterns = [(re.compile(pattern), type) for pattern, type in request.tensor_types]
    for pattern, _ in patterns:
        if not any(pattern.search(name) for name in by_name):
            raise InvalidRequestError(
                f"--tensor-type {pattern.pattern} matches no tensor: give a part of a name, such as ffn_down"
            )
    chosen = {}
    for name in sorted(by_name, key=sorting_key):
        tensor = by_name[name]
        chosen[name] = tensor.type
        if may_quantise(name, tensor.shape):
            own = next((type for pattern, type in patterns if pattern.search(name)), None)
            chosen[name] = with_whole_blocks(_chosen(tensor, own, request, mixture), tensor.shape[-1])
        _check(tensor, chosen[name], request)
    return chosen


def _chosen(tensor: SourceTensor, own: str | None, request: QuantisationRequest, mixture: Mixture) -> str:
    part, default = part_of(tensor.name), FILE_TYPES[request.file_type].type
    is_named = own is not None and tensor.name == "per_layer_token_embd.weight"
    if part == "embedding" and request.embedding_type is not None and not is_named:
        return request.embedding_type
    if part == "output" and request.output_type is not None:
        return request.output_type
    if own is not None:
        return own
    if request.is_pure or BLOCK_TYPES[default].is_float:
        return default
    if part == "embedding" and request.output_type is not None and not mixture.traits.has_output:
        return request.output_type
    return mixture.choose(tensor.name, tensor.shape)


def _check(tensor: SourceTensor, type: str, request: QuantisationRequest) -> None:
    """Raise an error if the tensor may not get this type."""
    if type == tensor.type:
        return
    if not BLOCK_TYPES[tensor.type].is_float and not request.allows_requantising:
        raise ModelError(
            f"tensor {tensor.name!r:.80} is already {tensor.type}, and {type} made from it loses more than from the "
            "original weights: use a file in F16, BF16 or F32, or give --requantize"
        )
    needs_matrix = type in NEED_A_MATRIX or (type == "Q2_K" and request.file_type == "Q2_K_S")
    if needs_matrix and part_of(tensor.name) not in ("embedding", "output") and tensor.name not in request.importance:
        lacks = "has no entry of it" if request.importance else "is not given"
        raise InvalidRequestError(
            f"{type} of tensor {tensor.name!r:.80} needs an importance matrix, which {lacks}: make one with infer "
            "imatrix and give it as --imatrix FILE"
        )


def _traits(model: QuantisableModel, request: QuantisationRequest) -> Traits:
    def number(key: str, default: int) -> int:
        found = model.values.get(f"{architecture.value}.{key}")
        value = default if found is None else found.value
        value = value[0] if isinstance(value, list) and value else value
        return value if type(value) is int else default

    architecture = model.values.get("general.architecture", TypedValue("string", ""))
    num_layers, heads = number("block_count", 0), number("attention.head_count", 1)
    key_heads = number("attention.head_count_kv", heads)
    return Traits(
        num_layers,
        number("expert_count", 0),
        heads // key_heads if key_heads else 0,
        is_of_70b=num_layers == form_of(str(architecture.value)).num_layers_of_70b and heads != key_heads,
        is_falcon=architecture.value == "falcon",
        has_output=any(tensor.name == "output.weight" for tensor in model.tensors),
        has_matrix=bool(request.importance),
    )


def write_quantised(
    path: Path,
    model: QuantisableModel,
    request: QuantisationRequest,
    types: Mapping[str, str],
    num_threads: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the model with these types, which `choose_types` returned, replacing any file of this name.

    Args:
        path: The file, which appears when it is complete.
        model: The source. Its files must not be changed meanwhile.
        request: The request for which the types were chosen.
        types: The type of each tensor.
        num_threads: Number of threads that quantise.
        progress: Called with the number of written values and the number of all values.

    Raises:
        ModelError: Reading the source fails, or a value is not finite.
        OSError: The file cannot be written.
    """
    total = sum(prod(tensor.shape) for tensor in model.tensors)
    done = 0

    def pieces(pool: ThreadPoolExecutor, tensor: SourceTensor) -> Iterator[memoryview]:
        nonlocal done
        for rows, piece in _pieces(pool, num_threads, tensor, types[tensor.name], request.importance.get(tensor.name)):
            yield piece
            done += rows * tensor.shape[-1]
            progress(done, total)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="quantise") as pool:
        plans = [
            TensorPlan(tensor.name, types[tensor.name], tensor.shape, partial(pieces, pool, tensor))
            for tensor in model.tensors
        ]
        write_gguf(path, _metadata(model, request), plans)


def _metadata(model: QuantisableModel, request: QuantisationRequest) -> dict[str, TypedValue]:
    values = dict(model.values)
    values["general.quantization_version"] = TypedValue("u32", QUANTISATION_VERSION)
    values["general.file_type"] = TypedValue("u32", FILE_TYPES[request.file_type].number)
    if request.importance_path is not None:
        values["quantize.imatrix.file"] = TypedValue("string", request.importance_path)
        values["quantize.imatrix.entries_count"] = TypedValue("u32", len(request.importance))
    return values


def _pieces(
    pool: ThreadPoolExecutor, num_threads: int, tensor: SourceTensor, type: str, importance: Any
) -> Iterator[tuple[int, memoryview]]:
    """Yield the number of rows and the bytes of each piece, in order. No piece has rows of two experts."""
    columns, num_rows = tensor.shape[-1], tensor.num_rows
    weights = _weights(tensor, importance)
    per_expert = num_rows // len(weights)
    at_once = min(max(1, _PIECE_VALUES // columns), per_expert)
    waiting = deque[tuple[int, Future[memoryview]]]()
    starts = (start for first in range(0, num_rows, per_expert) for start in range(first, first + per_expert, at_once))
    try:
        for start in starts:
            expert = start // per_expert
            end = min(start + at_once, (expert + 1) * per_expert)
            waiting.append((end - start, pool.submit(_piece, tensor, type, weights[expert], start, end)))
            if len(waiting) > num_threads + 1:
                count, piece = waiting.popleft()
                yield count, piece.result()
        while waiting:
            count, piece = waiting.popleft()
            yield count, piece.result()
    finally:
        for _, piece in waiting:
            piece.cancel()


def _piece(tensor: SourceTensor, type: str, importance: Tensor | None, first: int, last: int) -> memoryview:
    with one_thread():
        stored = tensor.read(first, last)
        if type == tensor.type:
            packed = stored.contiguous().view(torch.uint8)
        else:
            values = stored if stored.is_floating_point() else dequantize(stored, tensor.type)
            try:
                packed = quantise(values.reshape(last - first, -1), type, importance)
            except ModelError as error:
                raise ModelError(f"tensor {tensor.name!r:.80}: {error}") from error
    return packed.contiguous().numpy().reshape(-1).data


def _weights(tensor: SourceTensor, importance: Any) -> list[Tensor | None]:
    """Return the importance of each expert's columns, or one importance (or None) for all rows."""
    if importance is None:
        return [None]
    weights, columns = torch.from_numpy(np.array(importance, np.float32)).reshape(-1), tensor.shape[-1]
    fits = len(weights) in (columns, columns * prod(tensor.shape[:-2]))
    if not fits or not weights.isfinite().all() or weights.min() < 0:
        raise InvalidRequestError(
            f"the importance matrix has {len(weights)} numbers for tensor {tensor.name!r:.80} of {tensor.shape}, "
            "expected one per column, each at least 0: make it with this model"
        )
    return list(weights.reshape(-1, columns))
