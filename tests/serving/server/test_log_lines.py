"""Lines of the log: nobody waits for their reader, and the lines that are dropped are counted."""

import asyncio
import logging
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from idle import until
from infer.serving.server.metrics import MOST_LINES, LogLines
from infer.serving.server.process import load_model
from infer.serving.server.server_state import ServerState
from infer.serving.server_settings import ServerSettings

LINE = "a" * 99


def test_lines_for_a_reader_that_stalls_are_dropped_and_counted() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, os.fdopen(reading) as reader:
        lines = LogLines(stream)
        record = logging.LogRecord("a", logging.INFO, "", 0, LINE, (), None)
        for _ in range(2 * MOST_LINES):
            lines.emit(record)
        num_read, num_dropped = 0, 0
        while num_read < MOST_LINES:
            num_read, num_dropped = counted(reader.readline(), num_read, num_dropped)
        until(lambda: not lines._lines.full())
        lines.emit(record)
        while num_read + num_dropped < 2 * MOST_LINES + 1:
            num_read, num_dropped = counted(reader.readline(), num_read, num_dropped)
        assert num_dropped > 0


def counted(line: str, num_read: int, num_dropped: int) -> tuple[int, int]:
    """Return the numbers of lines that were read and dropped, with this one. Several lines may say that some were."""
    if line == f"{LINE}\n":
        return num_read + 1, num_dropped
    found = re.fullmatch(r"(\d+) lines of the log were dropped: its reader is too slow\n", line)
    assert found is not None, line
    return num_read, num_dropped + int(found[1])


def test_lines_are_written_before_the_end(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="ascii") as stream:
        lines = LogLines(stream)
        lines.emit(logging.LogRecord("a", logging.INFO, "", 0, "caf\u00e9", (), None))
        lines.flush()
    assert (tmp_path / "log").read_text() == "caf\\xe9\n"


def test_a_load_that_fails_after_the_end_of_the_server_writes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The interpreter takes modules apart while they are imported."""
    ended = threading.Event()

    def load(on_progress: object) -> Any:
        ended.wait()
        raise AttributeError("prims")

    async def begin() -> None:
        loading = asyncio.create_task(load_model(ServerState(ServerSettings()), load))
        await asyncio.sleep(0)
        loading.cancel()

    asyncio.run(begin())
    [thread] = [each for each in threading.enumerate() if each.name == "infer-load"]
    ended.set()
    thread.join()
    assert caplog.text == ""
