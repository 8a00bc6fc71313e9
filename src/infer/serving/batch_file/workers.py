"""Answer rows in several processes, each with the model. This process hands out the rows and writes their lines.

A process that dies loses nothing: its rows are handed out again, and give the same bytes.
"""

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any, final

from infer.errors import InferError
from infer.serving.batch_file.batch_rows import BatchSettings, Line, Row, Write
from infer.system.child_process import receive_all

_CHUNKS_AHEAD = 2  # chunks per process: while it answers one, it already has the next
_MOST_DEATHS = 3  # deaths in a row, without an answer between them
_LOOK_SECONDS = 0.2  # between two checks for a signal


@final
@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    pipe: Connection
    rows: dict[str, Row] = field(default_factory=dict)  # rows that were handed out and are not answered, by id


def answer_by_workers(
    rows: Iterator[Row],
    settings: BatchSettings,
    load: Mapping[str, Any],
    num_workers: int,
    write: Write,
    is_cancelled: Callable[[], bool],
) -> None:
    """Answer the rows in `num_workers` processes. `load` are the arguments of `LLM` in each process.

    Raises InferError if several processes die in a row, or one cannot load the model.
    """
    workers = _Workers(rows, settings, load)
    try:
        workers.start(num_workers)
        while any(worker.rows for worker in workers.all) and not is_cancelled():
            for line in workers.next_lines():
                write(line)
    finally:
        workers.kill()


@final
class _Workers:
    """The processes, the rows that each has, and the rows that dead processes had."""

    def __init__(self, rows: Iterator[Row], settings: BatchSettings, load: Mapping[str, Any]) -> None:
        self._rows, self._settings, self._load = rows, settings, load
        self._given_back = deque[Row]()
        self.all: list[_Worker] = []
        self._num_deaths = 0  # deaths since the last answer

    def start(self, num_workers: int) -> None:
        for _ in range(num_workers):
            self.all.append(self._start_one())
        for worker in self.all:
            self._hand_out(worker)

    def next_lines(self) -> Iterator[Line]:
        """Yield a line of each process that has one, and hand out further rows. Waits for a short time.

        Raises InferError if too many processes died, or if one cannot load the model.
        """
        for pipe in wait([worker.pipe for worker in self.all if worker.rows], _LOOK_SECONDS):
            worker = next(each for each in self.all if each.pipe is pipe)
            try:
                line = worker.pipe.recv()
            except (EOFError, OSError):
                worker = self._replace(worker)
            else:
                if not isinstance(line, Line):
                    raise InferError(line)
                self._num_deaths = 0
                del worker.rows[line.row_id]
                yield line
            self._hand_out(worker)

    def kill(self) -> None:
        for worker in self.all:
            worker.process.kill()
            worker.process.join()

    def _start_one(self) -> _Worker:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, self._settings, self._load), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, mine)

    def _replace(self, dead: _Worker) -> _Worker:
        """Start a process in place of a dead one, whose rows are handed out again."""
        self._num_deaths += 1
        if self._num_deaths == _MOST_DEATHS:
            raise InferError(
                f"{self._num_deaths} processes died in a row ({_cause(dead.process)}), perhaps because the memory is "
                f"too small for {len(self.all)} models: use fewer --workers"
            ) from None
        self._given_back.extend(dead.rows.values())
        worker = self.all[self.all.index(dead)] = self._start_one()
        return worker

    def _hand_out(self, worker: _Worker) -> None:
        """Send rows to a worker. The rows of a dead process come first."""
        size = 4 * self._settings.batch_size
        while len(worker.rows) <= size * (_CHUNKS_AHEAD - 1):
            again = [self._given_back.popleft() for _ in range(min(size, len(self._given_back)))]
            chunk = [*again, *islice(self._rows, size - len(again))]
            if not chunk:
                return
            worker.rows |= {row.id: row for row in chunk}
            try:
                worker.pipe.send(chunk)
            except OSError:  # the process died: the next wait notices it
                return


def _work(pipe: Connection, settings: BatchSettings, load: Mapping[str, Any]) -> None:
    """Answer rows until the other end is closed.

    SIGINT is ignored, because the first process decides what a signal from the terminal means.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    chunks = SimpleQueue[list[Row]]()
    receive_all(pipe.recv, chunks.put)  # a pipe's room is limited in both directions, and lines are sent meanwhile
    from infer.llm import LLM
    from infer.serving.batch_file.answering import answer_rows

    try:
        llm = LLM(**load)
    except InferError as error:
        pipe.send(str(error))
        return
    with suppress(OSError):  # the other end is closed
        while True:
            answer_rows(llm, _received(chunks), settings, pipe.send)


def _received(chunks: "SimpleQueue[list[Row]]") -> Iterator[Row]:
    """Yield the rows of the next chunk, and of the chunks that have arrived by its end.

    It does not wait for a later chunk: the answers in progress end first.
    """
    yield from chunks.get()
    while not chunks.empty():
        yield from chunks.get()


def _cause(process: BaseProcess) -> str:
    process.join(1)
    return "no exit status" if process.exitcode is None else f"exit status {process.exitcode}"
