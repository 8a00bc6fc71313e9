"""The parameters of the selected rows, at addresses that never change. Recordings read them there.

When sequences join or leave, only the contents change. So a recording is made for stages and sizes, never for rows.
"""

from typing import final

import torch
from torch import Tensor

from infer.compute.backends.cuda.graphs import Graphs
from infer.compute.backends.cuda.sampling.kernel_arguments import NUM_FIELDS, ParameterLists, make_fields, unused_line
from infer.compute.sampling.columns import SamplingColumns
from infer.errors import InvalidRequestError

_LEAST_ENTRIES, _LEAST_MASKS = 256, 8  # of a list; longer ones take their next power of 2


@final
class SelectedRows:
    """Lines of the rows, followed by lines of padding: the last line is always padding.

    `lists` has other tensors after a selection whose lists did not fit.
    """

    def __init__(self, max_rows: int, device: torch.device, graphs: Graphs) -> None:
        self._max_rows, self._graphs, self._copied = max_rows, graphs, graphs.event()
        shape = max_rows + 1, NUM_FIELDS.value
        self._mirror = graphs.mirror(shape[0] * shape[1])
        self._words = self._mirror.numpy().reshape(shape)
        self.fields = torch.zeros(shape, dtype=torch.int64, device=device)
        self.lists = ParameterLists(
            bias_ids=torch.zeros(_LEAST_ENTRIES, dtype=torch.int64, device=device),
            biases=torch.zeros(_LEAST_ENTRIES, dtype=torch.float64, device=device),
            end_ids=torch.zeros(_LEAST_ENTRIES, dtype=torch.int64, device=device),
            masks=torch.zeros(0, 0, dtype=torch.int32, device=device),
        )
        self._selection: object = None

    def fill(self, columns: SamplingColumns) -> None:
        """Copy the rows as they are selected now, in the order of the device's work."""
        if columns.selection is self._selection:
            return
        if len(columns) > self._max_rows:
            raise InvalidRequestError(f"at most {self._max_rows} rows are sampled in one step, got {len(columns)}")
        self._copied.synchronize()  # what was copied last: the mirror is free
        self._words[: len(columns)], self._words[len(columns) :] = make_fields(columns), unused_line()
        self._graphs.copy(self.fields.view(-1), self._mirror)
        self._copied.record()
        given = ParameterLists.of(columns)
        self.lists = ParameterLists(*(_with_room(mine, each) for mine, each in zip(self.lists, given, strict=True)))
        for mine, each in zip(self.lists, given, strict=True):
            if len(each):
                self._graphs.copy(mine[: len(each)], each)
        self._selection = columns.selection


def _with_room(mine: Tensor, given: Tensor) -> Tensor:
    """Return `mine` if it has room for the entries of `given`, or a larger tensor. Its contents do not count."""
    if len(given) <= len(mine) and given.shape[1:] == mine.shape[1:]:
        return mine
    room = max(_LEAST_MASKS, 1 << (len(given) - 1).bit_length() if len(given) else 0)
    return torch.zeros(room, *given.shape[1:], dtype=mine.dtype, device=mine.device)
