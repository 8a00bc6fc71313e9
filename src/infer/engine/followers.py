"""Threads that wait for tokens while another thread, their leader, runs all steps."""

from _thread import LockType, allocate_lock
from collections import deque
from threading import get_ident
from typing import final

_NOBODY = 0  # no thread has this number


@final
class Followers:
    """For any thread. Without a leader whoever waits runs the next step."""

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
        gate.acquire()
        return True

    def lead(self) -> None:
        """This thread runs all steps from now on, and calls `release` after each."""
        self._leader = get_ident()

    def release(self) -> None:
        """A step has ended."""
        while self._gates:
            self._gates.popleft().release()

    def resign(self) -> None:
        """Nobody leads."""
        self._leader = _NOBODY
        self.release()
