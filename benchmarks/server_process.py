"""A server in a separate process, and its memory and processor time, from /proc."""

import http.client
import json
import os
import resource
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
START_SECONDS = 120.0


class ServerError(Exception):
    """A server did not start."""


@dataclass
class ServerProcess:
    process: subprocess.Popen[bytes]
    port: int
    answers_after: float = 0.0  # seconds from the start, until the port answered with any status
    ready_after: float = 0.0  # seconds from the start, until it answered with 200

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{HOST}:{self.port}{path}", timeout=60) as response:
            return response.read().decode()

    def post(self, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        """Return a response whose lines can be read when they arrive."""
        content, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"http://{HOST}:{self.port}{path}", content, headers)
        found: http.client.HTTPResponse = urllib.request.urlopen(asked, timeout=60)
        return found

    def oldest_child(self) -> int:
        return min(children(self.process.pid))

    def resident_bytes(self) -> int:
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in _family(self.process.pid)]
        return sum(pages) * resource.getpagesize()


def free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        port: int = free.getsockname()[1]
    return port


@contextmanager
def running(
    command: Sequence[str],
    log: Path,
    *,
    port: int | None = None,
    environment: Mapping[str, str] | None = None,
    start_seconds: float = START_SECONDS,
) -> Iterator[ServerProcess]:
    """Run a command, with a port in place of PORT, a free one unless given. Raise ServerError if it does not answer.

    It does not find prefixes that an earlier run may have stored on disk.
    """
    port = free_port() if port is None else port
    environment = {**(os.environ if environment is None else environment), "INFER_PREFIX_DISK": "0"}
    words = [str(port) if word == "PORT" else word for word in command]
    with log.open("wb") as errors, subprocess.Popen(words, env=environment, stdout=errors, stderr=errors) as process:
        server = ServerProcess(process, port)
        try:
            _await(server, log, start_seconds)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _await(server: ServerProcess, log: Path, start_seconds: float) -> None:
    started = time.perf_counter()
    while time.perf_counter() - started < start_seconds and server.process.poll() is None:
        try:
            server.get("/health")
        except urllib.error.HTTPError:
            server.answers_after = server.answers_after or time.perf_counter() - started
        except OSError:
            pass
        else:
            server.ready_after = time.perf_counter() - started
            server.answers_after = server.answers_after or server.ready_after
            return
        time.sleep(0.005)
    lines = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
    raise ServerError(f"{server.process.args[0]} did not start: {lines[-1]}")


def _family(pid: int) -> list[int]:
    """Return a process and all that descend from it."""
    return [pid, *(each for child in children(pid) for each in _family(child))]


def children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
