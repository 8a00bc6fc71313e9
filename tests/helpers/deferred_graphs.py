"""Graphs whose work is deferred, as on a device that is always busy: it runs only when the host waits for it.

The host sees a copy after it has waited for an event that was recorded behind the copy. Until then it reads wrong
values. If the host overwrites a mirror too early, wrong values are sent to the device.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Self, final

import pytest
import torch
from torch import Tensor

from infer.compute.backends.cuda.graphs import Event, Graphs, Recording
from infer.compute.kvcache import page_memory
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.history import History

_NONSENSE = 1 << 40


class _Submitted(NamedTuple):
    number: int
    work: Callable[[], object]


class _Hidden(NamedTuple):
    number: int
    mirror: Tensor
    content: Tensor


@final
class DeferredGraphs(Graphs):
    def __init__(self) -> None:
        self._num_submitted = 0
        self._waiting = deque[_Submitted]()
        self._hidden = deque[_Hidden]()
        self._mirrors = dict[int, Tensor]()  # by the address of their memory

    @property
    def num_waiting(self) -> int:
        """Number of pieces of work that were submitted and have not run."""
        return len(self._waiting)

    def submit(self, work: Callable[[], object]) -> None:
        self._num_submitted += 1
        self._waiting.append(_Submitted(self._num_submitted, work))

    def copy(self, target: Tensor, source: Tensor) -> None:
        is_result = target.untyped_storage().data_ptr() in self._mirrors
        self.submit(partial(self._hide, self._num_submitted + 1, target, source) if is_result else
                    partial(target.copy_, source))  # fmt: skip

    def _hide(self, number: int, mirror: Tensor, source: Tensor) -> None:
        self._hidden.append(_Hidden(number, mirror, source.clone()))
        mirror.fill_(_NONSENSE)

    @torch.inference_mode()
    def run(self, last: int | None = None) -> None:
        """Run the submitted work up to this number."""
        while self._waiting and (last is None or self._waiting[0].number <= last):
            self._waiting.popleft().work()

    def record(self, work: Callable[[], Tensor]) -> Recording:
        self.run()
        result = work()
        return Recording(lambda: self.submit(lambda: result.copy_(work())), result)

    def mirror(self, size: int) -> Tensor:
        mirror = torch.zeros(max(size, 1), dtype=torch.int64)
        self._mirrors[mirror.untyped_storage().data_ptr()] = mirror
        return mirror[:size]

    def event(self) -> Event:
        return _Moment(self)

    def on_device(self) -> AbstractContextManager[None]:
        return nullcontext()

    @torch.inference_mode()
    def wait_until(self, number: int) -> None:
        """Run the submitted work up to this number, and show its results to the host."""
        self.run(number)
        while self._hidden and self._hidden[0].number <= number:
            _, mirror, content = self._hidden.popleft()
            mirror.copy_(content)

    def count_now(self) -> int:
        return self._num_submitted


@final
class _Moment:
    def __init__(self, graphs: DeferredGraphs) -> None:
        self._graphs, self._number = graphs, 0

    def record(self) -> None:
        self._number = self._graphs.count_now()

    def synchronize(self) -> None:
        self._graphs.wait_until(self._number)

    def seconds_since(self, earlier: Self) -> float:
        return 1e-3


def defer(patch: pytest.MonkeyPatch) -> DeferredGraphs:
    """Let recordings for CUDA defer their work. Copies from the host to the device are ordered as in a stream."""
    graphs, select = DeferredGraphs(), SamplingColumns.select

    def in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            graphs.run()
            return function(*arguments, **options)

        return run

    def select_in_turn(columns: SamplingColumns, slots: Any) -> None:
        if tuple(slots) != columns._slots:
            graphs.run()
        select(columns, slots)

    patch.setattr("infer.compute.backends.cuda.backend.Repeats", lambda: graphs)
    patch.setattr(SamplingColumns, "select", select_in_turn)
    of_pages = ((page_memory, "_copy_array"), (page_memory, "_poison_page"), (page_memory.PageMemory, "copy_pages"))
    for owner, name in (*of_pages, (History, "begin"), (History, "extend")):
        patch.setattr(owner, name, in_turn(getattr(owner, name)))
    return graphs
