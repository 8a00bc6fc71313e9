"""Kernels compiled ahead, several in parallel, each in a process of ours (`child`), and the progress display.

A load announces the kernels of its steps (`begin`) and continues. It waits when it needs a kernel (`take`) and at its
end (`finish`), so that no prompt waits for a compiler. A kernel that was not announced, or that no process could
compile, is compiled by the caller that needs it.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, final

import infer
from infer.compute.backends.cpu.compile.kernel import Kernel
from infer.compute.backends.cpu.host import kernel_cache
from infer.system.available_memory import available_memory_bytes
from infer.system.cores import num_processors
from infer.system.status_line import PROGRESS_WIDTH, StatusLine, bar, write_notice

_CODE = "from infer.compute.backends.cpu.compile.child import main; main()"
_MOST_PROCESSES = 8
_PROCESS_BYTES = 320_000_000  # memory of one process while it compiles
_START_SECONDS, _REDRAW_SECONDS = 1.5, 0.25
# Seconds that a kernel takes, by the beginning of its label; others take a third of one.
_SECONDS = (
    ("attend", 7.0), ("choose", 2.5), ("narrow", 2.0), ("matmul", 2.0), ("rotate", 1.5),
    ("normalize", 1.2), ("scan", 0.8),
)  # fmt: skip


def seconds_of(kernel: Kernel) -> float:
    return next((seconds for start, seconds in _SECONDS if kernel.label.startswith(start)), 0.3)


def _num_processes(num_kernels: int) -> int:
    """Return the number of processes for these kernels. The load keeps half of the memory that is available."""
    available = available_memory_bytes()
    fitting = _MOST_PROCESSES if available is None else available // (2 * _PROCESS_BYTES)
    return max(1, min(num_processors(), _MOST_PROCESSES, num_kernels, fitting))


class CompiledObject(NamedTuple):
    symbol: str
    object_code: bytes


@final
class Compilation:
    """Compilation of kernels in several processes, the longest ones first.

    `close` ends it; a fork ends it in the child.

    `_changed` guards the state that threads share, and is notified of each answer.
    """

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self._waiting = sorted(
            kernels, key=lambda kernel: (not kernel.maker.startswith(".threads."), -seconds_of(kernel))
        )
        self._answers: dict[str, CompiledObject | None] = {}  # by file name; None: it could not be compiled
        self._changed = threading.Condition()
        self._children: list[subprocess.Popen[bytes]] = []
        self._is_closed = False
        self._owner, self._started = os.getpid(), time.monotonic()
        self._weight = {kernel.file_name: seconds_of(kernel) for kernel in kernels}
        self.file_names = set(self._weight)
        self._line = StatusLine()
        self._threads = [
            threading.Thread(target=self._work, name="compile-kernels", daemon=True)
            for _ in range(_num_processes(len(kernels)))
        ]
        write_notice(self._first_line(sorted({kernel.reason for kernel in kernels})))
        for thread in self._threads:
            thread.start()

    def take(self, file_name: str) -> CompiledObject | None:
        """Wait for the object code and return it; None if it was not requested or could not be made."""
        if file_name not in self.file_names or self._owner != os.getpid():
            return None
        with self._changed:
            while file_name not in self._answers and self._is_running():
                self._show()
                self._changed.wait(_REDRAW_SECONDS)
            return self._answers.get(file_name)

    def finish(self) -> None:
        """Wait for all kernels."""
        for name in self.file_names:
            self.take(name)

    def close(self) -> None:
        self._line.close()
        with self._changed:
            self._is_closed = True
            children = list(self._children)
        if self._owner != os.getpid():
            return
        for child in children:
            child.kill()
        for thread in self._threads:
            thread.join()

    def _is_running(self) -> bool:
        return not self._is_closed and any(thread.is_alive() for thread in self._threads)

    def _first_line(self, reasons: Sequence[str]) -> str:
        ideal = sum(self._weight.values()) / max(1, len(self._threads))
        seconds = 5 * round((_START_SECONDS + max(ideal, max(self._weight.values()))) / 5 + 0.5)
        what = "kernel" if len(self._weight) == 1 else "kernels"
        why = f" for {', '.join(reasons)}" if len(reasons) <= 2 and "" not in reasons else ""
        return f"infer: compiling {len(self._weight)} CPU {what}{why}: about {seconds} s, {how_often()}"

    def _show(self) -> None:
        weight = sum(self._weight[name] for name in self._answers)
        filled = f"{bar(weight / sum(self._weight.values()), PROGRESS_WIDTH):<{PROGRESS_WIDTH}}"
        done, seconds = f"{len(self._answers)} of {len(self._weight)}", time.monotonic() - self._started
        self._line.show(f"infer: compiling CPU kernels {filled} {done}, {seconds:.0f} s")

    def _work(self) -> None:
        """Run one thread, which submits kernels to a process of its own.

        A kernel is left uncompiled if the process cannot start or ends; the next kernel starts a new process.
        """
        child: subprocess.Popen[bytes] | None = None
        try:
            while (kernel := self._next()) is not None:
                answer = None
                try:
                    child = child or self._start()
                    answer = _ask(child, kernel)
                except (OSError, ValueError, EOFError):
                    _end(child)
                    child = None
                with self._changed:
                    self._answers[kernel.file_name] = answer
                    self._changed.notify_all()
        finally:
            _end(child)
            with self._changed:
                self._changed.notify_all()

    def _next(self) -> Kernel | None:
        with self._changed:
            return self._waiting.pop(0) if self._waiting and not self._is_closed else None

    def _start(self) -> subprocess.Popen[bytes]:
        paths = [str(Path(infer.__file__).parents[1]), *filter(None, sys.path)]
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", _CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C is ours
        )
        with self._changed:
            self._children.append(child)
            if self._is_closed:
                child.kill()
        return child


def how_often() -> str:
    """Return in words whether the compilation is stored or is repeated in each process."""
    trouble = kernel_cache.trouble()
    return (
        "once per machine and model type" if trouble is None else f"for this process only: {trouble} (set INFER_CACHE)"
    )


def _end(child: subprocess.Popen[bytes] | None) -> None:
    if child is not None:
        child.kill()
        with suppress(OSError, ValueError):  # what was not yet written
            child.communicate()
        child.wait()


def _ask(child: subprocess.Popen[bytes], kernel: Kernel) -> CompiledObject | None:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps([kernel.maker, kernel.variant, kernel.record]).encode() + b"\n")
    child.stdin.flush()
    line = child.stdout.readline()
    if not line:
        raise EOFError
    answer: dict[str, Any] = json.loads(line)
    return None if answer["size"] < 0 else CompiledObject(answer["symbol"], _read(child.stdout, answer["size"]))


def _read(file: IO[bytes], size: int) -> bytes:
    content = file.read(size)
    if len(content) < size:
        raise EOFError
    return content
