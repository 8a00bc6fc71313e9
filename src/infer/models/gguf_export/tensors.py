"""A folder's tensors under the names and in the forms of GGUF: the inverse of `files`' changes to a file.

Rows of q and k whose elements rotate together become neighbours, experts are stacked, and projections are fused, as
each architecture of llama.cpp requires. Decays of gated delta nets are stored directly, not as logarithms. Files of
Qwen3-Next fuse b and a by key heads. In files of Qwen3.5, neighbouring value heads belong to different key heads.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, product
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infer.compute.operands.architecture import Architecture
from infer.compute.operands.mixers import Attention, GatedDeltaNet
from infer.compute.operands.weights import FileWeight, UnreadWeight
from infer.compute.quantization.ggml_types import BLOCK_TYPES, FLOAT_TYPES
from infer.errors import UnsupportedModelError
from infer.files.gguf.forms import GGUFForm, form_of
from infer.files.gguf.quantised_file import SourceTensor
from infer.files.tensors.fused_tensors import FUSED
from infer.files.tensors.lazy_weights import as_float32
from infer.files.tensors.tensor_names import name_in_gguf

_EXPERT = re.compile(r"(model\.layers\.[0-9]+\.mlp\.experts)\.([0-9]+)\.(gate|up|down)_proj\.(weight|bias)")
_HEAD = re.compile(r"(model\.layers\.[0-9]+\.self_attn\.[qk]_norm)\.norms\.([0-9]+)\.weight")
_LAYER = re.compile(r"model\.layers\.([0-9]+)\.(.+)")
# In all files: llama.cpp has no kernels for other types of these tensors, and its converter writes float32.
_IN_FLOAT32 = re.compile(
    r"(.+\.(ffn_gate_inp|ffn_gate_inp_shexp|ssm_conv1d|shortconv\.conv)|position_embd|token_types)\.weight"
)

Named = dict[str, UnreadWeight]  # by our names
Order = NDArray[np.int64]  # for each row, the number of its source row


_MATRIX = re.compile(r"(model\.layers\.[0-9]+\.)(?:mlp\.experts\.([0-9]+)\.)?(.+)\.weight")
_PARTS = {part: fused for fused, parts in FUSED.items() for part in parts}


def rows_of(weight: FileWeight) -> UnreadWeight:
    """Return a weight with one or two axes as rows. A type that GGUF does not have becomes float32."""
    if isinstance(weight, UnreadWeight):
        rows = UnreadWeight(weight.type, weight.shape, weight.read)
        return rows if BLOCK_TYPES[weight.type].ggml_id is not None else as_floats(rows)
    if len(weight.shape) == 1:
        return vector_of(weight.data)
    return UnreadWeight(weight.type, weight.shape, lambda first, last: weight.data[first:last])


def vector_of(values: Tensor) -> UnreadWeight:
    """Return the float32 values of a vector, whose rows have one value."""
    column = values.to(torch.float32).reshape(-1, 1)
    return UnreadWeight("F32", (len(column),), lambda first, last: column[first:last])


def joined(parts: Sequence[UnreadWeight]) -> UnreadWeight:
    """Return the rows of all parts, in their order. Parts of different types become float32."""
    if len(parts) == 1:
        return parts[0]
    if len({part.type for part in parts}) > 1:
        parts = [as_floats(part) for part in parts]
    bounds = list(pairwise(accumulate((part.shape[0] for part in parts), initial=0)))

    def read(first: int, last: int) -> Tensor:
        found = [
            part.read(max(first, start) - start, min(last, end) - start)
            for part, (start, end) in zip(parts, bounds, strict=True)
            if max(first, start) < min(last, end)
        ]
        return torch.cat(found) if found else parts[0].read(0, 0)

    return replace(parts[0], shape=(bounds[-1][1], *parts[0].shape[1:]), read=read)


def reordered(rows: UnreadWeight, order: Order) -> UnreadWeight:
    """Return the rows in another order. Runs of neighbouring rows are read together."""

    def read(first: int, last: int) -> Tensor:
        wanted = order[first:last]
        if not len(wanted):
            return rows.read(0, 0)
        ascending = np.sort(wanted)
        runs = np.split(ascending, np.flatnonzero(np.diff(ascending) != 1) + 1)
        data = torch.cat([rows.read(int(run[0]), int(run[-1]) + 1) for run in runs])
        return data[torch.from_numpy(np.searchsorted(ascending, wanted))]

    return replace(rows, shape=(len(order), *rows.shape[1:]), read=read)


def with_columns(rows: UnreadWeight, order: Order) -> UnreadWeight:
    """Return the matrix with its columns in another order. Values in blocks become float32."""
    floats, columns = (rows if rows.type in FLOAT_TYPES else as_floats(rows)), torch.from_numpy(order)
    read = floats.read
    return replace(floats, shape=(rows.shape[0], len(order)), read=lambda first, last: read(first, last)[:, columns])


def as_floats(rows: UnreadWeight) -> UnreadWeight:
    """Return the matrix in float32."""

    def read(first: int, last: int) -> Tensor:
        return as_float32(rows.rows(first, last)).data

    return replace(rows, type="F32", read=read)


def source_tensor(name: str, shape: tuple[int, ...], rows: UnreadWeight) -> SourceTensor:
    """Return a tensor of the file with these values, in the source's type. A stack has three axes."""

    def read_vector(first: int, last: int) -> Tensor:
        return rows.read(0, rows.shape[0]).reshape(prod(shape[:-1]), -1)[first:last]

    return SourceTensor(name, rows.type, shape, read_vector if len(rows.shape) == 1 else rows.read)


