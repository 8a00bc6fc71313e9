"""Our program in its own process, which may hang, crash or run out of memory without harm to this process.

Question and answer are one line of JSON each. The process is started when it is first needed. It is started again if it
has ended, or if a fork of this process asks. A `Lane` has a few processes of one program. A tenant with a name leaves
one of them to the others, so that they need not wait.

A program limits its own memory by RLIMIT_DATA. macOS does not enforce this limit. There, the process that asks watches
the memory of the process that answers. A program that runs nothing else on its main thread may also limit the processor
time of a block. Only processor time counts, so a busy machine does not change the result.
"""

import atexit
import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn, final

from infer.system import macos

_START_SECONDS = 120.0  # for a busy machine, and for libraries that load torch
_PART_BYTES = 1 << 16
_LEAST_SECONDS = 1e-3  # of a limit of processor time: a timer of 0 would never end
_WATCH_SECONDS = 0.02  # between two looks at the memory of a process, on macOS
MOST_PROCESSES = 3
MEMORY_BYTES = 1 << 30  # of a process

_tenant = ContextVar("tenant", default="")


class ChildError(Exception):
    """The process ended instead of answering. `signal` is the signal that ended it, or None."""

    def __init__(self, signal: int | None) -> None:
        self.signal = signal
        super().__init__(f"ended by signal {signal}")


@final
class Child:
    """A child process that answers questions of several threads, one at a time.

    A fork of this process starts its own child. In the fork, the pipes of the first child are closed, and a lock that
    another thread held is replaced.
    """

    def __init__(self, program: Path, *arguments: str, memory_bytes: int = MEMORY_BYTES) -> None:
        self._most_bytes = memory_bytes
        self._command = [sys.executable, "-P", str(program), *arguments]
        # -P: modules next to the program have the names of libraries
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        atexit.register(self.close)
        os.register_at_fork(after_in_child=_unless_gone(weakref.WeakMethod(self._forget)))

    def start(self) -> None:
        """Let the process start while the caller continues."""
        with self._lock:
            self._started()

    def ask(self, question: Any, seconds: float) -> Any:
        """Return the answer.

        Raises ChildError if the process ends twice while it has this question, or once by SIGPROF, its own limit of
        processor time. Raises TimeoutError if it needs longer than `seconds`, including the time to read the question.
        After a TimeoutError, the process has ended.
        """
        line = json.dumps(question).encode() + b"\n"
        with self._lock:
            try:
                return self._ask_once(line, seconds)
            except ChildError as error:  # it may have died before the question: by lack of memory, or by a signal
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
            return self._answer_of(process, deadline)
        except (EOFError, BrokenPipeError):
            self.close()
            raise ChildError(-process.returncode if process.returncode < 0 else None) from None
        except BaseException:  # timeout or Ctrl-C: the answer must not be read for the next question
            self.close()
            raise

    def _answer_of(self, process: subprocess.Popen[bytes], deadline: float) -> Any:
        """Return the next answer. On macOS, kill the process when it has more memory than it may have."""
        while macos.IS_MACOS and time.monotonic() < deadline:
            assert process.stdout is not None
            if _is_ready(process.stdout.fileno(), select.POLLIN, time.monotonic() + _WATCH_SECONDS):
                break
            if (macos.footprint_bytes(process.pid) or 0) > self._most_bytes:
                process.kill()
        return _answer(process, deadline)

    def _ready(self) -> subprocess.Popen[bytes]:
        """Return the process when it is ready, which it reports with an empty answer.

        Raises RuntimeError if it does not start.
        """
        process = self._started()
        if not self._is_ready:
            try:
                _answer(process, time.monotonic() + _START_SECONDS)
            except (EOFError, TimeoutError):
                self.close()
                raise RuntimeError(f"{self._command[2]} does not start in a process of its own") from None
            except BaseException:  # Ctrl-C: it is unknown whether the process has reported already
                self.close()
                raise
            self._is_ready = True
        return process

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:  # it died between two questions
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
                start_new_session=True,  # so that Ctrl-C reaches only this process
            )
            assert process.stdin is not None
            os.set_blocking(process.stdin.fileno(), False)
            self._process = process  # after an exception before this line, it ends with its pipes
        else:
            self._process.send_signal(signal.SIGCONT)  # in case it was stopped
        return self._process

    def _forget(self) -> None:
        """Forget the process in a fork, because it belongs to the parent."""
        self._lock = Lock()
        process, self._process = self._process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
            process.returncode = 0  # a fork must not wait for it


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
    """Raise TimeoutError unless the descriptor is ready before the deadline."""
    if not _is_ready(descriptor, event, deadline):
        raise TimeoutError


