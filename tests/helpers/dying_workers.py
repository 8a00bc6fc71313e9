"""A process that answers rows of a batch file without a model, and dies at some. Loads no torch."""

import os
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from infer.serving.batch_file.batch_rows import BatchSettings, Line


def answer_or_die(pipe: Connection, settings: BatchSettings, load: Mapping[str, Any]) -> None:
    """Take the place of a process with a model. `load["deaths"]` are how many processes die at a row, by its id."""
    if "cannot load" in load:
        pipe.send("no such model")
        return
    with suppress(EOFError):
        while True:
            for row in pipe.recv():
                die_at(row.id, load)
                pipe.send(Line(row.id, f"{row.id}\n", False))


def die_at(row: str, load: Mapping[str, Any]) -> None:
    for number in range(load["deaths"].get(row, 0)):
        if not (died := Path(load["folder"], f"{row} {number}")).exists():
            died.touch()
            os._exit(3)
