"""One row as tensors by name: the content stored in each layer, and the row's rules of visibility as `states`.

Only slots that a next token attends to are included.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from infer.compute.kvcache.page_memory import PageMemory
from infer.compute.kvcache.page_rows import GroupRows, RowState
from infer.errors import InvalidRequestError

_STATES = "states"


class SavedGroup(NamedTuple):
    """Saved state of a row in the layers of one group."""

    state: RowState
    slots: Sequence[int]  # in the order in which they are stored


def saved_tensors(
    groups: Sequence[GroupRows], memory: PageMemory, row: int, first: int, length: int
) -> Iterator[tuple[str, Shaped[Tensor, "kv_heads slots *size"]]]:
    """Yield copies of everything that is visible from positions `first` to `length`, a few tensors at a time."""
    states = [rows.state(row).cut(rows.slot_of(row, first), rows.state_tokens) for rows in groups]
    yield _STATES, torch.tensor(states, dtype=torch.int64)
    for rows, state in zip(groups, states, strict=True):
        slots = state.seen_from(max(first - state.shift, state.first), length - state.shift, rows.state_tokens)
        where = memory.place(rows, row, torch.tensor(slots, dtype=torch.int64))
        memory.to_host(rows, sorted(set(where[0].tolist())))
        for name, part in memory.parts(rows):
            yield name, part[:, *where]
        pages = _pages_of(rows, row, slots)
        for name, kept in memory.states(rows):
            yield name, kept[pages]


def check_saved(
    groups: Sequence[GroupRows], memory: PageMemory, tensors: Mapping[str, Tensor], length: int
) -> list[SavedGroup]:
    """Return the saved groups of a row of `length` tokens.

    Raises InvalidRequestError if the tensors do not match such a row.
    """
    states = _states(groups, tensors, length)
    saved = [
        SavedGroup(state, state.seen_from(state.first, length, rows.state_tokens))
        for rows, state in zip(groups, states, strict=True)
    ]
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items() if name != _STATES}
    expected = {
        name: (part.dtype, (len(part), len(group.slots), *part.shape[4:]))
        for rows, group in zip(groups, saved, strict=True)
        for name, part in memory.parts(rows)
    }
    expected |= {
        name: (states.dtype, (len(rows.table.indices(group.slots)), *states.shape[1:]))
        for rows, group in zip(groups, saved, strict=True)
        for name, states in memory.states(rows)
    }
    wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    if wrong:
        raise _unlike(length, f"{wrong[0]!r:.80}")
    return saved


def _states(groups: Sequence[GroupRows], tensors: Mapping[str, Tensor], length: int) -> list[RowState]:
    tensor = tensors.get(_STATES)
    if tensor is None or tensor.dtype != torch.int64 or tensor.shape != (len(groups), len(RowState._fields)):
        raise _unlike(length, repr(_STATES))
    states = [RowState(*values) for values in tensor.tolist()]
    for rows, state in zip(groups, states, strict=True):
        # A row that was saved while memory was short sees only a window.
        known = [rows.state_from_start(is_short=is_short) for is_short in (False, True)]
        if (
            state._replace(first=0) not in known
            or not 0 <= state.first <= length
            or len(rows.table.indices(state.seen_from(state.first, length, rows.state_tokens)))
            > rows.group.pages_per_row
        ):
            raise _unlike(length, str(state))
    return states


def _unlike(length: int, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"the cache of {length} tokens does not fit this model's cache: {what}")


def load_tensors(
    groups: Sequence[GroupRows],
    memory: PageMemory,
    row: int,
    saved: Sequence[SavedGroup],
    tensors: Mapping[str, Tensor],
) -> None:
    """Copy the tensors into the pages that the row holds for these slots."""
    for rows, group in zip(groups, saved, strict=True):
        where = memory.place(rows, row, torch.tensor(group.slots, dtype=torch.int64))
        pages = sorted(set(where[0].tolist()))
        memory.clear_pages(rows, pages)  # kernels read whole blocks and multiply invisible slots by 0
        for name, part in memory.parts(rows):
            part[:, *where] = tensors[name].to(part.device)
        for name, states in memory.states(rows):
            states[_pages_of(rows, row, group.slots)] = tensors[name].to(states.device)
        memory.to_device(rows, pages)


def _pages_of(rows: GroupRows, row: int, slots: Sequence[int]) -> Int64[Tensor, "pages"]:
    """Return the pages that contain a row's slots, in the order of the text."""
    return torch.from_numpy(rows.table.table[row][rows.table.indices(slots)])
