"""Locks that a signal's exception and a fork leave right."""

import os
import threading
from types import FunctionType

import pytest

from infer.system.locks import long_lock, short_lock


@pytest.mark.parametrize("make", [short_lock, long_lock])
def test_no_python_runs_between_with_and_the_lock(make: type) -> None:
    """An exception at the first line of a Python `__exit__` would leave the lock taken for ever."""
    lock = type(make())
    for name in ("__enter__", "__exit__", "acquire", "release"):
        assert not isinstance(getattr(lock, name), FunctionType)


def in_child(check: object) -> int:
    """The exit status of a fork that ends with what `check` returns."""
    process = os.fork()
    if process == 0:
        os._exit(0 if check() else 1)  # type: ignore[operator]
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="hardware: a system that forks")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_finds_long_locks_free_unless_its_own_thread_holds_them() -> None:
    others, own, taken, may_go = long_lock(), long_lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with others:
            taken.set()
            may_go.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(30)
    try:
        with own:
            assert in_child(lambda: others.acquire(blocking=False)) == 0
            assert in_child(lambda: own._is_owned()) == 0  # type: ignore[attr-defined]
            assert not others.acquire(blocking=False), "it is free in the child alone"
    finally:
        may_go.set()
        thread.join()
