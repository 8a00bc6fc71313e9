"""Log lines leave through a bounded queue and a thread, so that a reader of the log that stalls stops nothing else."""

import logging
from contextlib import suppress
from os import write
from queue import Full, Queue
from select import select
from threading import Thread
from typing import TextIO, final

MOST_LINES = 4_096
_FLUSH_SECONDS = 1.0


@final
class LogLines(logging.Handler):
    """Writes whole lines to a stream. Lines beyond `MOST_LINES` unwritten ones are dropped, and the next line says so.

    At the end of the process, `logging` flushes the handler, which waits for at most a second.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        # Not through the stream: the end of the process would wait for the lock of its buffer.
        self._descriptor, self._encoding = stream.fileno(), stream.encoding
        self._lines, self._num_dropped = Queue[str](MOST_LINES), 0
        Thread(target=self._write, name="infer-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        notice = f"{self._num_dropped} lines of the log were dropped: its reader is too slow\n"
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        try:
            self._lines.put_nowait(f"{notice if self._num_dropped else ''}{line}\n")
            self._num_dropped = 0
        except Full:
            self._num_dropped += 1

    def flush(self) -> None:
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, _FLUSH_SECONDS)

    def _put(self, content: bytes) -> int:
        """Return the number of bytes that the stream took. It may be a pipe that another process made non-blocking."""
        try:
            return write(self._descriptor, content)
        except BlockingIOError:
            select([], [self._descriptor], [])
            return 0

    def _write(self) -> None:
        while True:
            content = self._lines.get().encode(self._encoding, "backslashreplace")
            with suppress(OSError):  # the reader has closed the pipe
                while content:
                    content = content[self._put(content) :]
            self._lines.task_done()
