"""`prepare`: stored weights → packed ones, once at load, on all threads. Values never change."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Literal

import numpy as np
import torch

from infer.errors import InvalidRequestError
from infer.kernels.cpu.compiled import compiled_address
from infer.kernels.cpu.layouts import LANES, LAYOUTS, PackedWeight, allocate
from infer.kernels.cpu.records import PACK
from infer.kernels.cpu.state import STATE
from infer.kernels.cpu.table import NO_BARRIER, Command, DispatchTable, Walk
from infer.kernels.cpu.threads import aligned, team
from infer.weights import Projection, StoredWeight

Precision = Literal["exact", "fast"]
PLANES: dict[str, int] = {"exact": 2, "fast": 1}


def prepare(
    projection: Projection,
    device: torch.device,
    precision: Precision = "exact",
    progress: Callable[[int], None] | None = None,
) -> Projection:
    """Packed parts; neighbours of one type become one. `progress` is told the stored bytes of each part when packed.

    precision: `exact` multiplies with activations of 16 bits, `fast` of 8. Float weights take float activations.
    """
    if precision not in PLANES:
        raise InvalidRequestError(f"precision must be exact or fast, got {precision!r}")
    stored = [part for part in projection.parts if isinstance(part, StoredWeight)]
    assert len(stored) == len(projection.parts)
    parts = []
    for _, neighbours in groupby(enumerate(stored), key=_merge_key):
        weights = [weight for _, weight in neighbours]
        parts.append(_pack(weights, PLANES[precision]))
        if progress is not None:
            progress(sum(weight.num_bytes for weight in weights))
    bias = None if projection.bias is None else projection.bias.float().contiguous()
    return Projection(tuple(parts), bias)


def _merge_key(indexed: tuple[int, StoredWeight]) -> tuple[str, int]:
    index, weight = indexed
    return weight.type, -1 if weight.out_features % LANES == 0 else index


def _pack(weights: Sequence[StoredWeight], planes: int) -> PackedWeight:
    layout, in_features = LAYOUTS[weights[0].type], weights[0].in_features
    rows = sum(weight.out_features for weight in weights)
    group_bytes = layout.group_bytes(in_features)
    packed = PackedWeight(layout, (rows, in_features), allocate(-(-rows // LANES) * group_bytes), planes)
    table, group = DispatchTable(), 0
    function = compiled_address(".packing:make_pack", PACK, layout.type)
    for weight in weights:
        source = weight.data.contiguous()
        arguments = np.zeros(1, PACK)
        arguments["source"], arguments["source_row_bytes"] = source.data_ptr(), source.stride(0) * source.element_size()
        arguments["rows"], arguments["in_features"] = weight.shape
        arguments["out"], arguments["group_bytes"] = packed.data_at(group), group_bytes
        table.append([Command(function, arguments, NO_BARRIER, "pack", (source,))])
        group += weight.out_features // LANES
    team().run(Walk(table), aligned(1, STATE))
    return packed
