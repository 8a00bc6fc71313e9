"""A session is saved while others are answered, and while the engine takes its slot away."""

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from infer import LLM, SamplingParams
from infer.engine.session import session_file

ANSWER = SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)
SECONDS = 300.0


class SlowFile(io.BufferedWriter):
    """A file whose third write waits for `may_write`. The header takes two writes."""

    def __init__(self, file: Any) -> None:
        super().__init__(file.raw)
        self._num_writes = 0
        self.is_waiting, self.may_write = threading.Event(), threading.Event()

    def write(self, block: Any) -> int:
        self._num_writes += 1
        if self._num_writes == 3:
            self.is_waiting.set()
            assert self.may_write.wait(SECONDS)
        return super().write(block)


@pytest.fixture
def slow_files(monkeypatch: pytest.MonkeyPatch) -> list[SlowFile]:
    """Return the slow files that were written, in their order."""
    replacing, files = session_file.replacing, list[SlowFile]()

    @contextmanager
    def replacing_slowly(path: Path) -> Iterator[Any]:
        with replacing(path) as file:
            files.append(SlowFile(file))
            if len(files) > 1:
                files[-1].may_write.set()
            yield files[-1]
            files[-1].detach()

    monkeypatch.setattr(session_file, "replacing", replacing_slowly)
    return files


@contextmanager
def while_saving(session: Any, path: Path, slow_files: list[SlowFile]) -> Iterator[None]:
    thread = threading.Thread(target=session.save, args=[path])
    thread.start()
    try:
        while not slow_files:
            assert thread.is_alive()
            thread.join(0.01)
        assert slow_files[0].is_waiting.wait(SECONDS)
        yield
    finally:
        for file in slow_files:
            file.may_write.set()
        thread.join(SECONDS)


def test_another_is_answered_while_a_session_is_saved(llm: LLM, tmp_path: Path, slow_files: list[SlowFile]) -> None:
    path, session = tmp_path / "talk", llm.session()
    session.send("hello", ANSWER)
    expected = llm.generate("go on", ANSWER).token_ids
    with while_saving(session, path, slow_files):
        assert llm.generate("go on", ANSWER, timeout=SECONDS).token_ids == expected
    loaded = llm.load_session(path)
    assert (loaded.token_ids, loaded.num_cached_tokens) == (session.token_ids, session.num_cached_tokens)
    assert loaded.num_cached_tokens > 0


def test_a_session_whose_slot_is_taken_away_is_saved_without_a_cache(
    llm: LLM, tmp_path: Path, slow_files: list[SlowFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infer.engine.session.session_cache._SLICE_BYTES", 1)
    path, session = tmp_path / "talk", llm.session()
    session.send("hello", ANSWER)
    with while_saving(session, path, slow_files):
        llm.trim()
    loaded = llm.load_session(path)
    assert (loaded.token_ids, loaded.num_cached_tokens) == (session.token_ids, 0)
    assert loaded.send("and now", ANSWER).token_ids == session.send("and now", ANSWER).token_ids
