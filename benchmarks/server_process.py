"""A server that bench_server starts: what it takes of the machine, from /proc."""

import http.client
import json
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
START_SECONDS = 120.0


class ServerError(Exception):
    """It did not start."""


@dataclass
class ServerProcess:
    process: subprocess.Popen[bytes]
    port: int
    answers_after: float = 0.0  # seconds from the start, until the port answered with any status
    ready_after: float = 0.0  # and with 200

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{HOST}:{self.port}{path}", timeout=10) as response:
            return response.read().decode()

    def post(self, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        """Its lines can be read as they come."""
        content, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"http://{HOST}:{self.port}{path}", content, headers)
        found: http.client.HTTPResponse = urllib.request.urlopen(asked, timeout=60)
        return found

    def oldest_child(self) -> int:
        return min(children(self.process.pid))

    def metric(self, name: str) -> float:
        """Of /metrics, summed over labels."""
        lines = [line for line in self.get("/metrics").splitlines() if line.partition("{")[0].split()[0] == name]
        return sum(float(line.split()[-1]) for line in lines)

    def cpu_seconds(self) -> float:
        """Of it and its children."""
        ticks = 0
        for pid in _family(self.process.pid):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in _family(self.process.pid)]
        return sum(pages) * resource.getpagesize()


@contextmanager
def running(command: list[str], log: Path) -> Iterator[ServerProcess]:
    """`command` with a free port put for PORT. Raises ServerError."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    words = [str(port) if word == "PORT" else word for word in command]
    with log.open("wb") as errors, subprocess.Popen(words, stdout=errors, stderr=errors) as process:
        server = ServerProcess(process, port)
        try:
            _await(server, log)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def infer_command(path: Path, threads: int, context: int, slots: int, *options: str) -> list[str]:
    return [
        sys.executable, "-m", "infer", "serve", "--port", "PORT", "--model", str(path), "--threads", str(threads),
        "--max-seq-len", str(context), "--slots", str(slots), *options,
    ]  # fmt: skip


def llama_command(program: str, path: Path, threads: int, context: int, slots: int) -> list[str]:
    """One cache that its slots share, as ours: `context` for the longest, and 1,536 tokens for each slot."""
    return [
        program, "--port", "PORT", "--model", str(path), "--threads", str(threads), "--threads-batch", str(threads),
        "--parallel", str(slots), "--ctx-size", str(context + slots * 1536), "--kv-unified",
    ]  # fmt: skip


def _await(server: ServerProcess, log: Path) -> None:
    started = time.perf_counter()
    while time.perf_counter() - started < START_SECONDS and server.process.poll() is None:
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
    """It and its children, whichever of its threads started them."""
    return [pid, *(each for child in children(pid) for each in _family(child))]


def children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
