"""Claims about the chat's commands: answering again, leaving, showing a conversation, and files."""

import json
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from cases import cases
from fake_cli import FakeModel
from infer.cli import chat_commands
from infer.cli.chat_commands import Question, calls_shown, completions, run_command
from infer.cli.chat_prompt import history_path, read_history
from infer.cli.chat_session import ChatSession
from infer.cli.commands.replay_command import read_permalink
from infer.errors import InvalidRequestError
from infer.outputs import GenerationResult
from infer.sampling_params import SamplingParams


@pytest.fixture
def session() -> ChatSession:
    return ChatSession(FakeModel(), "fake", SamplingParams(temperature=0.7))


def ask(session: ChatSession, *texts: str) -> None:
    for text in texts:
        session.ask(session.question(text), lambda piece: None)


def shown_lines(session: ChatSession, command: str) -> list[str]:
    told = run_command(session, command)
    assert isinstance(told, chat_commands.Table)
    return told.lines


def asked_by(session: ChatSession, command: str = "/retry") -> Question:
    asked = run_command(session, command)
    assert isinstance(asked, Question)
    return asked


def refused(session: ChatSession, command: str, message: str | None = None) -> str:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        run_command(session, command)
    return str(caught.value)


def test_retry_asks_the_last_question_again_and_takes_the_place_of_its_answer(session: ChatSession) -> None:
    run_command(session, "/system be brief")
    ask(session, "one", "two")
    messages = session.messages
    asked = asked_by(session)
    assert (asked.messages, asked.remark) == (messages[:-1], "")
    shown: list[str] = []
    session.ask(asked.messages, shown.append)
    assert session.messages == messages
    assert "".join(shown) == messages[-1]["content"] == "echo: [be brief] 4 two "


def test_a_retry_that_fails_or_is_stopped_keeps_the_old_answer(session: ChatSession, monkeypatch: Any) -> None:
    ask(session, "one")
    messages, stopped = session.messages, GenerationResult([], "", "abort", 3, 0, FakeModel().generate("x").timing)
    monkeypatch.setattr(session.memory, "answer", Mock(side_effect=[InvalidRequestError("no"), stopped]))
    with pytest.raises(InvalidRequestError):
        session.ask(asked_by(session).messages, lambda text: None)
    assert session.messages == messages
    session.ask(asked_by(session).messages, lambda text: None)
    assert session.messages == messages


def test_a_retry_that_gives_the_same_answer_says_so(session: ChatSession) -> None:
    refused(session, "/retry", "no question")
    ask(session, "one")
    run_command(session, "/set temperature 0")
    assert "temperature is 0" in asked_by(session).remark


def test_regenerate_takes_another_seed_or_the_one_that_is_given(session: ChatSession) -> None:
    run_command(session, "/set seed 4")
    ask(session, "one")
    assert asked_by(session).params == SamplingParams(temperature=0.7)
    assert asked_by(session, "/regenerate 9").params == SamplingParams(temperature=0.7, seed=9)
    for wrong in ("x", "-1", "1.5"):
        refused(session, f"/regenerate {wrong}", "(?i)seed")


def test_edit_asks_the_last_question_in_other_words(session: ChatSession) -> None:
    ask(session, "one", "two")
    before = session.messages[:2]
    assert run_command(session, "/edit") == chat_commands.Edit(before, "two")
    assert run_command(session, "/edit three") == Question([*before, {"role": "user", "content": "three"}])


def test_trace_shows_a_token_of_the_last_answer(session: ChatSession) -> None:
    refused(session, "/trace", "no answer yet")
    ask(session, "one")
    assert shown_lines(session, "/trace 2")[0] == "step 2, after '[1, 1, 1]': position 4, seed 7"
    for wrong in ("x", "2 x.svg", "0.5"):
        refused(session, f"/trace {wrong}", "/trace")


def test_link_holds_the_messages_or_the_ids_where_these_are_spelt_otherwise(session: ChatSession) -> None:
    run_command(session, "/set top_k 5")
    ask(session, "one")
    (line,) = shown_lines(session, "/link")
    link = read_permalink(line)
    assert (link.route, link.fingerprint) == ("/v1/chat/completions", "fp_fake")
    assert (link.body["messages"], link.body["seed"], link.body["top_k"]) == (session.messages[:1], 7, 5)
    session.last = session.last_answer()._replace(prompt_ids=[4, 5])
    link = read_permalink(shown_lines(session, "/link")[0])
    assert (link.route, link.body["prompt"]) == ("/v1/completions", [4, 5])
    session.tools = TOOLS
    ask(session, "one")
    assert read_permalink(shown_lines(session, "/link")[0]).body["tools"] == TOOLS


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("add", "mul")]


