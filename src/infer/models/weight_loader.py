"""Tensors of a checkpoint → operands: projections in the form of the kernels, norms, and a rank's part of them."""

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import softplus

from infer.compute import ops
from infer.compute.operands.architecture import Architecture
from infer.compute.operands.feed_forwards import XIELU
from infer.compute.operands.group import Group, Shares
from infer.compute.operands.mixers import QueryScale, Rope, Shapes
from infer.compute.operands.weights import (
    ConvertedWeight,
    ExpertFrames,
    FileWeight,
    Norm,
    ObservedWeight,
    Projection,
    RopeTable,
    StoredWeight,
    UnreadWeight,
    Weight,
)
from infer.compute.quantization.ggml_blocks import dequantize
from infer.compute.quantization.ggml_types import BLOCK_TYPES
from infer.compute.quantization.quantisers import quantise
from infer.errors import ModelError
from infer.files.tensors.tensor_bytes import DTYPES
from infer.models.sharding import Range, part_ranges, row_starts, rows_of

Weights = Mapping[str, FileWeight]

_EXPERT_PARTS = ("gate", "up", "down")
OnInput = Callable[[str, Float[Tensor, "rows in"]], None]  # (name of a matrix, its inputs)


@dataclass(frozen=True)
class WeightLoader:
    """Makes the operands of one model, or of one rank's part of it, from the tensors of its checkpoint."""

    network: Architecture
    expected: Shapes
    weights: Weights
    backend: ops.Backend
    types: Mapping[str, str]  # of matrices after loading, by the names of their tensors
    precision: ops.Precision
    group: Group | None
    rope_tables: Mapping[Rope, RopeTable]
    query_scales: Mapping[QueryScale, Tensor]
    prefix: str = ""  # before the names of tensors
    label: str = ""  # before the names of projections in profiles
    layer: int = -1  # -1: what belongs to no layer
    experts: ops.ExpertStore | None = None  # if the experts are read from a file while the model runs
    on_input: OnInput | None = None  # called for the layers' matrices

    def of_layer(self, index: int) -> "WeightLoader":
        """Return a loader whose names are relative to a layer."""
        return replace(self, prefix=f"model.layers.{index}.", label=f"L{index}.", layer=index)

    def by_rows(
        self, *names: str, label: str, are_alike: bool = False, are_blocks: bool = False, is_stack: bool = False
    ) -> Projection:
        """Return this rank's rows of the matrices, which are stacked, then divided by rows.

        If they `are_alike`, they have equal shapes, and each is divided in the same way.
        """
        if self.group is None:
            return self.projection(*names, label=label, is_stack=is_stack)
        counts = tuple(map(self._num_rows, names))
        starts = row_starts(counts[0] if are_alike else sum(counts), self.group.size, are_blocks=are_blocks)
        shares = Shares(self.group, starts)
        ranges = [shares.own] * len(names) if are_alike else part_ranges(counts, shares.own)
        return replace(self.projection(*names, label=label, ranges=ranges, is_stack=is_stack), shares=shares)

    def expert_matrices(self, num_experts: int) -> tuple[list[Projection], ExpertFrames | None]:
        """Return gate, up and down of a layer's experts, and their frames if only some are in memory at a time."""
        names = {part: [f"mlp.experts.{expert}.{part}_proj" for expert in range(num_experts)] for part in _EXPERT_PARTS}
        if self.experts is None:
            whole = {"are_alike": True, "is_stack": True}
            parts = names.items()
            return [self.by_rows(*own, label=part, are_blocks=part != "down", **whole) for part, own in parts], None
        matrices = {part: self._whole(own) for part, own in names.items()}
        *weights, frames = self.experts.load(
            self.layer, lambda expert: [self._weight(*each[expert]) for each in matrices.values()]
        )
        return [
            Projection((weight,), self._biases(own), label=self.label + part)
            for weight, (part, own) in zip(weights, matrices.items(), strict=True)
        ], frames

    def _whole(self, names: Sequence[str]) -> list[tuple[str, Range]]:
        """Return the full names of matrices, each with all of its rows."""
        return [(self.prefix + name, (0, self._num_rows(name))) for name in names]

    def _biases(self, matrices: Sequence[tuple[str, Range]]) -> Tensor | None:
        """Return the biases of rows of matrices, one after another, or None if they have none."""
        own = [(f"{name}.bias", rows) for name, rows in matrices if f"{name}.bias" in self.expected]
        biases = [dense(self.weights[name]).float()[slice(*rows)] for name, rows in own]
        return torch.cat(biases) if biases else None

    def table(self, name: str) -> Weight:
        """Return a matrix of which a step reads its tokens' rows, in the file's type.

        It stays in its file, or is in the device's memory if the backend does not read files.
        """
        if not self.backend.reads_files:
            return self.projection(name, label="table").parts[0]
        weight = self.weights[f"{name}.weight"]
        assert isinstance(weight, UnreadWeight)
        return weight

    def norm(self, name: str, scale: float = 1.0, eps: float | None = None) -> Norm:
        """Return a norm, with a bias if the architecture has one for it; without a weight, with ones."""
        network = self.network
        bias = self.vector(f"{name}.bias") * scale if f"{self.prefix}{name}.bias" in self.expected else None
        is_weighted = f"{self.prefix}{name}.weight" in self.expected
        weight = (
            self.vector(f"{name}.weight")
            if is_weighted
            else torch.ones(network.hidden_size, device=self.backend.device)
        )
        return Norm(weight * scale, network.norm_eps if eps is None else eps, bias, network.norms.are_centred)

    def vector(self, name: str) -> Tensor:
        return dense(self.weights[self.prefix + name]).to(self.backend.device, torch.float32)

    def xielu_curve(self, name: str) -> Float[Tensor, "4"]:
        """Return the four values with which xIELU is computed. Files have a and b − c in the form log(e^x − 1)."""
        rising, falling, slope, most = (self.vector(f"{name}.{each}") for each in XIELU)
        return torch.cat([softplus(rising), slope + softplus(falling), slope, most])

    def projection(
        self, *names: str, label: str, ranges: Sequence[Range] | None = None, is_stack: bool = False
    ) -> Projection:
        """Return the prepared matrices, stacked.

        `label` names them in profiles. `ranges` has the rows to use of each matrix; None means all rows.
        """
        matrices = self._whole(names)
        if ranges is not None:
            given = zip(matrices, ranges, strict=True)
            matrices = [(name, rows) for (name, _), rows in given if rows[0] < rows[1]]
        parts = tuple(self._weight(name, rows) for name, rows in matrices)
        whole = Projection(parts, self._biases(matrices), label=self.label + label, is_stack=is_stack)
        try:
            with ops.using(self.backend):
                prepared = ops.prepare(whole, self.backend.device, self.precision)
                return self._observed(prepared, [f"{name}.weight" for name, _ in matrices])
        except (MemoryError, OSError, torch.OutOfMemoryError) as error:
            if isinstance(error, OSError) and error.errno != errno.ENOMEM:
                raise
            num_bytes = sum(part.num_bytes for part in parts)
            raise ModelError(
                f"no memory is left for the {num_bytes} bytes of {', '.join(self.prefix + name for name in names)}"
            ) from error

    def _observed(self, projection: Projection, names: Sequence[str]) -> Projection:
        """Return a projection of a layer. Its parts, which have these names, report their inputs if requested."""
        if self.on_input is None or not self.prefix:
            return projection
        parts = list[Weight]()
        for part, name in zip(projection.parts, names, strict=True):
            assert isinstance(part, StoredWeight)
            parts.append(ObservedWeight(part, partial(self.on_input, name)))
        return replace(projection, parts=tuple(parts))

    def _num_rows(self, name: str) -> int:
        return self.expected[f"{self.prefix}{name}.weight"][0]

    def _weight(self, name: str, rows: Range) -> FileWeight | ConvertedWeight:
        weight, kind = rows_of(self.weights[f"{name}.weight"], rows), self.types[f"{name}.weight"]
        if weight.type == kind:
            return weight
        if (dtype := DTYPES.get(kind)) is not None:
            return ConvertedWeight(weight, kind, lambda rows: dense(rows).to(dtype))
        return ConvertedWeight(weight, kind, lambda rows: quantise(dense(rows), kind))


def dense(weight: FileWeight) -> Float[Tensor, "..."]:
    """Return the values of a tensor, in its file's float type or in float32."""
    return weight.data if BLOCK_TYPES[weight.type].is_float else dequantize(weight.data, weight.type)
