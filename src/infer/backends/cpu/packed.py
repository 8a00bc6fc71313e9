"""`prepare`: stored weights → packed ones, once at load, on all threads. Values never change.

A weight is read some rows at a time, so that what is there beside the packed weights is small.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Literal

import numpy as np
import torch

from infer.backends.cpu.compiled import compiled_address
from infer.backends.cpu.layouts import LANES, LAYOUTS, PLANES
from infer.backends.cpu.packed_weight import PackedWeight, allocate
from infer.backends.cpu.records import PACK
from infer.backends.cpu.state import STATE
from infer.backends.cpu.table import NO_BARRIER, Command, DispatchTable, Walk
from infer.backends.cpu.threads import aligned, team
from infer.errors import InvalidRequestError
from infer.operands.weights import ConvertedWeight, Projection, StoredWeight, UnreadWeight

Source = StoredWeight | UnreadWeight | ConvertedWeight
Precision = Literal["exact", "fast"]
_BYTES_AT_ONCE = 4 << 20


def prepare(projection: Projection, device: torch.device, precision: Precision = "exact") -> Projection:
    """Packed parts; neighbours of one type become one.

    precision: `exact` multiplies with activations of 16 bits, `fast` of 8. Float weights take float activations.
    """
    if precision not in PLANES:
        raise InvalidRequestError(f"precision must be exact or fast, got {precision!r}")
    sources = [part for part in projection.parts if isinstance(part, Source)]
    assert len(sources) == len(projection.parts)
    parts = []
    for _, neighbours in groupby(enumerate(sources), key=_merge_key):
        parts.append(_pack([weight for _, weight in neighbours], PLANES[precision]))
    bias = None if projection.bias is None else projection.bias.float().contiguous()
    return Projection(tuple(parts), bias)


def _merge_key(indexed: tuple[int, Source]) -> tuple[str, int]:
    index, weight = indexed
    return weight.type, -1 if weight.out_features % LANES == 0 else index


def _pack(weights: Sequence[Source], planes: int) -> PackedWeight:
    layout, in_features = LAYOUTS[weights[0].type], weights[0].in_features
    rows = sum(weight.out_features for weight in weights)
    content = allocate(-(-rows // LANES) * layout.group_bytes(in_features))
    packed = PackedWeight(layout, (rows, in_features), content, planes)
    group, num_bytes, table = 0, 0, DispatchTable()
    for weight in weights:
        at_once = max(1, _BYTES_AT_ONCE // (LANES * weight.row_bytes)) * LANES
        for first in range(0, weight.out_features, at_once):
            part = weight.rows(first, min(first + at_once, weight.out_features))
            table.append([_command(part, packed, group + first // LANES)])
            num_bytes += part.out_features * weight.row_bytes
            if num_bytes >= _BYTES_AT_ONCE:
                _walk(table)
                num_bytes, table = 0, DispatchTable()
        group += weight.out_features // LANES
    _walk(table)
    return packed


def _command(part: StoredWeight, packed: PackedWeight, group: int) -> Command:
    source = part.data.contiguous()
    arguments = np.zeros(1, PACK)
    arguments["source"], arguments["source_row_bytes"] = source.data_ptr(), source.stride(0) * source.element_size()
    arguments["rows"], arguments["in_features"] = part.shape
    arguments["out"], arguments["group_bytes"] = packed.data_at(group), packed.group_bytes
    function = compiled_address(".packing:make_pack", PACK, packed.layout.type)
    return Command(function, arguments, NO_BARRIER, "pack", (source,))


def _walk(table: DispatchTable) -> None:
    team().run(Walk(table), aligned(1, STATE))
