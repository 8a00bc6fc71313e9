"""`prepare`: stored weights → packed ones, once at load, on all threads. Values never change.

A thread packs the rows that will be its share of the products, so that they are in its node of memory. A weight is read
some rows at a time, so that little memory is used beside the packed weights.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Literal

import numpy as np
import torch

from infer.compute.backends.cpu.compile.addresses import compiled_address
from infer.compute.backends.cpu.isa import instruction_set
from infer.compute.backends.cpu.layouts import LANES, LAYOUTS, PLANES
from infer.compute.backends.cpu.records import PACK
from infer.compute.backends.cpu.thread_records import STATE
from infer.compute.backends.cpu.threads.dispatch_table import NO_BARRIER, Command, DispatchTable
from infer.compute.backends.cpu.threads.pool import aligned, thread_pool
from infer.compute.backends.cpu.weights.packed_weight import PackedWeight, allocate
from infer.compute.backends.cpu.workspace import merged
from infer.compute.operands.weights import ConvertedWeight, Projection, StoredWeight, UnreadWeight
from infer.errors import InvalidRequestError

Source = StoredWeight | UnreadWeight | ConvertedWeight
Precision = Literal["exact", "fast"]
_BYTES_AT_ONCE = 4 << 20


def prepare(projection: Projection, device: torch.device, precision: Precision = "exact") -> Projection:
    """Return the projection with packed parts. Neighbours of one type become one part, and a stack becomes one.

    precision: `exact` multiplies with activations of 16 bits, `fast` of 8. Float weights take float activations. Raises
    InvalidRequestError for another precision.
    """
    if precision not in PLANES:
        raise InvalidRequestError(f"precision must be exact or fast, got {precision!r}")
    sources = [part for part in projection.parts if isinstance(part, Source)]
    assert len(sources) == len(projection.parts)
    rows = [0 if projection.is_stack else part.out_features for part in sources]  # experts are padded
    together = merged([part.type for part in sources], rows)
    parts = (_pack([sources[index] for index in indices], PLANES[precision]) for indices in together)
    bias = None if projection.bias is None else projection.bias.float().contiguous()
    return replace(projection, parts=tuple(parts), bias=bias)


def _pack(weights: Sequence[Source], planes: int) -> PackedWeight:
    layout, in_features = LAYOUTS[weights[0].type], weights[0].in_features
    rows = sum(weight.out_features for weight in weights)
    num_groups = sum(-(-weight.out_features // LANES) for weight in weights)
    content = allocate(num_groups * layout.group_bytes(in_features))
    packed = PackedWeight(layout, (rows, in_features), content, planes)
    if len(weights) == 2:  # gate and up: a thread has a share of each
        first, second = weights
        pack_into([first], packed, 0)
        pack_into([second], packed, -(-first.out_features // LANES))
    else:
        pack_into(weights, packed, 0)
    return packed


def pack_into(weights: Sequence[Source], packed: PackedWeight, group: int) -> None:
    """Pack weights one after another into `packed`, from group `group` on, on all threads.

    Each thread packs the groups that will be its share of the products, some of them per round. So little memory is
    used beside the packed weight.
    """
    starts = list(accumulate((-(-weight.out_features // LANES) for weight in weights), initial=group))
    num_groups, num_threads = starts[-1] - group, thread_pool().num_threads
    num_rounds = -(-num_groups * LANES * weights[0].row_bytes // _BYTES_AT_ONCE)
    for index in range(num_rounds):
        commands = list[Command]()
        for thread in range(num_threads):
            first, end = (num_groups * share // num_threads for share in (thread, thread + 1))
            begin, stop = (group + first + (end - first) * part // num_rounds for part in (index, index + 1))
            for weight, start in zip(weights, starts, strict=False):
                low, high = (LANES * (at - start) for at in (begin, stop))
                low, high = max(low, 0), min(high, weight.out_features)
                if low < high:
                    commands.append(_command(weight.rows(low, high), packed, start + low // LANES, thread))
        thread_pool().run(DispatchTable(commands), aligned(1, STATE))


def _command(part: StoredWeight, packed: PackedWeight, group: int, thread: int) -> Command:
    source = part.data.contiguous()
    arguments = np.zeros(1, PACK)
    arguments["source"], arguments["source_row_bytes"] = source.data_ptr(), source.stride(0) * source.element_size()
    arguments["rows"], arguments["in_features"] = part.shape
    arguments["thread"] = thread
    arguments["out"], arguments["group_bytes"] = packed.data_at(group), packed.group_bytes
    function = compiled_address(".weights.pack_kernels:make_pack", PACK, packed.layout.type, instruction_set().inputs)
    return Command(function, arguments, NO_BARRIER, "pack", (source,))
