"""Answer rows in several processes, each with the model. This process hands out the rows and writes their lines.

A process that dies loses nothing: its rows are handed out again, and give the same bytes.
"""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from threading import Thread
from typing import Any, final

from infer.batch_file.row import Row
from infer.batch_file.settings import BatchSettings, Line, Write
from infer.errors import InferError

_CHUNKS_AHEAD = 2  # that a process has: while it answers one, it need not wait for the next
_MOST_DEATHS = 3  # one after the other, without an answer between
_LOOK_SECONDS = 0.2  # for a signal


@final
@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    pipe: Connection
    rows: dict[str, Row] = field(default_factory=dict)  # handed out and not answered, by id


def answer_by_workers(
    rows: Iterator[Row],
    settings: BatchSettings,
    load: Mapping[str, Any],
    num_workers: int,
    write: Write,
    is_cancelled: Callable[[], bool],
) -> None:
    """Answer the rows in `num_workers` processes. `load` are the arguments of `LLM` in each process.

    Raises InferError if processes die again and again, or cannot load the model.
    """
    context, given_back = multiprocessing.get_context("spawn"), deque[Row]()
    workers, num_deaths = list[_Worker](), 0

    def start() -> _Worker:
        mine, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, settings, load), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, mine)

    try:
        workers = [start() for _ in range(num_workers)]
        for worker in workers:
            _hand_out(worker, rows, given_back, settings.batch_size)
        while any(worker.rows for worker in workers) and not is_cancelled():
            for pipe in wait([worker.pipe for worker in workers if worker.rows], _LOOK_SECONDS):
                worker = next(each for each in workers if each.pipe is pipe)
                try:
                    line = worker.pipe.recv()
                except (EOFError, OSError):
                    num_deaths += 1
                    if num_deaths == _MOST_DEATHS:
                        raise InferError(
                            f"{num_deaths} processes died one after the other ({_cause(worker.process)}): is there "
                            f"memory for {num_workers} models? Try fewer --workers"
                        ) from None
                    given_back.extend(worker.rows.values())
                    workers[workers.index(worker)] = worker = start()
                else:
                    if not isinstance(line, Line):
                        raise InferError(line)
                    num_deaths = 0
                    del worker.rows[line.row_id]
                    write(line)
                _hand_out(worker, rows, given_back, settings.batch_size)
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()


def _hand_out(worker: _Worker, rows: Iterator[Row], given_back: deque[Row], batch_size: int) -> None:
    """Send rows to a worker. The rows of a dead process come first."""
    size = 4 * batch_size
    while len(worker.rows) <= size * (_CHUNKS_AHEAD - 1):
        again = [given_back.popleft() for _ in range(min(size, len(given_back)))]
        chunk = [*again, *islice(rows, size - len(again))]
        if not chunk:
            return
        worker.rows |= {row.id: row for row in chunk}
        try:
            worker.pipe.send(chunk)
        except OSError:  # it died: the next wait sees it
            return


def _work(pipe: Connection, settings: BatchSettings, load: Mapping[str, Any]) -> None:
    """Answer rows until the other end is closed.

    SIGINT is ignored, because the first process decides what a signal from the terminal means.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    chunks = SimpleQueue[list[Row]]()
    Thread(target=_receive, args=(pipe, chunks), daemon=True).start()
    from infer.batch_file.answering import answer_rows
    from infer.llm import LLM

    try:
        llm = LLM(**load)
    except InferError as error:
        pipe.send(str(error))
        return
    with suppress(OSError):  # the other end is closed
        while True:
            answer_rows(llm, _received(chunks), settings, pipe.send)


def _receive(pipe: Connection, chunks: "SimpleQueue[list[Row]]") -> None:
    """Receive rows on a thread.

    The first process may send rows while this one sends lines, and a pipe's room is limited in both directions.
    """
    try:
        while True:
            chunks.put(pipe.recv())
    except (EOFError, OSError):
        os._exit(0)


def _received(chunks: "SimpleQueue[list[Row]]") -> Iterator[Row]:
    """Yield the rows of one chunk after another, as long as there is one.

    Before the next chunk is waited for, the answers in progress must end.
    """
    yield from chunks.get()
    while not chunks.empty():
        yield from chunks.get()


def _cause(process: BaseProcess) -> str:
    process.join(1)
    return "no exit status" if process.exitcode is None else f"exit status {process.exitcode}"
