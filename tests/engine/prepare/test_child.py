"""A helper process that dies, stops or is forked: a question is refused only if the process died twice with it."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infer.system.processes.child_process import Child, ChildError

PROGRAM = """
import json, os, signal, sys
print('""', flush=True)
for line in sys.stdin:
    question = json.loads(line)
    if isinstance(question, dict):
        if not os.path.exists(question["unless"]):
            open(question["unless"], "w").close()
            os.kill(os.getpid(), question["signal"])
        question = "again"
    print(json.dumps(question), flush=True)
    while question == "deaf":
        signal.pause()
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    (tmp_path / "program.py").write_text(PROGRAM)
    child = Child(tmp_path / "program.py")
    yield child
    child.close()


def pid_of(child: Child) -> int:
    return child._process.pid


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_process_that_died_while_idle_is_started_again_and_asked(child: Child, how: signal.Signals) -> None:
    assert child.ask("a", 60.0) == "a"
    first = pid_of(child)
    os.kill(first, how)
    assert child.ask("b", 60.0) == "b"
    assert pid_of(child) != first


def test_a_process_that_dies_once_over_a_question_is_asked_again(child: Child, tmp_path: Path) -> None:
    assert child.ask({"unless": str(tmp_path / "asked"), "signal": signal.SIGKILL}, 60.0) == "again"


def test_a_question_with_which_a_process_dies_twice_is_blamed(child: Child, tmp_path: Path) -> None:
    with pytest.raises(ChildError) as caught:  # it cannot write, so Python ends without a signal
        child.ask({"unless": str(tmp_path / "no folder" / "asked"), "signal": signal.SIGKILL}, 60.0)
    assert (caught.value.signal, child.ask("next", 60.0)) == (None, "next")


def test_its_own_time_limit_is_blamed_immediately(child: Child, tmp_path: Path) -> None:
    with pytest.raises(ChildError) as caught:
        child.ask({"unless": str(tmp_path / "asked"), "signal": signal.SIGPROF}, 60.0)
    assert caught.value.signal == signal.SIGPROF


def test_a_stopped_process_goes_on_when_it_is_asked(child: Child) -> None:
    assert child.ask("a", 60.0) == "a"
    first = pid_of(child)
    os.kill(first, signal.SIGSTOP)
    assert (child.ask("b" * 10**6, 60.0), pid_of(child)) == ("b" * 10**6, first)


def test_a_process_that_stops_reading_delays_no_other(child: Child) -> None:
    """The question is larger than a pipe's buffer. Writing it has the same time limit as the answer."""
    assert child.ask("deaf", 60.0) == "deaf"
    with pytest.raises(TimeoutError):
        child.ask("b" * 10**6, 0.2)
    assert child.ask("c", 60.0) == "c"


def test_a_fork_asks_its_own_process_although_the_lock_was_held(child: Child) -> None:
    child.ask("a", 60.0)
    first = pid_of(child)
    with ThreadPoolExecutor(1) as holder:
        holder.submit(child._lock.acquire).result()
        pipe = child._process.stdin.fileno()
        forked = os.fork()
        if forked == 0:
            signal.alarm(60)
            shares_pipe = os.path.exists(f"/proc/self/fd/{pipe}")
            os._exit(shares_pipe or child.ask("b", 60.0) != "b" or pid_of(child) == first)
        status = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
        holder.submit(child._lock.release).result()
    assert (status, child.ask("c", 60.0), pid_of(child)) == (0, "c", first)
