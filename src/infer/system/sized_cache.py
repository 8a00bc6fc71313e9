"""A cache of the most recently used values, limited in bytes."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar, final

_Value = TypeVar("_Value")


@final
class SizedCache(Generic[_Value]):
    """Keeps the most recently used values, up to `most_bytes` in total.

    `get_or_make` is for any thread. A caller of `get` and `put` must hold its own lock.
    """

    def __init__(self, most_bytes: int) -> None:
        self._lock = threading.RLock()  # guards the attributes below, for `get_or_make`
        self._most_bytes, self._num_bytes = most_bytes, 0
        self._kept: OrderedDict[Hashable, tuple[_Value, int]] = OrderedDict()

    def get_or_make(self, key: Hashable, make: Callable[[], _Value], size: Callable[[_Value], int]) -> _Value:
        """Return the value of a key. Make it if it is not cached. Other threads can use the cache meanwhile.

        `size` returns the number of bytes of a value.
        """
        with self._lock:
            found = self.get(key)
        if found is None:
            found = make()
            with self._lock:
                self.put(key, found, size(found))
        return found

    def get(self, key: Hashable) -> _Value | None:
        found = self._kept.get(key)
        if found is None:
            return None
        self._kept.move_to_end(key)
        return found[0]

    def put(self, key: Hashable, value: _Value, num_bytes: int) -> None:
        """Cache a value of `num_bytes` bytes. A value larger than `most_bytes` is not cached."""
        self._drop(key)
        if num_bytes > self._most_bytes:
            return
        self._kept[key] = value, num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._most_bytes:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: Hashable) -> None:
        _, num_bytes = self._kept.pop(key, (None, 0))
        self._num_bytes -= num_bytes
