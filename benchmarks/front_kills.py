"""Kill the front of several models at random moments, and check that nothing of it is left."""

import os
import random
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from server_process import HOST, free_port, running

Ask = Callable[[str], None]  # one request to the server at a URL; raises AssertionError for another answer
LIMIT_SECONDS = 60.0  # limit for the end of all processes
_POLL_SECONDS = 0.1
_MARK = "INFER_CHECKED_START"  # a variable in the environment of all processes of one start


class LeftBehindError(Exception):
    """A process or a file has outlived the front."""


def kill_fronts(
    command: Sequence[str], ask: Ask, folder: Path, *, num_kills: int, longest: float, num_clients: int = 4
) -> dict[str, Any]:
    """Start the command and kill it several times on one port, then start it once more and end it with a signal.

    A kill happens within `longest` seconds of the start of the first model's process, while clients ask. Return these
    seconds of each kill, the seconds from it to the end of the last process, and the number of answers. Raises
    LeftBehindError, or the error of `ask`.
    """
    noise, port = random.Random(1), free_port()
    words = [str(port) if word == "PORT" else word for word in command]
    temporary = folder / "tmp"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    clients = _Clients(f"http://{HOST}:{port}", ask)
    kills_after, ended_after = list[float](), list[float]()
    for _ in range(num_kills):
        kills_after.append(round(noise.uniform(0, longest), 2))
        own = environment | {_MARK: (mark := secrets.token_hex(8))}
        with (folder / "killed log").open("ab") as log, clients.asking(num_clients):
            process = subprocess.Popen(words, env=own, stdout=log, stderr=log)
            while process.poll() is None and len(_marked(mark)) < 2:
                time.sleep(_POLL_SECONDS)
            time.sleep(kills_after[-1])
            process.kill()
            process.wait()
            ended_after.append(round(_seconds_until_ended(mark), 2))
    with running(words, folder / "log", port=port, environment=environment), clients.asking(1):
        clients.until_answered()
    if left := sorted(path.name for path in temporary.iterdir()):
        raise LeftBehindError(f"files are left: {', '.join(left)}")
    return {"kills_after": kills_after, "ended_after": ended_after, "answers": clients.num_answers}


class _Clients:
    """Clients that send requests without end to a server that may have ended."""

    def __init__(self, url: str, ask: Ask) -> None:
        self._url, self._ask = url, ask
        self.num_answers = 0
        self._has_ended, self._answered = threading.Event(), threading.Event()
        self._error: Exception | None = None

    @contextmanager
    def asking(self, num_clients: int) -> Iterator[None]:
        self._has_ended.clear()
        threads = [threading.Thread(target=self._ask_on) for _ in range(num_clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._has_ended.set()
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error

    def until_answered(self) -> None:
        """Return when a request that is sent from now on was answered, or has failed."""
        self._answered.clear()
        self._answered.wait()

    def _ask_on(self) -> None:
        while not self._has_ended.is_set():
            try:
                self._ask(self._url)
                self.num_answers += 1
                self._answered.set()
            except httpx.TransportError:
                time.sleep(0.05)
            except Exception as error:
                self._error = error
                self._answered.set()
                return


def _seconds_until_ended(mark: str) -> float:
    """Return the seconds until no process has the mark. Raises LeftBehindError after the limit."""
    began = time.monotonic()
    while left := _marked(mark):
        if time.monotonic() - began > LIMIT_SECONDS:
            raise LeftBehindError(f"processes are left after {LIMIT_SECONDS:g} s: {left}")
        time.sleep(_POLL_SECONDS)
    return time.monotonic() - began


def _marked(mark: str) -> list[int]:
    """Return the processes that have the mark in their environment. That of an ended one is empty."""
    found = list[int]()
    for folder in Path("/proc").iterdir():
        with suppress(OSError):  # it has just ended, or is another user's
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found
