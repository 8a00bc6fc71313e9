"""Threads that wait for tokens while another thread, their leader, runs the steps."""

from _thread import LockType, allocate_lock
from collections import deque
from threading import get_ident
from typing import final

_NOBODY = 0  # no thread has this number
_MAX_WAIT_SECONDS = 1.0  # a signal's exception may have kept a leader from telling that it has ended


@final
class Followers:
    """For any thread. Without a leader whoever waits runs the next step, and leads meanwhile."""

    def __init__(self) -> None:
        self._leader = _NOBODY
        self._gates = deque[LockType]()  # one for each that waits

    def wait(self) -> bool:
        """Until the leader's step has ended; False at once where nobody leads, or this thread does."""
        if self._leader in (_NOBODY, get_ident()):
            return False
        gate = allocate_lock()
        gate.acquire()
        self._gates.append(gate)
        if self._leader == _NOBODY:  # it may have released all before this one came
            return False
        return gate.acquire(timeout=_MAX_WAIT_SECONDS)

    def lead(self) -> None:
        """This thread runs the next step."""
        self._leader = get_ident()

    def release(self) -> None:
        """A step has ended."""
        while self._gates:
            self._gates.popleft().release()

    def resign(self) -> None:
        """This thread leads no more."""
        if self._leader == get_ident():
            self._leader = _NOBODY
        self.release()

    def forget_parent(self) -> None:
        """In a forked child, where the leader does not exist."""
        self._leader = _NOBODY
        self._gates.clear()