def _is_ready(descriptor: int, event: int, deadline: float) -> bool:
    """Return True as soon as the descriptor is ready, or False at the deadline. `select` allows none above 1,023."""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


def receive_all(receive: Callable[[], Any], put: Callable[[Any], None]) -> None:
    """Start a thread that puts all received messages, and ends this process when the pipe has closed."""

    def run() -> None:
        with suppress(EOFError, OSError):
            while True:
                put(receive())
        os._exit(0)

    threading.Thread(target=run, daemon=True).start()


def end_after_parent(grace_seconds: float) -> None:
    """Start a thread that ends this process `grace_seconds` after the other end of stdin has closed.

    Until then the process may end by itself. The thread ends it even during the loading of a model. It reads no bytes.
    """
    threading.Thread(target=_await_end, args=[grace_seconds], name="infer-parent", daemon=True).start()


def _await_end(grace_seconds: float) -> None:
    ends = select.poll()
    ends.register(0, 0)  # a closed end is always reported
    ends.poll()
    time.sleep(grace_seconds)
    os._exit(0)


@contextmanager
def asking_for(tenant: str) -> Iterator[None]:
    """Count this thread's or task's questions and engine calls as the tenant's, within the context."""
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
    """A few child processes that answer questions of any thread.

    They start when needed, or at `start`. A fork of this process starts its own.
    """

    def __init__(self, program: Path, *arguments: str) -> None:
        self._free = [Child(program, *arguments) for _ in range(MOST_PROCESSES)]
        self._children = tuple(self._free)
        self._asking = list[str]()  # the tenant of each question that is being answered
        self._changed = threading.Condition()
        os.register_at_fork(after_in_child=_unless_gone(weakref.WeakMethod(self._forget)))

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
        """Return True if a process is free. For a named tenant with a running question, two must be free."""
        return len(self._free) > bool(tenant and tenant in self._asking)

    def _forget(self) -> None:
        """Reset the lane in a fork, where no thread is asking, whatever the parent's threads did."""
        self._changed, self._asking = threading.Condition(), []
        self._free = list(self._children)


class LateError(BaseException):
    """The time of a block is over. Handlers must not mistake it for a fault of the data that the block reads."""


class OverLimitError(Exception):
    """A block took longer than its own limit."""


def processor_seconds() -> float:
    """Return the processor time of this process and of the processes that it waited for."""
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def watch_limits() -> None:
    """Install the handler of SIGPROF with which `limited` stops a block. For a process's main thread."""
    signal.signal(signal.SIGPROF, _late)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise OverLimitError if the block takes more processor time. The limit of an enclosing block stays active."""
    around = signal.getitimer(signal.ITIMER_PROF)[0] or math.inf
    begun = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, min(seconds, around))
    try:
        yield
    except LateError:
        if seconds > around:
            raise
        raise OverLimitError from None
    finally:
        left = max(around - (time.process_time() - begun), _LEAST_SECONDS)
        signal.setitimer(signal.ITIMER_PROF, 0.0 if around == math.inf else left)


def _late(number: int, frame: object) -> NoReturn:
    raise LateError
