"""What of a model is whose, where the ranks of a group share it out: rows of each matrix, heads with their keys."""

from itertools import accumulate

from infer.operands.architecture import Layer
from infer.operands.weights import FileWeight, StoredWeight, UnreadWeight

_ROWS = 16  # that kernels multiply at once
_BLOCK = 32  # of what they quantise

Range = tuple[int, int]


def row_starts(num_rows: int, num_ranks: int, *, are_blocks: bool = False) -> tuple[int, ...]:
    """Where each rank's rows begin, and the last one's end: as whole tiles, or blocks, if there are enough."""
    units = (_BLOCK, _ROWS, 1) if are_blocks else (_ROWS, 1)
    unit = next(unit for unit in units if num_rows >= unit * num_ranks or unit == 1)
    return *(num_rows // unit * rank // num_ranks * unit for rank in range(num_ranks)), num_rows


def head_starts(layer: Layer, num_ranks: int) -> tuple[int, ...] | None:
    """Where each rank's query heads begin, and the last one's end: whole heads of keys with all their queries, or of
    one head of keys some queries. None where every rank has all heads: q and k are normalised over all of them
    together, or there are too few.
    """
    num_kv_heads, group = layer.num_kv_heads, layer.num_heads // layer.num_kv_heads
    if layer.qk_norm == "all":
        return None
    if num_ranks <= num_kv_heads:
        return tuple(group * (num_kv_heads * rank // num_ranks) for rank in range(num_ranks + 1))
    counts = []
    for kv_head in range(num_kv_heads):
        first, end = (num_ranks * head // num_kv_heads for head in (kv_head, kv_head + 1))
        if end - first > group:
            return None
        counts += [(group * (rank + 1)) // (end - first) - group * rank // (end - first) for rank in range(end - first)]
    return tuple(accumulate(counts, initial=0))


def kv_heads_of(layer: Layer, heads: Range) -> Range:
    """Those of keys and values that some query heads read."""
    group = layer.num_heads // layer.num_kv_heads
    return heads[0] // group, -(-heads[1] // group)


def part_ranges(counts: tuple[int, ...], rows: Range) -> list[Range]:
    """Of matrices one below the other, with so many rows, the rows of each that lie in a range of all."""
    starts = accumulate(counts, initial=0)
    return [
        (min(max(rows[0] - start, 0), count), min(max(rows[1] - start, 0), count))
        for start, count in zip(starts, counts, strict=False)
    ]


def rows_of(weight: FileWeight, rows: Range) -> FileWeight:
    """A range of a matrix's rows, read when they are asked for."""
    first, end = rows
    if rows == (0, weight.shape[0]):
        return weight
    if isinstance(weight, StoredWeight):
        return weight.rows(first, end)
    read = weight.read
    return UnreadWeight(
        weight.type, (end - first, weight.in_features), lambda low, high: read(first + low, first + high)
    )
