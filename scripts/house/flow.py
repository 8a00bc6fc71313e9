"""Count the files and functions of infer that a request passes, in all processes and threads that take part.

A model is loaded twice: by a server, and by a program that calls `LLM.stream`. Each process starts with a profiler
(`call_notes`). Each case is asked once without being counted, so what happens once per process is left out. Then it is
asked fifteen times, and what every one of these requests passes counts: what only some pass depends on the clock. Three
functions are left out, because on a busy machine every request passes them.

From Python 3.12 on, most comprehensions are no functions. The limits are numbers of Python 3.11.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from server_process import running

SOURCE = Path(__file__).parents[2] / "src"
MODEL = "smollm2"
NUM_COUNTED = 15
SETTLING_SECONDS = 0.1  # the server frees a request after its last byte
START_SECONDS = 600  # without cached kernels, which a profiler lets compile slowly
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CHAT = {"messages": QUESTION, "stream": True, "max_tokens": 7, "temperature": 0}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
CASES: dict[str, dict[str, Any]] = {
    "chat": CHAT,
    "chat with a tool": {**CHAT, "tools": [{"type": "function", "function": WEATHER}]},
    "chat with a schema": {
        **CHAT,
        "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}},
    },
}
STREAM = "LLM.stream"
ON_BUSY_MACHINES = ("TokenTimer.waited", "StepCosts._solve", "_solved")  # and what is inside them
Calls = set[tuple[str, ...]]  # (kind, file or module, name) of each function called and of each type created


class Notes:
    """The folder in which processes with a profiler note the calls of the counted requests."""

    def __init__(self, folder: Path, source: Path) -> None:
        self._folder = folder
        self._number = 0
        (folder / "sitecustomize.py").write_bytes(Path(__file__).with_name("call_notes.py").read_bytes())
        (folder / "request").write_bytes(b"\0")
        path = os.pathsep.join([str(folder), str(source)])
        self.environment = {**os.environ, "PYTHONPATH": path}
        self.environment |= {"INFER_FLOW": str(folder), "INFER_FLOW_SOURCE": str(source)}

    def of_requests(self, request: Callable[[], object]) -> list[Calls]:
        """Return the calls of each of some requests, after one that is not counted."""
        request()
        time.sleep(SETTLING_SECONDS)
        return [self._of_request(request) for _ in range(NUM_COUNTED)]

    def _of_request(self, request: Callable[[], object]) -> Calls:
        self._number += 1
        self._mark(self._number)
        try:
            request()
            time.sleep(SETTLING_SECONDS)
        finally:
            self._mark(0)
        lines = [line for log in self._folder.glob("*.log") for line in log.read_text(encoding="utf-8").splitlines()]
        calls = [tuple(line.split("\t")) for line in lines]
        return {call[1:] for call in calls if call[0] == str(self._number)}

    def _mark(self, number: int) -> None:
        """Tell all processes the number of the counted request: they have mapped this file."""
        with (self._folder / "request").open("r+b") as file:
            file.write(bytes([number]))


def count_flow(source: Path = SOURCE) -> dict[str, int]:
    """Return the numbers of files and functions of each case, and of the types of infer that `LLM.stream` creates."""
    numbers = dict[str, int]()
    with tempfile.TemporaryDirectory() as folder:
        notes = Notes(Path(folder), source)
        calls = {**_served_calls(notes, Path(folder)), STREAM: _streamed_calls(notes)}
    shared = {case: set.intersection(*requests) for case, requests in calls.items()}
    for case, passed in shared.items():
        numbers[f"{case}: files"] = len(files_of(passed))
        numbers[f"{case}: functions"] = len(functions_of(passed))
    numbers[f"{STREAM}: own types"] = sum(kind != "function" for kind, _, _ in shared[STREAM])
    return numbers


def functions_of(calls: Calls) -> Calls:
    return {call for call in calls if call[0] == "function" and not call[2].startswith(ON_BUSY_MACHINES)}


def files_of(calls: Calls) -> set[str]:
    return {file for _, file, _ in functions_of(calls)}


def _served_calls(notes: Notes, folder: Path) -> dict[str, list[Calls]]:
    command = [sys.executable, "-m", "infer", "serve", MODEL, "--port", "PORT", "--threads", "1"]
    log = folder / "server.txt"
    with running(command, log, environment=notes.environment, start_seconds=START_SECONDS) as server:
        return {
            case: notes.of_requests(lambda body=body: server.post("/v1/chat/completions", body).read())
            for case, body in CASES.items()
        }


def _streamed_calls(notes: Notes) -> list[Calls]:
    with _streaming(notes.environment) as stream:
        return notes.of_requests(stream)


@contextmanager
def _streaming(environment: Mapping[str, str]) -> Iterator[Callable[[], object]]:
    """Yield a function that lets a program stream one answer. The program loads the model first."""
    command = [sys.executable, str(Path(__file__).with_name("stream_requests.py")), MODEL]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=dict(environment), stdin=pipe, stdout=pipe, text=True) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        questions, answers = program.stdin, program.stdout
        assert answers.readline() == "ready\n", "the program did not load the model"

        def stream() -> None:
            questions.write("\n")
            questions.flush()
            assert answers.readline() == "answered\n", "the program did not answer"

        yield stream
        questions.close()
