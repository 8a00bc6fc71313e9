"""A few processes of one program. A tenant with a name leaves one of them to the others, so that they need not wait."""

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, final

from infer.system.processes.child_process import Child

MOST_PROCESSES = 3

_tenant = ContextVar("tenant", default="")


@contextmanager
def asking_for(tenant: str) -> Iterator[None]:
    """Mark the questions of this thread or task within the context, and its calls of an engine, as a tenant's."""
    token = _tenant.set(tenant)
    try:
        yield
    finally:
        _tenant.reset(token)


def asking_tenant() -> str:
    """Return the tenant of this context, or an empty text."""
    return _tenant.get()


@final
class Lane:
    """Processes that any thread may ask. They start when needed, or at `start`; a fork of this process has its own."""

    def __init__(self, program: Path, *arguments: str) -> None:
        self._free = [Child(program, *arguments) for _ in range(MOST_PROCESSES)]
        self._children = tuple(self._free)
        self._asking = list[str]()  # the tenant of each question that is being answered
        self._changed = threading.Condition()
        lane = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(lane))

    def start(self) -> None:
        """Let the first process start while the caller continues."""
        self._children[-1].start()

    def ask(self, question: Any, seconds: float) -> Any:
        """Return the answer of a process, which gets the question when it is free. Raises the errors of `Child.ask`."""
        tenant = asking_tenant()
        with self._changed:
            self._changed.wait_for(lambda: self._may_ask(tenant))
            self._asking.append(tenant)
            child, changed = self._free.pop(), self._changed
        try:
            return child.ask(question, seconds)
        finally:
            with changed:
                if changed is self._changed:  # there was no fork meanwhile
                    self._asking.remove(tenant)
                    self._free.append(child)
                    changed.notify_all()

    def _may_ask(self, tenant: str) -> bool:
        """Return True if a process is free, and another one remains free if a named tenant already asks."""
        return len(self._free) > bool(tenant and tenant in self._asking)

    def forget(self) -> None:
        """Reset the lane in a fork, where no thread is asking, whatever the parent's threads did."""
        self._changed, self._asking = threading.Condition(), []
        self._free = list(self._children)


def _forget(lane: "weakref.ref[Lane]") -> None:
    if (found := lane()) is not None:
        found.forget()