def export_tensors(
    path: Path,
    name: str,
    architecture: Architecture,
    weights: Mapping[str, FileWeight],
    factors: Mapping[str, Sequence[float]],
) -> list[SourceTensor]:
    """Return the tensors of a network, beginning with those outside of layers.

    Args:
        path: The folder, for errors.
        name: The architecture's name in GGUF.
        architecture: The network.
        weights: The folder's weights by our names.
        factors: Additional vectors of the file, by GGUF's names.

    Raises:
        UnsupportedModelError: A tensor has no name in GGUF.
    """
    named, form = {each: rows_of(weight) for each, weight in weights.items()}, form_of(name)
    if architecture.tied_embeddings:
        named.pop("lm_head.weight", None)
    for index, layer in enumerate(architecture.layers):
        prefix = f"model.layers.{index}."
        if isinstance(layer.mixer, Attention):
            _change_attention(named, form, f"{prefix}self_attn.", layer.mixer)
        elif isinstance(layer.mixer, GatedDeltaNet):
            _change_delta_net(named, name, f"{prefix}linear_attn.", layer.mixer)
        for fused, kind in product(form.fused, ("weight", "bias")):
            names = [f"{prefix}{part}.{kind}" for part in FUSED.get(fused, ())]
            if parts := [named.pop(each) for each in names if each in named]:
                named[f"{prefix}{fused}.{kind}"] = joined(parts)
    found = _take_stacks(named, form) | {each: (rows.shape, rows) for each, rows in named.items()}
    ordered = [_renamed(path, name, each, *found[each]) for each in sorted(found, key=_place)]
    vectors = {each: vector_of(torch.tensor(values, dtype=torch.float32)) for each, values in factors.items()}
    return [*(source_tensor(each, rows.shape, rows) for each, rows in vectors.items()), *ordered]


def _renamed(path: Path, name: str, ours: str, shape: tuple[int, ...], rows: UnreadWeight) -> SourceTensor:
    stored = name_in_gguf(ours, form_of(name).names)
    if stored is None:
        raise UnsupportedModelError(f"{path.name}: the tensor {ours!r:.80} has no name in a GGUF file of {name}")
    if ours.endswith(".mlp.shared_gate.weight"):  # llama.cpp's files drop axes of length one
        shape = shape[1:]
    is_float32 = _IN_FLOAT32.fullmatch(stored) and len(rows.shape) > 1
    return source_tensor(stored, shape, as_floats(rows) if is_float32 else rows)


def _place(name: str) -> tuple[int, str]:
    match = _LAYER.fullmatch(name)
    return (-1, name) if match is None else (int(match[1]), match[2])


def _change_attention(named: Named, form: GGUFForm, prefix: str, mixer: Attention) -> None:
    """Give one layer's tensors of attention the form of this architecture's files."""
    parts = [f"{prefix}{part}_proj" for part in "qkv"]
    if form.are_rows_paired:
        for part, heads in zip(parts, (mixer.num_heads, mixer.num_kv_heads), strict=False):
            for each in (f"{part}.weight", f"{part}.bias"):
                if each in named:
                    rotated = mixer.head_dim if mixer.rope is None else 2 * mixer.rope.half
                    named[each] = reordered(named[each], _in_pairs(named[each].shape[0], heads, rotated))
    if form.has_gates_in_q:
        for kind in ("weight", "bias"):
            own, gate = (named.pop(f"{prefix}{part}_proj.{kind}", None) for part in ("q", "gate"))
            if own is not None and gate is not None:
                order = _alternating(mixer.num_heads, own.shape[0])
                named[f"{prefix}q_proj.{kind}"] = reordered(joined([own, gate]), order)
    if form.has_scale_in_q_norm:
        for part, scale in (("q", mixer.scale * mixer.head_dim**0.5), ("k", 1.0)):
            named[f"{prefix}{part}_norm.weight"] = vector_of(torch.full((mixer.head_dim,), scale))


def _in_pairs(num_rows: int, heads: int, rotated: int) -> Order:
    """Return the order in which rows that rotate together are neighbours: the inverse of `in_half_order`."""
    rows = np.arange(num_rows).reshape(heads, -1)
    rows[:, :rotated] = rows[:, :rotated].reshape(heads, 2, -1).swapaxes(1, 2).reshape(heads, -1)
    return rows.reshape(-1)


