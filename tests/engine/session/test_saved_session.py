"""A saved session of this model and version is loaded whole, also if others are answered. Any other is refused."""

import io
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from cases import cases
from infer import LLM, InvalidRequestError, SamplingParams, Stream
from infer.cli.chat_commands import run_command
from infer.cli.chat_session import ChatSession
from infer.compute import ops
from infer.engine.session import session_file
from infer.engine.session.session import Session
from programs import Programs
from refusals import check_refused
from test_session import GREEDY, GREEDY_VALUES, SAMPLED, SAMPLED_VALUES, check_fresh, make_model


@pytest.fixture
def talk(llm: LLM) -> Session:
    session = llm.session(system="be brief")
    session.send("hello", SamplingParams(**GREEDY_VALUES | {"max_new_tokens": 3}))
    return session


def state_of(session: Session) -> tuple[Any, ...]:
    return session.token_ids, session.messages, session.num_cached_tokens


CONTINUE = """
import json, sys
from infer import LLM, SamplingParams
session = LLM(sys.argv[1]).load_session(sys.argv[2])
results = [session.send("and now", SamplingParams(**json.loads(params))) for params in sys.argv[3:]]
print(json.dumps([[r.token_ids for r in results], results[0].reused_tokens, session.messages]))
"""


def test_a_new_process_has_equal_tokens(programs: Programs, talk: Session, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "talk.safetensors"
    talk.save(path)
    cached = talk.num_cached_tokens
    expected = [talk.send("and now", params).token_ids for params in (GREEDY, SAMPLED)]
    params = [json.dumps(values) for values in (GREEDY_VALUES, SAMPLED_VALUES)]
    done = programs.run(CONTINUE, folder, path, *params)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [expected, cached, talk.messages]


def test_a_session_is_saved_and_loaded_whole(llm: LLM, talk: Session, tmp_path: Path) -> None:
    path = tmp_path / "talk"
    talk.rewind(2)
    talk.append("raw")
    talk.save(path)
    loaded = llm.load_session(path)
    assert (state_of(loaded), loaded.num_cached_tokens) == (state_of(talk), len(loaded.token_ids))
    loaded.save(path)
    llm.load_session(path).save(tmp_path / "again")
    assert path.read_bytes() == (tmp_path / "again").read_bytes()
    result = loaded.generate(GREEDY)
    assert result.token_ids == talk.generate(GREEDY).token_ids
    assert result.reused_tokens == result.prompt_tokens - 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["again", "talk"]
    for note in ({"why": ["é", 1, None]}, {}):
        llm.session().save(path, note=note)
        empty = llm.session()
        assert (empty.load(path), empty.token_ids) == (note, [])


def test_a_chat_that_is_loaded_goes_on_where_it_was_saved(llm: LLM, tmp_path: Path) -> None:
    """Its tokens are computed again only if just its messages were saved."""
    params = SamplingParams(**GREEDY_VALUES, logit_bias={66: -float("inf")}, seed=2)
    chat = ChatSession(llm, "model", params, system="be brief")
    for text in ("hello", "forget this"):
        chat.ask(chat.question(text), lambda text: None)
    run_command(chat, "/undo")
    for name in ("talk", "talk.json"):
        run_command(chat, f"/save {tmp_path / name}")
    expected = chat.ask(chat.question("and now"), lambda text: None)
    for name, num_reused in (("talk", expected.reused_tokens), ("talk.json", 0)):
        loaded = ChatSession(llm, "model", SamplingParams())
        run_command(loaded, f"/load {tmp_path / name}")
        result = loaded.ask(loaded.question("and now"), lambda text: None)
        assert (result.token_ids, loaded.messages) == (expected.token_ids, chat.messages)
        assert (loaded.params, result.reused_tokens) == (params, num_reused)
    assert expected.reused_tokens > 20


def test_a_file_does_not_have_evicted_tokens(talk: Session, tmp_path: Path) -> None:
    """Neither its ids nor its cache has them."""
    contents, length = set[bytes](), len(talk.token_ids)
    for forgotten in ("a secret", "nothing that matters"):
        talk.append(forgotten)
        talk.rewind(len(talk.token_ids) - length)
        talk.save(tmp_path / "talk")
        contents.add((tmp_path / "talk").read_bytes())
    assert len(contents) == 1


def test_a_file_does_not_have_tokens_that_were_read_and_never_answered(
    llm: LLM, talk: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn is stopped within its prompt."""
    contents, step = [], llm.host.engine.step
    for forgotten in ("a secret", "nothing that matters"):
        held, stop = len(talk.token_ids), threading.Event()
        stream = talk.stream(forgotten, GREEDY, prefill_chunk=3, cancel=stop)

        def step_until_stopped(stream: Stream = stream, held: int = held, stop: threading.Event = stop) -> Any:
            found = step()
            if stream.sequence.num_computed > held:
                stop.set()
            return found

        monkeypatch.setattr(llm.host.engine, "step", step_until_stopped)
        assert list(stream) == []
        assert len(talk.token_ids) < len(talk._cache.lease.token_ids) < stream.result.prompt_tokens
        talk.save(tmp_path / "talk")
        contents.append((tmp_path / "talk").read_bytes())
    assert contents[0] == contents[1]


def test_every_flipped_byte_and_every_cut_is_found(llm: LLM, talk: Session, tmp_path: Path) -> None:
    talk.rewind(len(talk.token_ids) - 4)
    good, bad = tmp_path / "good", tmp_path / "bad"
    talk.save(good)
    session = llm.session()
    session.append("something else")
    before = state_of(session)
    content = good.read_bytes()
    head = 8 + int.from_bytes(content[:8], "little")
    places = {*range(0, head, 7), *range(head, len(content), 301), *range(len(content) - 20, len(content))}
    damaged = [content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :] for place in places]
    damaged += [content[:length] for length in {*range(0, head, 90), *range(head, len(content), 900)}]
    damaged += [content + b"\0", content * 2, content[:-1], b""]
    for each in damaged:
        bad.write_bytes(each)
        check_refused(lambda: session.load(bad), "bad")
    assert state_of(session) == before
    check_fresh(llm, session.token_ids, GREEDY, session.generate(GREEDY))
    session.load(good)
    assert state_of(session) == state_of(talk)


def test_a_file_of_another_model_names_what_differs(talk: Session, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "talk"
    talk.save(path)
    others = {
        "architecture": LLM(make_model(tmp_path / "deep", num_layers=3)),
        "tokenizer": LLM(make_model(tmp_path / "named", eos_token="a")),
        "weights": LLM(folder, weights="bf16"),
    }
    for name, other in others.items():
        check_refused(lambda other=other: other.load_session(path), f"saved with another .*{name}")
    fingerprints = {other.system_fingerprint for other in others.values()}
    assert len(fingerprints | {LLM(folder, kv_type="f32").system_fingerprint}) == 4
    short = LLM(folder, max_seq_len=10, reuse_prefixes=True)
    assert short.system_fingerprint == LLM(folder).system_fingerprint not in fingerprints
    check_refused(lambda: short.load_session(path), "context length is 10 ")
    assert LLM(folder, max_seq_len=100).load_session(path).token_ids == talk.token_ids


def test_a_file_of_other_kernels_is_loaded_with_its_cache(talk: Session, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "talk"
    talk.save(path)
    with ops.using("reference"):
        other = LLM(folder, kv_type="f16")
    loaded = other.load_session(path)
    assert (loaded.token_ids, loaded.num_cached_tokens) == (talk.token_ids, talk.num_cached_tokens)
    assert loaded.send("and now", GREEDY).reused_tokens > 0


def test_a_file_that_is_no_session_is_refused(
    llm: LLM, talk: Session, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = {folder / "model.safetensors": "format", folder / "tokenizer.json": "header length"}
    messages |= {folder: "not a regular file", tmp_path / "none": "cannot be read"}
    for path, message in messages.items():
        check_refused(lambda path=path: llm.load_session(path), message)
    monkeypatch.setattr(session_file, "VERSION", "0")
    talk.save(tmp_path / "old")
    monkeypatch.undo()
    check_refused(lambda: llm.load_session(tmp_path / "old"), "another version of infer")


@cases("changed",
    {"messages": [1]}, {"messages": None}, {"num_given": 9}, {"num_given": -1}, {"num_given": True},
    {"turns": [[1]]}, {"turns": [[1, 1000]]}, {"turns": [[9, 1]]}, {"turns": [[1, 5], [0, 6]]},
    {"turns": [[0, 6], [1, 5]]}, {"turns": 3},
    {"template": []},
    {"num_cached": -1}, {"num_cached": 1}, {"num_cached": 10**9}, {"num_cached": None}, {"num_cached": True},
    {"note": []}, {"token_ids": 2}, {"fingerprint": 1},
)  # fmt: skip
def test_a_file_written_by_somebody_else_is_checked(
    llm: LLM, talk: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    """Its checksums are right, and its contents are wrong, or ids or the name of a part of the model are missing."""
    write, num_lost, num_unnamed = (
        session_file.write_session,
        changed.pop("token_ids", 0),
        changed.pop("fingerprint", 0),
    )

    def write_changed(path: Path, fingerprint: Any, ids: list[int], record: Any, tensors: Any) -> None:
        named = dict([*fingerprint.items()][num_unnamed:])
        write(path, named, ids[: len(ids) - num_lost], record | changed, tensors)

    monkeypatch.setattr("infer.engine.session.session.write_session", write_changed)
    talk.rewind(len(talk.token_ids) - 8)
    talk.save(tmp_path / "talk")
    problem = "was saved with another" if num_unnamed else "num_cached must be in" if num_lost else "cannot be loaded"
    with pytest.raises(InvalidRequestError, match=problem):
        llm.load_session(tmp_path / "talk")


@pytest.mark.parametrize("name", ["write_safetensors", "fsync", "replace"])
def test_a_save_that_fails_keeps_the_old_file(
    talk: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / "talk"
    talk.save(path)
    old = path.read_bytes()
    talk.send("and now", GREEDY)
    before = state_of(talk)

    fail, owners = Mock(side_effect=OSError(28, "No space left on device")), {"fsync": os, "replace": Path}
    monkeypatch.setattr(owners.get(name, session_file), name, fail)
    check_refused(lambda: talk.save(path), "No space left")
    monkeypatch.undo()
    assert (path.read_bytes(), [entry.name for entry in tmp_path.iterdir()]) == (old, ["talk"])
    assert state_of(talk) == before
    talk.save(path)
    check_refused(lambda: talk.save(tmp_path / "no" / "such" / "folder"), "cannot be saved")


def test_messages_that_are_no_json_are_not_saved(llm: LLM, tmp_path: Path) -> None:
    session = llm.session()
    session.answer([{"role": "user", "content": "hello", "when": {1, 2}}], GREEDY)
    check_refused(lambda: session.save(tmp_path / "talk"), "only if its messages are JSON")
    assert list(tmp_path.iterdir()) == []


# While others are answered


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
    session.send("hello", GREEDY)
    expected = llm.generate("go on", GREEDY).token_ids
    with while_saving(session, path, slow_files):
        assert llm.generate("go on", GREEDY, timeout=SECONDS).token_ids == expected
    loaded = llm.load_session(path)
    assert (loaded.token_ids, loaded.num_cached_tokens) == (session.token_ids, session.num_cached_tokens)
    assert loaded.num_cached_tokens > 0


def test_a_session_whose_slot_is_taken_away_is_saved_without_a_cache(
    llm: LLM, tmp_path: Path, slow_files: list[SlowFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infer.engine.session.session_cache._SLICE_BYTES", 1)
    path, session = tmp_path / "talk", llm.session()
    session.send("hello", GREEDY)
    with while_saving(session, path, slow_files):
        llm.trim()
    loaded = llm.load_session(path)
    assert (loaded.token_ids, loaded.num_cached_tokens) == (session.token_ids, 0)
    assert loaded.send("and now", GREEDY).token_ids == session.send("and now", GREEDY).token_ids