def test_calls_wait_for_results_and_nothing_is_run(session: ChatSession, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    assert run_command(session, "/tools") == "(no tools; /tools FILE.json adds tools)"
    refused(session, "/result 3", "no call that waits")
    assert run_command(session, f"/tools {tmp_path}/tools.json") == "(the model may call add, mul)"
    ask(session, "one")
    shown = ['call add {"a": 1}', 'call mul {"a": 1}']
    hint = "(/result TEXT answers the first call, a message continues without)"
    assert calls_shown(session) == "\n".join([*shown, hint])
    assert run_command(session, "/history") == "\n".join(["> one", *shown])
    refused(session, "/result", "/result needs a text")
    assert run_command(session, "/result 3") == "\n".join([shown[1], hint])
    asked = asked_by(session, "/result 4")
    assert asked.messages[2:] == [
        {"role": "tool", "tool_call_id": "id0", "name": "add", "content": "3"},
        {"role": "tool", "tool_call_id": "id1", "name": "mul", "content": "4"},
    ]
    session.ask(asked.messages, lambda text: None)
    assert (session.messages[-1]["content"], calls_shown(session)) == ("echo: 4 4 ", "")
    run_command(session, f"/save {tmp_path}/talk.json")
    messages, tools = session.messages, session.tools
    run_command(session, "/reset")
    assert run_command(session, "/tools off") == "(no tools; /tools FILE.json adds tools)"
    run_command(session, f"/load {tmp_path}/talk.json")
    assert (session.messages, session.tools) == (messages, tools)


@pytest.mark.parametrize("content", ["", "{}", '"add"', "[1]", '[{"type": "function", "function": {"name": "a b"}}]'])
def test_a_file_that_holds_no_tools_is_named(session: ChatSession, tmp_path: Path, content: str) -> None:
    (tmp_path / "tools.json").write_text(content)
    refused(session, f"/tools {tmp_path}/tools.json", r"tools\.json must contain a JSON list of functions")
    refused(session, f"/tools {tmp_path}/none", "cannot be read")


def test_reasoning_is_folded(session: ChatSession) -> None:
    ask(session, "one")
    assert run_command(session, "/reasoning") == "(the last answer has no reasoning)"
    ask(session, "think")
    assert run_command(session, "/reasoning") == "first this, then that"


def test_another_model_continues_with_the_messages_and_settings() -> None:
    opened: list[str] = []

    def open_model(name: str) -> tuple[FakeModel, SamplingParams]:
        if name == "broken":
            raise InvalidRequestError("there is no model broken")
        opened.append(name)
        return FakeModel(), SamplingParams(temperature=0.1, top_p=0.8)

    session = ChatSession(FakeModel(), "fake", SamplingParams(temperature=0.7), open_model=open_model)
    run_command(session, "/set temperature 0.5")
    ask(session, "one")
    messages = session.messages
    refused(session, "/model broken", "no model broken")
    assert (session.name, session.params.top_p) == ("fake", 1.0)
    assert run_command(session, "/model other") == "(other, context 100 tokens)"
    assert (opened, session.messages) == (["other"], messages)
    assert session.params == SamplingParams(temperature=0.5, top_p=0.8)
    refused(session, "/trace", "no answer yet")
    ask(session, "two")
    assert session.messages[-1]["content"] == "echo: 3 two "


def test_the_line_may_become(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INFER_MODELS", str(tmp_path / "models"))
    for name in ("talk.json", "talk", "text", ".hidden.json", "models/own.gguf", "two words.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(8) if name == "talk" else b"some text")
    for line in ("hello", "/none x", "/load no/such/"):
        assert completions(line) == []
    assert completions("/re") == ["/reasoning", "/regenerate", "/reset", "/result", "/retry"]
    assert completions("/set top") == ["/set top_k ", "/set top_p "]
    assert completions("/load ") == ["/load models/", "/load talk", "/load talk.json", "/load two words.json"]
    assert completions("/save t") == ["/save talk", "/save talk.json", "/save text", "/save two words.json"]
    assert completions(f"/load {tmp_path}/ta") == [f"/load {tmp_path}/talk", f"/load {tmp_path}/talk.json"]
    files = "/load two w:ords.json", "/load .h:idden.json", "/model models/:own.gguf"
    for line in ("/ret:ry", "/set seed o:ff", *files):
        assert completions(line.partition(":")[0]) == [line.replace(":", "")]


def test_every_word_for_leaving_leaves(session: ChatSession) -> None:
    for name in ("/quit", "/exit", "/bye", "/q"):
        with pytest.raises(chat_commands.Leave):
            run_command(session, name)


def test_help_lists_every_name(session: ChatSession) -> None:
    shown = str(run_command(session, "/help"))
    assert "/set NAME VALUE" in [re.split("  +", line.strip())[0] for line in shown.splitlines()]
    assert set(chat_commands.BY_NAME) <= set(re.findall(r"/[a-z?]+", shown))
    assert all(command.meaning in shown for command in chat_commands.COMMANDS)


def test_history_shows_the_conversation(session: ChatSession) -> None:
    assert run_command(session, "/history") == "(no messages yet)"
    run_command(session, "/system be brief")
    ask(session, "one")
    assert run_command(session, "/history") == "[system] be brief\n> one\necho: [be brief] 2 one "


def test_after_a_load_the_last_two_turns_are_shown_in_short(session: ChatSession, tmp_path: Path) -> None:
    ask(session, "first", "second\nline", "third " * 100_000)
    run_command(session, f"/save {tmp_path / 'talk.json'}")
    loaded, *turns = str(run_command(session, f"/load {tmp_path / 'talk.json'}")).split("\n")
    assert loaded.startswith("(loaded 6 messages from ")
    assert turns[:2] == ["> second line", "echo: 3 second line"]
    assert [turn[:14] for turn in turns[2:]] == ["> third third ", "echo: 5 third "]
    assert all(len(turn) == 160 and turn.endswith("…") for turn in turns[2:])
    refused(session, "/trace", "no answer yet")


def test_set_changes_any_parameter_or_nothing(session: ChatSession) -> None:
    for line in ("temperature 0.7", "top-k 5", "max_tokens 9", "stop ###", "seed 4", "ignore_eos true"):
        run_command(session, f"/set {line}")
    assert session.params == SamplingParams(temperature=0.7, top_k=5, max_tokens=9, stop="###", seed=4, ignore_eos=True)
    run_command(session, "/set seed off")
    before = session.params
    for line in ("temperature hot", "top_p 3", "nothing 1", "temperature", "seed -1"):
        refused(session, f"/set {line}")
    assert (session.params, before.seed) == (before, None)
    assert ["temperature", "0.7"] in [line.split() for line in str(run_command(session, "/set")).splitlines()]


@pytest.mark.parametrize("name", ["talk.json", "talk", "talk.infer"])
def test_a_conversation_is_saved_and_loaded(session: ChatSession, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    run_command(session, "/system be brief")
    ask(session, "one")
    values = {"temperature": 0.5, "stop": ["é"], "logit_bias": {3: -float("inf")}, "stop_token_ids": [5]}
    session.params = SamplingParams(**values, choice=["b", "a"])
    run_command(session, f"/save {path}")
    loaded = ChatSession(FakeModel(), "fake", SamplingParams())
    assert "3 messages" in run_command(loaded, f"/load {path}")
    assert (loaded.messages, loaded.params) == (session.messages, session.params)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
    assert path.read_bytes().startswith(b"{" if name == "talk.json" else b"\0")
    path.rename(tmp_path / "renamed")
    run_command(loaded, "/reset")
    assert "3 messages" in run_command(loaded, f"/load {tmp_path / 'renamed'}")


@cases("content",
    "", "{", "[]", "{}", "\udcff", "[" * 100_000, '{"format": "infer-chat", "version": 2}',
    '{"format": "infer-chat", "version": 1, "messages": [1], "params": {}}',
    '{"format": "infer-chat", "version": 1, "messages": [{"role": "x", "content": "a"}], "params": {}}',
    '{"format": "infer-chat", "version": 1, "messages": [], "params": {"top_p": 5}}',
    '{"format": "infer-chat", "version": 1, "messages": [], "params": {"nope": 5}}',
    '{"format": "infer-chat", "version": 1, "messages": [], "params": null}',
)  # fmt: skip
def test_a_bad_file_changes_nothing_and_is_named_once(session: ChatSession, tmp_path: Path, content: str) -> None:
    path = tmp_path / "talk.json"
    path.write_text(content, encoding="utf-8", errors="surrogateescape")
    ask(session, "one")
    messages, params = session.messages, session.params
    assert refused(session, f"/load {path}").count(str(path)) == 1
    assert (session.messages, session.params) == (messages, params)


def test_a_save_that_fails_keeps_the_old_file(session: ChatSession, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "talk.json"
    run_command(session, f"/save {path}")
    old = path.read_bytes()

    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    refused(session, f"/save {path}", "No space left")
    assert ([entry.name for entry in tmp_path.iterdir()], path.read_bytes()) == (["talk.json"], old)


def test_reset_forgets_all_but_the_system_message(session: ChatSession) -> None:
    run_command(session, "/system be brief")
    ask(session, "one")
    run_command(session, "/reset")
    assert session.messages == [{"role": "system", "content": "be brief"}]
    run_command(session, "/system none")
    assert session.messages == []
    ask(session, "one")
    assert (run_command(session, "/clear"), session.messages) == ("(a new conversation)", [])


def test_undo_forgets_the_last_question_and_its_answer(session: ChatSession) -> None:
    run_command(session, "/system be brief")
    ask(session, "one")
    before = session.messages
    ask(session, "two")
    run_command(session, "/undo")
    assert session.messages == before
    run_command(session, "/undo")
    assert run_command(session, "/undo") == "(nothing was asked)"
    assert session.messages == [{"role": "system", "content": "be brief"}]


def test_stats_say_what_there_is(session: ChatSession) -> None:
    assert run_command(session, "/stats") == "(no answer yet)"
    ask(session, "one")
    assert "answers 1, 3 tokens" in run_command(session, "/stats")


def test_a_saved_top_p_of_0_still_keeps_one_token(session: ChatSession, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    run_command(session, f"/save {path}")
    saved = json.loads(path.read_text())
    path.write_text(json.dumps(saved | {"params": saved["params"] | {"top_p": 0.0, "stop": []}}))
    run_command(session, f"/load {path}")
    assert 0 < session.params.top_p < 1e-6
    assert session.params.stop is None


def test_a_save_makes_no_folders(session: ChatSession, tmp_path: Path) -> None:
    for name in ("new/talk", "new/talk.json"):
        refused(session, f"/save {tmp_path / name}", r"cannot be written: there is no folder .*new$")
    for name in (tmp_path, f"{tmp_path}/"):
        refused(session, f"/save {name}", "it is a folder")
    refused(session, "/save ~nobody-here/x", "~nobody-here/x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["none", "none.json", "folder", "folder.json", "/dev/zero", "a\0b"])
def test_a_file_that_cannot_be_loaded_is_named_once(session: ChatSession, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.json").mkdir()
    told = refused(session, f"/load {tmp_path / name}")
    assert told.count(str(tmp_path / name).replace("\0", r"\x00")) == 1
    assert "no JSON" not in told


@cases(
    "environment expected",
    ({"INFER_HISTORY": ""}, None),
    ({"INFER_HISTORY": "~/typed"}, "/home/me/typed"),
    ({"INFER_HISTORY": "~nobody-here/x"}, None),
    ({"XDG_STATE_HOME": "/state"}, "/state/infer/history"),
    ({}, "/home/me/.local/state/infer/history"),
)
def test_typed_lines_are_stored_in(monkeypatch: Any, environment: dict[str, str], expected: str | None) -> None:
    monkeypatch.setattr(os, "environ", {"HOME": "/home/me", **environment})
    assert history_path() == (None if expected is None else Path(expected))


def test_a_history_of_another_s_making_is_read_as_far_as_it_is_one(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_bytes(b'"one"\n{"a": 1}\n\xff\n"half\n"two\\nlines"\n')
    assert read_history(path) == ["one", "two\nlines"]
    path.write_text("".join(f"{json.dumps(f'message {i}')}\n" for i in range(2001)))
    assert (read_history(path)[0], len(path.read_bytes().splitlines())) == ("message 1001", 1000)
    assert read_history(tmp_path) == []
