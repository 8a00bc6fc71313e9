"""Locks for a process that may fork at any moment, while another of its threads holds them.

In the child that thread does not exist: what it held would be held for ever, and what it was about to do stays half
done. All are locks of C: a signal's exception comes before `with` has taken one or after it was released, which a
Python method around it could not promise.
"""

import os
import threading
from _thread import RLock
from contextlib import ExitStack
from typing import final
from weakref import WeakSet


def short_lock() -> RLock:
    """Held for moments: a fork waits until it is free, so that the child finds whole what it guards. Whoever holds it
    may take it again.
    """
    lock = threading.RLock()
    _forks.waited_for.add(lock)
    return lock


def long_lock() -> RLock:
    """Held for seconds: a forked child finds it free, unless the thread that forked holds it. What it guards must make
    sense at any moment. Whoever holds it may take it again.
    """
    lock = threading.RLock()
    _forks.renewed.add(lock)
    return lock


@final
class _Forks:
    """What a fork of this process does with its locks."""

    def __init__(self) -> None:
        self.waited_for, self.renewed = WeakSet[RLock](), WeakSet[RLock]()
        self._one_at_a_time = threading.RLock()
        self._held = ExitStack()

    def before(self) -> None:
        self._one_at_a_time.acquire()
        for lock in list(self.waited_for):
            self._held.enter_context(lock)

    def after(self) -> None:
        self._held.close()
        self._one_at_a_time.release()

    def in_child(self) -> None:
        for lock in list(self.renewed):
            if not lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
                lock._at_fork_reinit()  # type: ignore[attr-defined]  # as threading itself does
        self.after()


_forks = _Forks()
os.register_at_fork(before=_forks.before, after_in_parent=_forks.after, after_in_child=_forks.in_child)
