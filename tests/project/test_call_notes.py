"""The profiler of `count_house.py --flow` notes what each counted request calls in each process."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from house import flow
from house.flow import Notes, files_of, functions_of
from watched import python_command

MODULES = {
    "__init__.py": "",
    "shapes.py": """
from dataclasses import dataclass
from typing import NamedTuple

@dataclass
class Request:
    number: int

class Step(NamedTuple):
    row: int

class Never:
    def __init__(self):
        pass
""",
    "answers.py": """
import threading
from infer.shapes import Request, Step

def in_thread():
    Step(1)

def answer():
    Request(1)
    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()

def main_loop():
    tick()

def tick():
    pass

def never():
    pass
""",
}
PARENT = """
import subprocess, sys
from infer.answers import answer, main_loop, never
never()
for line in sys.stdin:
    answer()
    main_loop()
    subprocess.run([sys.executable, "-c", "from infer.answers import never; never()"])
    print("answered", flush=True)
"""


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Notes:
    """Return the notes of a made-up package `infer`."""
    monkeypatch.setattr(flow, "SETTLING_SECONDS", 0)
    (tmp_path / "src" / "infer").mkdir(parents=True)
    for name, text in MODULES.items():
        (tmp_path / "src" / "infer" / name).write_text(text)
    (tmp_path / "notes").mkdir()
    return Notes(tmp_path / "notes", tmp_path / "src")


def asking(program: subprocess.Popen[str]) -> Callable[[], object]:
    def ask() -> None:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write("\n")
        program.stdin.flush()
        assert program.stdout.readline() == "answered\n"

    return ask


def test_each_request_has_its_functions_and_types_of_all_threads_and_processes(notes: Notes) -> None:
    pipe = subprocess.PIPE
    command = python_command(PARENT)
    with subprocess.Popen(command, env=notes.environment, stdin=pipe, stdout=pipe, text=True) as program:
        requests = notes.of_requests(asking(program))
    assert len(requests) == 3
    assert requests[0] == requests[1] == requests[2], "each request is noted anew"
    own = {name for _, file, name in functions_of(requests[0]) if file == "answers.py"}
    assert own == {"answer", "in_thread", "<module>", "never"}, "`never` and the module run in the child"
    assert files_of(requests[0]) == {"__init__.py", "answers.py", "shapes.py"}
    types = {call[1:] for call in requests[0] if call[0] == "type"}
    assert types == {("infer.shapes", "Request"), ("infer.shapes", "Step")}


def test_nothing_is_noted_between_requests(notes: Notes, tmp_path: Path) -> None:
    command = python_command("from infer.answers import answer; answer()")
    subprocess.run(command, env=notes.environment, check=True)
    assert [log.read_text() for log in tmp_path.glob("notes/*.log")] == [""]
