"""The cache of a session: a leased slot, and the ids whose keys and values are stored there.

The engine may take the slot away, or lose its content. Then `token_ids` is empty, and the prompt is computed again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import final

from torch import Tensor

from infer.engine.requests.host import Host
from infer.engine.step.sequence import Lease
from infer.engine.step.slots import keep_common
from infer.engine.texts.token_trace import computing
from infer.errors import InferError

Tensors = Callable[[], Iterator[tuple[str, Tensor]]]
_SLICE_BYTES = 16 << 20  # copied between two steps, which takes about 5 ms


class _TakenAwayError(InferError):
    """Raised if the engine takes away a slot while it is copied."""


@final
class SessionCache:
    """The slot of a session, which is free once its lease is dropped. One call uses it at a time."""

    def __init__(self, host: Host) -> None:
        self.host, self.lease = host, Lease()

    def keep_common(self, token_ids: Sequence[int]) -> int:
        """Keep the prefix that the slot shares with these ids, and return its length."""
        return self.host.change(self.lease, partial(keep_common, self.host.runner.cache, self.lease, token_ids))

    def extend(self, token_ids: Sequence[int]) -> None:
        """Make the slot contain exactly these ids. Missing ids are computed, one chunk between two steps."""
        self.host.loop.call(computing(self.host, token_ids, self.lease)).get()

    def copy_of(self, other: "SessionCache") -> None:
        """Take over the content of another slot. Both share the pages until one of them writes."""
        source = other.lease

        def copy(slot: int) -> None:
            if source.slot is not None:
                self.host.runner.cache.copy_row(slot, source.slot)
                self.lease.token_ids = list(source.token_ids)

        self.host.change(self.lease, copy)

    def export(self, token_ids: Sequence[int], write: Callable[[int, Tensors], None]) -> None:
        """Call `write(number, tensors)` with the keys and values of the first `number` of these ids.

        Steps continue meanwhile. If the engine takes the slot away before everything is written, `write` is called
        again with 0. Each call of `tensors` copies again.
        """
        lease = self.lease

        def keep(slot: int) -> Sequence[int]:
            keep_common(self.host.runner.cache, lease, token_ids, slot)
            # A load chooses the rope factors by the length.
            if self.host.runner.choose_rope(slot, len(lease.token_ids)):
                lease.token_ids = []
            return lease.token_ids

        held = self.host.change(lease, keep)
        if self.host.runner.has_whole_rows:
            with suppress(_TakenAwayError):
                return write(len(held), partial(self._copies, held))
        return write(0, lambda: iter(()))

    def _copies(self, held: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
        """Yield copies of the slot's tensors, one part between two steps. Raises _TakenAwayError."""
        lease, cache = self.lease, self.host.runner.cache
        rows: Iterator[tuple[str, Tensor]] | None = None

        def copy_some(slot: int) -> list[tuple[str, Tensor]]:
            nonlocal rows
            if lease.token_ids is not held:  # the engine replaces the list when it takes the slot away
                raise _TakenAwayError
            if rows is None:
                rows = cache.export_row(slot)
            copies, num_bytes = list[tuple[str, Tensor]](), 0
            while num_bytes < _SLICE_BYTES and (copied := next(rows, None)) is not None:
                copies.append(copied)
                num_bytes += copied[1].nbytes
            return copies

        while copies := self.host.change(lease, copy_some):
            yield from copies

    def load(self, tensors: Mapping[str, Tensor], token_ids: Sequence[int]) -> None:
        """Fill the slot with the tensors exported for these ids, or leave it empty if that is impossible.

        Raises InvalidRequestError if the tensors do not fit; the slot is then unchanged.
        """

        cache, length = self.host.runner.cache, len(token_ids)

        def load(slot: int) -> None:
            if token_ids:
                cache.import_row(slot, tensors, length, is_long=self.host.model.is_long(length))
            else:
                cache.truncate(slot, 0)
            self.lease.token_ids = list(token_ids[: cache.lengths[slot]])

        self.host.change(self.lease, load)
