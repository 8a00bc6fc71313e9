"""A program of ours in a process of its own, which may hang, crash or run out of memory in our place.

Question and answer are one line of JSON each. The process is started when first needed and again whenever it has ended,
or where a fork of our process asks.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, final

_START_SECONDS = 120.0  # a machine under load, and libraries that load torch
_PART_BYTES = 1 << 16


class ChildError(Exception):
    """The process ended instead of answering; `signal` says what ended it, if one did."""

    def __init__(self, signal: int | None) -> None:
        self.signal = signal
        super().__init__(f"ended by signal {signal}")


@final
class Child:
    """May be asked from several threads, one at a time.

    A fork of our process starts a process of its own: the pipes of the first are closed there, and it does not wait
    for a lock that another thread held.
    """

    def __init__(self, program: Path, *arguments: str) -> None:
        self._command = [sys.executable, "-P", str(program), *arguments]
        # -P: beside the program lie modules with the names of libraries
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        atexit.register(self.close)
        os.register_at_fork(after_in_child=_unless_gone(weakref.WeakMethod(self._forget)))

    def start(self) -> None:
        """Lets the process start while we do something else."""
        with self._lock:
            self._started()

    def ask(self, question: Any, seconds: float) -> Any:
        """The answer.

        Raises ChildError where the process ends twice over this question, or once by SIGPROF, its own limit of
        processor time; TimeoutError where it needs longer than `seconds`, to read the question too. Then it is gone.
        """
        line = json.dumps(question).encode() + b"\n"
        with self._lock:
            try:
                return self._ask_once(line, seconds)
            except ChildError as error:  # it may have died before it was asked: of memory, or by someone's signal
                if error.signal == signal.SIGPROF:
                    raise
                return self._ask_once(line, seconds)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask_once(self, line: bytes, seconds: float) -> Any:
        process = self._ready()
        deadline = time.monotonic() + seconds
        try:
            _write(process, line, deadline)
            return _answer(process, deadline)
        except (EOFError, BrokenPipeError):
            self.close()
            raise ChildError(-process.returncode if process.returncode < 0 else None) from None
        except BaseException:  # too late, or Ctrl-C: the answer to this question must not meet the next one
            self.close()
            raise

    def _ready(self) -> subprocess.Popen[bytes]:
        """It tells so itself, by an empty answer."""
        process = self._started()
        if not self._is_ready:
            try:
                _answer(process, time.monotonic() + _START_SECONDS)
            except (EOFError, TimeoutError):
                self.close()
                raise RuntimeError(f"{self._command[2]} does not start in a process of its own") from None
            except BaseException:  # Ctrl-C: whether it has told so already is not known
                self.close()
                raise
            self._is_ready = True
        return process

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:  # it died while nobody asked
            self.close()
        if self._process is None:
            self._is_ready = False
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                start_new_session=True,  # Ctrl-C is ours
            )
            assert process.stdin is not None
            os.set_blocking(process.stdin.fileno(), False)
            self._process = process  # one that an exception came before ends with its pipes
        else:
            self._process.send_signal(signal.SIGCONT)  # whoever stopped it
        return self._process

    def _forget(self) -> None:
        """In a fork: the process is the parent's."""
        self._lock = Lock()
        process, self._process = self._process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
            process.returncode = 0  # never ours to wait for


def _unless_gone(method: "weakref.WeakMethod[Callable[[], None]]") -> Callable[[], None]:
    def call() -> None:
        found = method()
        if found is not None:
            found()

    return call


def _write(process: subprocess.Popen[bytes], line: bytes, deadline: float) -> None:
    assert process.stdin is not None
    rest = memoryview(line)
    while rest:
        _wait(process.stdin.fileno(), select.POLLOUT, deadline)
        with suppress(BlockingIOError):
            rest = rest[os.write(process.stdin.fileno(), rest[:_PART_BYTES]) :]


def _answer(process: subprocess.Popen[bytes], deadline: float) -> Any:
    assert process.stdout is not None
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        _wait(process.stdout.fileno(), select.POLLIN, deadline)
        part = os.read(process.stdout.fileno(), _PART_BYTES)
        if not part:
            raise EOFError
        parts.append(part)
    return json.loads(b"".join(parts))


def _wait(descriptor: int, event: int, deadline: float) -> None:
    """`select` knows no descriptor above 1,023."""
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError
