"""Claims about the chat at a terminal: output, keys, signals, and the restored terminal at its end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import FAKE, fake_process
from terminals import CTRL_C, CTRL_D, CTRL_Z, PROMPT, SECONDS, UNSEEN, Terminal, plain, terminal

pytestmark = pytest.mark.slow
WITHOUT_EXTRA = """
import runpy, sys
sys.modules["prompt_toolkit"] = None
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
CHAT = [*FAKE, "chat", "smollm2"]
PIPED = {"capture_output": True, "timeout": SECONDS, "check": False}


@pytest.fixture
def screen() -> Iterator[Terminal]:
    """Return a terminal with a chat at its first prompt."""
    with terminal(CHAT) as screen:
        assert "smollm2, context 100 tokens. /help lists commands, Ctrl-D leaves." in screen.until(PROMPT)
        yield screen


# Pasting


def test_a_pasted_block_is_one_message(screen: Terminal) -> None:
    for number, pasted in enumerate(("one\rtwo\r three", "/one\rtwo\r three", '"""one\\\rtwo\r three')):
        screen.press(f"\x1b[200~{pasted}\x1b[201~".encode(), "three")
        answer = plain(screen.ask("", "tokens/sec"))
        assert f"echo: {2 * number + 1} " + pasted.replace("\r", "\n") in answer
        screen.until(PROMPT)
    screen.ask("next", "echo: 7 next")
    screen.leave()


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("term", ["dumb", "without the extra", ""])
def test_without_an_editor_a_paste_is_still_one_message(term: str) -> None:
    without = [sys.executable, "-c", WITHOUT_EXTRA, *CHAT[1:]]
    command, environment = (without, {"TERM": "xterm"}) if "extra" in term else (CHAT, {"TERM": term})
    with terminal(command, **environment) as screen:
        assert ("\x1b" in screen.until("> ")) == ("extra" in term)
        shown = screen.ask("**one**\rtwo\r three", "tokens/sec")
        assert "echo: 1 **one**\ntwo\n three" in plain(shown)
        assert ("\x1b[0;1mone" in shown) == ("extra" in term)
        screen.until("> ")
        screen.ask("/undo\r/history", "(no messages yet)", "> ")
        screen.ask("one\\", "| ")
        screen.ask("two", "echo: 1 one\r\ntwo", "> ")
        screen.press(b"half" + CTRL_C, "(Ctrl-C again, Ctrl-D or /quit leaves)", "> ")
        screen.ask("slow", "echo: 3 slow")
        screen.press(CTRL_C, "(stopped)", "> ")
        screen.type(CTRL_D)
        screen.ended(0)


# Editing


def test_a_message_of_several_lines_is_edited_as_one(screen: Terminal) -> None:
    """A line ends with a backslash, within a block of quotes, or with Alt-Enter."""
    for number, keys in enumerate((b"one\\\rtwo", b'"""one\rtwo"""', b"one\x1b\rtwo")):
        screen.press(keys, "| two")
        screen.type(b"\x1b[A\x05!\x1b[B\x05\r")  # up, to the first line's end, and back
        screen.until(f"echo: {2 * number + 1} one!\r\ntwo", PROMPT)
    screen.leave()


def test_a_window_may_change_its_size_at_the_prompt_and_in_an_answer(screen: Terminal) -> None:
    screen.resize(24)
    screen.ask("words that fill more than a line", "echo: 1 words that fill\r\nmore than a line\r\n", PROMPT)
    screen.ask("slow", "echo: 3 slow")
    screen.resize(10)
    screen.until("\r\nslow echo:\r\n")
    screen.press(CTRL_C, "(stopped)")
    screen.leave()


# Format of answers


@pytest.mark.slow(cases=1)
def test_a_piped_answer_is_not_wrapped() -> None:
    text = "a line of many words " * 20
    assert subprocess.run(CHAT, input=text + "\n", text=True, **PIPED).stdout == f"echo: 1 {text} \n"


def test_a_sign_is_shown_until_the_first_word_and_markdown_is_styled(screen: Terminal) -> None:
    shown = screen.ask("read", "echo: 1 read")
    assert "\r\x1b[2m…\x1b[22m\x1b[K\r\x1b[2m… ██████████           50 %\x1b[22m\x1b[K\r\x1b[Kecho: 1 read" in shown
    screen.until(PROMPT)
    shown = screen.ask("some **bold** text", "5 tokens")
    assert "echo: 3 some \x1b[0;2m**\x1b[0;1mbold\x1b[0;2m**\x1b[0m text" in shown
    screen.until(PROMPT)
    screen.ask("think", "\x1b[2m… 3 tokens\x1b[22m\x1b[K", "echo: 5 think")
    screen.until("(thought for 3 tokens: /reasoning shows it)", PROMPT)
    screen.ask("/reasoning", "first this, then that")
    assert "…" not in screen.leave()


def test_without_colours_or_with_plain_markdown_is_left_as_it_is() -> None:
    for command, environment in (([*CHAT, "--plain"], {}), (CHAT, {"NO_COLOR": "1"})):
        with terminal(command, **environment) as screen:
            screen.until("Ctrl-D leaves.", PROMPT)
            screen.ask("some **bold** text", "echo: 1 some **bold** text", PROMPT)
            shown = screen.ask("read", "echo: 3 read")
    assert "\r…\x1b[K\r… ██████████           50 %\x1b[K\r\x1b[Kecho: 3 read" in shown
    assert "\x1b[2m" not in screen.shown


def test_quiet_shows_nothing_but_text() -> None:
    with terminal([*CHAT, "-q"]) as screen:
        assert plain(screen.until(PROMPT)) == ""
        screen.ask("one", "\x1b[?2004l")
        assert plain(screen.until(PROMPT)) == "echo: 1 one\n"
        screen.type(CTRL_D)
        screen.ended(0)


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_bytes_that_are_not_utf8_are_named_in_every_locale(locale: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUTF8"} | {"LC_ALL": locale}
    done = subprocess.run(CHAT, input=b"caf\xff\n", env=environment, **PIPED)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"infer: stdin is not UTF-8: byte 3 of a line is invalid")


# History


@pytest.mark.slow(cases=1)
def test_messages_are_found_again_in_the_next_chat(tmp_path: Path) -> None:
    history = tmp_path / "new" / "history"
    with terminal(CHAT, INFER_HISTORY=str(history)) as screen:
        screen.until(PROMPT)
        for message in ("the first", " not kept", "\x1b[200~two\rlines\x1b[201~"):
            screen.ask(message, "tokens/sec", PROMPT)
        screen.leave()
    assert history.stat().st_mode & 0o777 == 0o600
    with terminal(CHAT, INFER_HISTORY=str(history)) as screen:
        screen.until(PROMPT)
        shown = screen.ask("\x1b[A\x1b[A", "tokens/sec")  # twice up, because the last line is /quit
        assert "echo: 1 two\nlines" in plain(shown)
        screen.until(PROMPT)
        screen.press(b"\x12the f", "irst")  # Ctrl-R
        screen.ask("", "echo: 3 the first")
        screen.leave()
    assert [json.loads(line) for line in history.read_text().splitlines()][:3] == ["the first", "two\nlines", "/quit"]


def test_a_history_that_cannot_be_written_is_named_once(tmp_path: Path) -> None:
    with terminal(CHAT, columns=300, INFER_HISTORY=str(tmp_path)) as screen:
        screen.until(PROMPT)
        told = f"infer: {tmp_path} cannot be written: Is a directory (INFER_HISTORY names another file, or none)"
        screen.ask("one", told, "echo: 1 one")
        screen.leave()
        assert screen.shown.count("cannot be written") == 1


@pytest.mark.slow(cases=1)
def test_tab_completes_commands_and_files_and_a_result_follows_its_call(screen: Terminal, tmp_path: Path) -> None:
    (tmp_path / "two words.json").write_text("{}")
    (tmp_path / "tools.json").write_text('[{"type": "function", "function": {"name": "add"}}]')
    screen.ask("/hist\t", "(no messages yet)", PROMPT)
    shown = screen.press(b"/re\t", PROMPT)
    assert {"/reasoning", "/regenerate", "/reset", "/result", "/retry"} <= set(plain(shown).split())
    screen.press(CTRL_C, "leaves)")
    screen.ask(f"/load {tmp_path}/two wo\t", "not a conversation saved by /save", PROMPT)
    screen.ask(f"/tools {tmp_path}/tools.json", "(the model may call add)", PROMPT)
    screen.ask("one", 'call add {"a": 1}', "> /result")
    screen.ask("7", "echo: 3 7")
    screen.leave()


# Another question


def test_the_last_question_is_edited_at_the_prompt_or_in_an_editor(tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\necho "from an editor" > "$1"\n')
    editor.chmod(0o755)
    for visual in ("", str(editor)):
        with terminal(CHAT, EDITOR="", VISUAL=visual) as screen:
            screen.until(PROMPT)
            screen.ask("one", "echo: 1 one", PROMPT)
            if visual:
                screen.ask("/edit", "echo: 1 from an editor", PROMPT)
                editor.unlink()
                screen.ask("/edit", "infer:", PROMPT)
            else:
                screen.ask("/edit", "> one")
                screen.ask(" more", "echo: 1 one more")
            screen.leave()


def test_without_a_terminal_the_new_words_are_given() -> None:
    done = subprocess.run(CHAT, input="one\n/edit\n/edit two\n/regenerate 5\n", text=True, **PIPED)
    assert done.stdout == "echo: 1 one \necho: 1 two \necho: 1 two \n"
    assert "infer: /edit needs a text if there is no terminal: /edit TEXT\n" in done.stderr


# Signals


@pytest.mark.slow(cases=1)
def test_ctrl_c_stops_the_answer_and_a_second_one_at_an_empty_prompt_leaves(screen: Terminal) -> None:
    screen.ask("slow", "echo: 1 slow")
    assert screen.local_flags() & UNSEEN == 0
    screen.press(CTRL_C, "(stopped)", PROMPT)
    screen.ask("two", "echo: 3 two", PROMPT)
    for text in (b"half a thought", b"other half"):
        screen.press(text, text.decode())
        screen.press(CTRL_C, "(Ctrl-C again, Ctrl-D or /quit leaves)", PROMPT)
    screen.type(CTRL_C)
    screen.ended(0)
    assert "^C" not in screen.shown
    assert screen.local_flags() & UNSEEN == UNSEEN


def test_text_typed_during_an_answer_is_the_next_message(screen: Terminal) -> None:
    screen.ask("slow", "echo: 1 slow")
    screen.type(b"typed early")
    assert screen.until("echo: 1 slow echo: 1 slow").count("typed") == 0
    screen.process.send_signal(signal.SIGINT)  # Ctrl-C would drop the typed text
    screen.until("(stopped)", PROMPT)
    screen.ask("", "echo: 3 typed early")
    screen.leave()


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("when", ["at the prompt", "in an answer"])
def test_sigterm_ends_the_chat_with_the_terminal_as_it_was(screen: Terminal, when: str) -> None:
    if when == "in an answer":
        screen.ask("slow", "echo: 1 slow")
    screen.process.send_signal(signal.SIGTERM)
    screen.ended(143)
    assert screen.local_flags() & UNSEEN == UNSEEN


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("question", ["slow\n", "one\n"])
def test_without_a_terminal_a_signal_ends_the_chat(number: signal.Signals, status: int, question: str) -> None:
    with fake_process("chat", "smollm2", "-q") as chat:
        chat.stdin.write(question.encode())
        chat.stdin.flush()
        begin = os.read(chat.stdout.fileno(), 100)
        chat.send_signal(number)
        rest, errors = chat.communicate(timeout=SECONDS)
    assert (chat.returncode, errors) == (status, b"")
    assert (begin + rest).startswith(b"echo: 1 "[: len(begin)])
    assert (begin + rest).endswith(b"\n")


def test_a_chat_that_waits_for_a_message_sleeps() -> None:
    with fake_process("chat", "smollm2", "-q") as chat:
        chat.stdin.write(b"one\n")
        chat.stdin.flush()
        assert os.read(chat.stdout.fileno(), 100)
        status, counts = Path(f"/proc/{chat.pid}/status"), list[str]()
        for seconds in (0.5, 0.6):
            time.sleep(seconds)
            counts += [line for line in status.read_text().splitlines() if line.startswith("voluntary_ctxt_switches")]
        chat.communicate(timeout=SECONDS)
    assert counts[0] == counts[1]


def test_ctrl_z_restores_the_terminal_and_fg_continues() -> None:
    with terminal(["bash", "--norc", "--noprofile", "-i"]) as screen:
        screen.until("$ ")
        screen.ask(" ".join(CHAT), "Ctrl-D leaves.", PROMPT)
        screen.press(b"slow", "slow")
        screen.press(CTRL_Z, "Stopped", "$ ")
        screen.ask("fg", "> slow")  # the typed text is shown again
        screen.ask("", "echo: 1 slow")
        screen.press(CTRL_Z, "Stopped", "$ ")
        assert {"echo", "echoctl"} <= set(screen.ask("stty -a", "flusho").split())
        screen.ask("fg", "echo: 1 slow", "echo: 1 slow")
        assert screen.local_flags() & UNSEEN == 0
        screen.press(CTRL_C, "(stopped)", PROMPT)
        screen.ask("/bye", "$ ")
        assert "^" not in screen.shown.partition("(stopped)")[0].partition("Stopped")[0]