def _alternating(heads: int, num_rows: int) -> Order:
    """Return the order of two matrices' rows in which each head has its rows of the first, then of the second."""
    return np.arange(2 * num_rows).reshape(2, heads, -1).swapaxes(0, 1).reshape(-1)


def _take_stacks(named: Named, form: GGUFForm) -> dict[str, tuple[tuple[int, ...], UnreadWeight]]:
    """Remove the tensors of single experts and of norms of heads.

    Return their stacks by our names, each with its shape.
    """
    experts: dict[tuple[str, str, str], dict[int, UnreadWeight]] = {}
    norms: dict[str, dict[int, UnreadWeight]] = {}
    for each in list(named):
        if match := _HEAD.fullmatch(each):
            norms.setdefault(match[1], {})[int(match[2])] = named.pop(each)
        elif match := _EXPERT.fullmatch(each):
            experts.setdefault((match[1], match[3], match[4]), {})[int(match[2])] = named.pop(each)
    if "mlp.experts.gate_up_proj" in form.fused:
        for module, part, kind in [each for each in experts if each[1] == "gate"]:
            gates, ups = experts.pop((module, part, kind)), experts.pop((module, "up", kind))
            experts[module, "gate_up", kind] = {index: joined([gates[index], ups[index]]) for index in gates}
    stacks: dict[str, tuple[tuple[int, ...], UnreadWeight]] = {
        f"{module}.weight": ((len(of_heads), *of_heads[0].shape), joined([of_heads[head] for head in sorted(of_heads)]))
        for module, of_heads in norms.items()
    }
    for (module, part, kind), by_index in experts.items():
        rows = joined([by_index[index] for index in sorted(by_index)])
        stacks[f"{module}.{part}_proj.{kind}"] = (len(by_index), rows.shape[0] // len(by_index), *rows.shape[1:]), rows
    return stacks


DELTA_NET_OUTPUT = "ssm_out.weight"  # its name within a layer


def _change_delta_net(named: Named, name: str, prefix: str, mixer: GatedDeltaNet) -> None:
    """Give one layer's tensors of a delta net the form of this architecture's files."""
    if mixer.is_decay_log:
        decay = named[f"{prefix}decay"]
        named[f"{prefix}decay"] = vector_of(-decay.data.exp())
    if not form_of(name).fixed["linear_value_heads_are_tiled"]:
        b, a = (named.pop(f"{prefix}{part}_proj.weight") for part in "ba")
        order = _alternating(mixer.num_key_heads, mixer.num_value_heads)
        named[f"{prefix}ba_proj.weight"] = reordered(joined([b, a]), order)
        return
    heads, features = _tiled(mixer, 1), _tiled(mixer, mixer.value_dim)
    channels = np.arange(mixer.num_channels)
    first = mixer.num_channels - mixer.value_features
    channels[first:] = first + features
    orders = {"b_proj.weight": heads, "a_proj.weight": heads, "decay": heads, "dt_bias": heads}
    orders |= {"z_proj.weight": features, "qkv_proj.weight": channels, "taps": channels}
    for part, order in orders.items():
        named[prefix + part] = reordered(named[prefix + part], order)
    named[f"{prefix}out_proj.weight"] = with_columns(named[f"{prefix}out_proj.weight"], output_columns(name, mixer))


def output_columns(name: str, mixer: GatedDeltaNet) -> Order:
    """Return, for each column of the output's matrix in files of this architecture, the number of our column."""
    is_tiled = form_of(name).fixed["linear_value_heads_are_tiled"]
    return _tiled(mixer, mixer.value_dim) if is_tiled else np.arange(mixer.value_features)


def _tiled(mixer: GatedDeltaNet, size: int) -> Order:
    """Return the order of the value heads' rows, `size` per head.

    In it, head h belongs to key head h mod the number of key heads.
    """
    rows = np.arange(mixer.num_value_heads * size).reshape(mixer.num_key_heads, -1, size)
    return rows.swapaxes(0, 1).reshape(-1)


class PlaceInGGUF(NamedTuple):
    """A tensor, and the index of the matrix in it: the expert's number, or 0."""

    tensor: str
    matrix: int = 0


def place_in_gguf(name: str, architecture: str) -> PlaceInGGUF | None:
    """Return the place of a layer's matrix, or None if GGUF has no name for it.

    Args:
        name: Our name of the matrix.
        architecture: The architecture's name in GGUF.
    """
    match = _MATRIX.fullmatch(name)
    if match is None:
        return None
    module = match[3] if match[2] is None else f"mlp.experts.{match[3]}"
    form = form_of(architecture)
    if _PARTS.get(module) in form.fused:
        module = _PARTS[module]
    if form.has_gates_in_q and module == "self_attn.gate_proj":
        module = "self_attn.q_proj"
    ours = f"{match[1]}{module}.weight"
    stored = name_in_gguf(ours, form.names)
    return None if stored is None else PlaceInGGUF(stored, int(match[2] or 0))
