"""What is open of a model: answers and sessions, which end when the model is closed."""

import weakref
from collections.abc import Callable
from typing import Any, final

from infer.errors import ClosedError
from infer.system.locks import short_lock


@final
class OpenAnswers:
    """For any thread. What is dropped is forgotten."""

    def __init__(self) -> None:
        self._changing = short_lock()  # a signal's handler may close while it is held
        self._end_by_thing: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()
        self.is_closed = False

    def check_open(self) -> None:
        """Raises ClosedError."""
        if self.is_closed:
            raise closed()

    def add(self, thing: Any, end: Callable[[Any], None]) -> None:
        """`end(thing)` is called when the model is closed. Raises ClosedError where it is closed already."""
        with self._changing:
            self.check_open()
            self._end_by_thing[thing] = end

    def close(self) -> None:
        """End all of them, in the order in which they began."""
        with self._changing:
            self.is_closed = True
            things = list(self._end_by_thing.items())
            self._end_by_thing.clear()
        for thing, end in things:
            end(thing)


def closed(what: str = "model") -> ClosedError:
    instead = "load it again, with LLM(...)" if what == "model" else "begin another one"
    return ClosedError(f"the {what} is closed: {instead}")
