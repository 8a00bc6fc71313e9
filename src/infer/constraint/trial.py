"""A grammar is compiled first in a process of its own, which may hang, crash or run out of memory in our place.

llguidance 1.9 overflows its stack on a chain of 5,000 rules and never returns from a product of large `multipleOf`;
xgrammar 0.2 dies of deep patterns. No check on the text alone knows every such case.
"""

import atexit
import json
import os
import select
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from threading import Lock
from typing import final

from infer.constraint.backend import Source
from infer.errors import InvalidRequestError

COMPILE_SECONDS = 2.0
MEMORY_BYTES = 1 << 30
_START_SECONDS = 120.0  # xgrammar loads torch
_CHILD = Path(__file__).with_name("trial_child.py")


@final
class Trial:
    """One process for one backend, started when first needed and again whenever it had to be killed."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._lock = Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0
        atexit.register(self.close)

    def run(self, source: Source, where: str) -> str:
        """The compiler's message, "" where it is content.

        Raises InvalidRequestError where it needs too long, crashes or takes too much memory.
        """
        with self._lock:
            child = self._running()
            assert child.stdin is not None
            try:
                child.stdin.write(json.dumps(source).encode() + b"\n")
                child.stdin.flush()
                return self._answer(child, COMPILE_SECONDS)
            except TimeoutError:
                self.close()
                raise InvalidRequestError(
                    f"{where}: takes more than {COMPILE_SECONDS:g} s to compile; make it smaller or less ambiguous"
                ) from None
            except (EOFError, BrokenPipeError):
                self.close()
                raise InvalidRequestError(f"{where}: too large or too deep for {self._backend} to compile") from None

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None and self._owner == os.getpid():
            child.kill()
            child.communicate()

    def _running(self) -> subprocess.Popen[bytes]:
        """A fork of our process has no child of its own yet."""
        if self._child is None or self._owner != os.getpid():
            self._owner = os.getpid()
            self._child = subprocess.Popen(
                [sys.executable, "-P", str(_CHILD), self._backend, str(MEMORY_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # -P: beside the program lie modules with the names of the libraries
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                start_new_session=True,  # Ctrl-C is ours
            )
            try:
                self._answer(self._child, _START_SECONDS)
            except (EOFError, TimeoutError):
                self.close()
                raise RuntimeError(f"{self._backend} does not load in a process of its own") from None
        return self._child

    @staticmethod
    def _answer(child: subprocess.Popen[bytes], seconds: float) -> str:
        assert child.stdout is not None
        deadline = time.monotonic() + seconds
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            part = os.read(child.stdout.fileno(), 1 << 16)
            if not part:
                raise EOFError
            line += part
        return str(json.loads(line))


@cache
def trial_of(backend: str) -> Trial:
    return Trial(backend)
