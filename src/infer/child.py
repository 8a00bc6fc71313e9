"""A program of ours in a process of its own, which may hang, crash or run out of memory in our place.

Question and answer are one line of JSON each. The process is started when first needed and again whenever it has ended,
or where a fork of our process asks.
"""

import atexit
import json
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, final

_START_SECONDS = 120.0  # a machine under load, and libraries that load torch


class ChildError(Exception):
    """The process ended instead of answering; `signal` says what ended it, if one did."""

    def __init__(self, signal: int | None) -> None:
        self.signal = signal
        super().__init__(f"ended by signal {signal}")


@final
class Child:
    """May be asked from several threads, one at a time."""

    def __init__(self, program: Path, *arguments: str) -> None:
        self._command = [sys.executable, "-P", str(program), *arguments]
        # -P: beside the program lie modules with the names of libraries
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._is_ready = False
        atexit.register(self.close)

    def start(self) -> None:
        """Lets the process start while we do something else."""
        with self._lock:
            self._started()

    def ask(self, question: Any, seconds: float) -> Any:
        """The answer. Raises ChildError where the process ends, TimeoutError where it needs longer; then it is gone."""
        line = json.dumps(question).encode() + b"\n"
        with self._lock:
            process = self._ready()
            try:
                assert process.stdin is not None
                process.stdin.write(line)
                process.stdin.flush()
                return self._answer(process, seconds)
            except (EOFError, BrokenPipeError):
                self.close()
                raise ChildError(-process.returncode if process.returncode < 0 else None) from None
            except BaseException:  # too late, or Ctrl-C: the answer to this question must not meet the next one
                self.close()
                raise

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            with suppress(BrokenPipeError):  # what was not yet written
                process.communicate()
            process.wait()

    def _ready(self) -> subprocess.Popen[bytes]:
        """It says so itself, by an empty answer."""
        process = self._started()
        if not self._is_ready:
            try:
                self._answer(process, _START_SECONDS)
            except (EOFError, TimeoutError):
                self.close()
                raise RuntimeError(f"{self._command[2]} does not start in a process of its own") from None
            self._is_ready = True
        return process

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid():
            self._owner = os.getpid()
            self._is_ready = False
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                start_new_session=True,  # Ctrl-C is ours
            )
        return self._process

    @staticmethod
    def _answer(process: subprocess.Popen[bytes], seconds: float) -> Any:
        assert process.stdout is not None
        deadline = time.monotonic() + seconds
        parts: list[bytes] = []
        while not parts or not parts[-1].endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                raise EOFError
            parts.append(part)
        return json.loads(b"".join(parts))
