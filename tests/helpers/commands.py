"""Commands of `infer` that run in the process of the test."""

import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple, final
from unittest.mock import patch

from infer.cli import main

FAKE = [sys.executable, str(Path(__file__).with_name("fake_cli.py"))]  # `infer` with a fake model


def fake_process(*arguments: object, **environment: str) -> "subprocess.Popen[bytes]":
    """Begin a command with a fake model, which has a pipe for each stream."""
    command, pipe = [*FAKE, *map(str, arguments)], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=os.environ | environment)


class Ran(NamedTuple):
    """The output of a command."""

    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)

    def records(self) -> list[Any]:
        """Return the value of each line of the output."""
        return list(map(json.loads, self.out.splitlines()))


@final
class _Stream(TextIOWrapper):
    """A stream in memory that may say that it is a terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__(BytesIO(), encoding="utf-8", newline="", write_through=True)
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def text(self) -> str:
        return self.buffer.getvalue().decode()  # type: ignore[attr-defined,no-any-return]


def run(*arguments: object, status: int = 0, is_terminal: bool = False) -> Ran:
    """Run a command line, check its exit status, and return its output. Its stderr may be a terminal."""
    out, err = _Stream(is_terminal=False), _Stream(is_terminal=is_terminal)
    with redirect_stdout(out), redirect_stderr(err), patch.dict(os.environ, {"TERM": "xterm"}):
        found = main([str(each) for each in arguments])
    assert found == status, (arguments, found, err.text())
    return Ran(out.text(), err.text())


def refused(*arguments: object, status: int = 2) -> str:
    """Return the message of a command that is refused. It is one line, and stdout is empty."""
    found = run(*arguments, status=status)
    assert (found.out, found.err[:7], found.err.count("\n")) == ("", "infer: ", 1), found
    return found.err[7:-1]
