"""The part of a model that each rank of a group runs: rows of each matrix, and heads with their keys."""

from itertools import accumulate, pairwise

from infer.compute.operands.architecture import Architecture
from infer.compute.operands.feed_forwards import Experts
from infer.compute.operands.mixers import Attention
from infer.compute.operands.weights import FileWeight, StoredWeight, UnreadWeight
from infer.errors import InvalidRequestError

_ROWS = 16  # rows that kernels multiply together
_BLOCK = 32  # columns that kernels quantise together

Range = tuple[int, int]


def row_starts(num_rows: int, num_ranks: int, *, are_blocks: bool = False) -> tuple[int, ...]:
    """Return the first row of each rank, and the end of the last rank.

    Ranks get whole tiles, or whole blocks with `are_blocks`, if there are enough rows.
    """
    units = (_BLOCK, _ROWS, 1) if are_blocks else (_ROWS, 1)
    unit = next(unit for unit in units if num_rows >= unit * num_ranks or unit == 1)
    return *(num_rows // unit * rank // num_ranks * unit for rank in range(num_ranks)), num_rows


def head_starts(attention: Attention, num_ranks: int) -> tuple[int, ...] | None:
    """Return the first query head of each rank, and the end of the last rank.

    A rank gets whole key heads with all their queries, or some queries of one key head. Returns None if every rank must
    have all heads: because q and k are normalised over all heads together, each head has a norm of its own, or there
    are too few heads.
    """
    num_kv_heads, group = attention.num_kv_heads, attention.num_heads // attention.num_kv_heads
    if attention.qk_norm in ("all", "head_centred"):
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


def kv_heads_of(attention: Attention, heads: Range) -> Range:
    """Return the range of key and value heads that a range of query heads reads."""
    group = attention.num_heads // attention.num_kv_heads
    return heads[0] // group, -(-heads[1] // group)


def check_experts(architecture: Architecture, num_ranks: int) -> None:
    """Raise InvalidRequestError if a rank would get less than one group of rows of each expert's matrices."""
    for layer in architecture.layers:
        if isinstance(layer.feed_forward, Experts):
            rows = min(layer.feed_forward.intermediate_size, architecture.hidden_size)
            if rows < _ROWS * num_ranks:
                raise InvalidRequestError(
                    f"tensor_parallel={num_ranks} gives a rank fewer than {_ROWS} of an expert's {rows} rows: "
                    f"use at most {max(1, rows // _ROWS)}"
                )


def check_even_heads(architecture: Architecture, num_ranks: int) -> None:
    """Raise InvalidRequestError if ranks would get different numbers of heads, as GPUs cannot."""
    for attention in set(architecture.attention):
        starts = head_starts(attention, num_ranks)
        if starts is not None and len({end - start for start, end in pairwise(starts)}) > 1:
            raise InvalidRequestError(
                f"{num_ranks} GPUs cannot have equal shares of {attention.num_heads} heads with "
                f"{attention.num_kv_heads} heads of keys: use a number of GPUs that divides both"
            )


def part_ranges(counts: tuple[int, ...], rows: Range) -> list[Range]:
    """Return the rows of each of several stacked matrices that are in a range of the stack's rows.

    `counts` has the number of rows of each matrix.
    """
    starts = accumulate(counts, initial=0)
    return [
        (min(max(rows[0] - start, 0), count), min(max(rows[1] - start, 0), count))
        for start, count in zip(starts, counts, strict=False)
    ]


def rows_of(weight: FileWeight, rows: Range) -> FileWeight:
    """Return a range of a matrix's rows, which is read only when it is used."""
    first, end = rows
    if rows == (0, weight.shape[0]):
        return weight
    if isinstance(weight, StoredWeight):
        return weight.rows(first, end)
    read = weight.read
    return UnreadWeight(
        weight.type, (end - first, weight.in_features), lambda low, high: read(first + low, first + high)
    )
