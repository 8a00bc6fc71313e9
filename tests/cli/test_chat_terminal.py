"""Claims about the chat at a terminal: output, keys, signals, and the restored terminal at its end."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from watched import python_command

PROGRAM = str(Path(__file__).parents[1] / "helpers" / "fake_cli.py")
# The child makes the terminal its own, so that Ctrl-C reaches it as from a keyboard.
OWN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)
WITHOUT_EXTRA = """
import runpy, sys
sys.modules["prompt_toolkit"] = sys.modules["rich"] = None
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
CHAT = [sys.executable, PROGRAM, "chat", "smollm2"]
SECONDS = 40.0  # limit of the wait for an output
UNSEEN = termios.ECHO | termios.ECHOCTL
CTRL_C, CTRL_D, CTRL_Z = b"\x03", b"\x04", b"\x1a"


class Terminal:
    """A terminal with a program in it. Its output is read up to each expected text."""

    def __init__(self, descriptor: int, process: subprocess.Popen[bytes]) -> None:
        self.descriptor, self.process = descriptor, process
        self.unread, self.shown = b"", ""

    def until(self, awaited: str) -> str:
        """Return the output since the last call, up to the text."""
        ends = time.monotonic() + SECONDS
        while awaited.encode() not in self.unread and time.monotonic() < ends:
            self.read()
        assert awaited.encode() in self.unread, self.shown + self.unread.decode(errors="replace")
        shown, _, self.unread = self.unread.partition(awaited.encode())
        self.shown += (text := shown.decode(errors="replace") + awaited)
        return text

    def type(self, keys: bytes) -> None:
        os.write(self.descriptor, keys)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def local_flags(self) -> int:
        flags: int = termios.tcgetattr(self.descriptor)[3]
        return flags

    def prompt(self) -> str:
        """Return the output up to the next prompt, which the line editor begins with this mark."""
        return self.until("\x1b[?2004h")

    def leave(self) -> str:
        """Leave the chat, and return the rest of the output."""
        self.type(b"/quit\r")
        return self.ended(0)

    def ended(self, status: int) -> str:
        """Wait until the program has ended with this status, and return the rest of the output."""
        ends = time.monotonic() + SECONDS
        while self.process.poll() is None and time.monotonic() < ends:
            self.read()
        assert self.process.wait(timeout=20) == status
        while self.read():
            pass
        rest, self.unread = self.unread.decode(errors="replace"), b""
        self.shown += rest
        return rest

    def read(self) -> bool:
        """Read output for a moment. Return False if there is none."""
        if not select.select([self.descriptor], [], [], 0.2)[0]:
            return False
        with suppress(OSError):  # the other end is closed
            self.unread += (taken := os.read(self.descriptor, 4096))
            return taken != b""
        return False


@contextmanager
def terminal(command: list[str], columns: int = 80, **environment: str) -> Iterator[Terminal]:
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(
        python_command(OWN_TERMINAL, *command),
        stdin=child,
        stdout=child,
        stderr=child,
        start_new_session=True,
        env=inherited | {"TERM": "xterm", "PS1": "$ ", "INFER_HISTORY": ""} | environment,
    )
    os.close(child)
    try:
        yield Terminal(parent, process)
    finally:
        process.kill()
        process.wait()
        os.close(parent)


def plain(text: str) -> str:
    """Return the text without sequences that move the cursor or set colours."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", text)


def test_the_header_shows_the_model_and_its_commands() -> None:
    with terminal(CHAT) as screen:
        assert "smollm2, context 100 tokens. /help lists commands, Ctrl-D leaves." in screen.prompt()
        screen.type(CTRL_D)
        screen.ended(0)


# Pasting


@pytest.mark.parametrize("pasted", [b"one\rtwo\r three", b"/one\rtwo\r three", b'"""one\\\rtwo\r three'])
def test_a_pasted_block_is_one_message(pasted: bytes) -> None:
    with terminal(CHAT) as screen:
        screen.prompt()
        screen.type(b"\x1b[200~" + pasted + b"\x1b[201~")
        screen.until("three")
        screen.type(b"\r")
        answer = plain(screen.until("tokens/sec"))
        assert "echo: 1 " + pasted.decode().replace("\r", "\n") in answer
        screen.type(b"next\r")
        screen.until("echo: 3 next")
        screen.leave()


@pytest.mark.parametrize("term", ["dumb", "", "without the extra"])
def test_without_an_editor_a_paste_is_still_one_message(term: str) -> None:
    without = [sys.executable, "-c", WITHOUT_EXTRA, PROGRAM, *CHAT[2:]]
    command, environment = (without, {"TERM": "xterm"}) if "extra" in term else (CHAT, {"TERM": term})
    with terminal(command, **environment) as screen:
        assert ("\x1b" in screen.until("> ")) == ("extra" in term)
        screen.type(b"one\rtwo\r three\r")
        assert "echo: 1 one\ntwo\n three" in plain(screen.until("tokens/sec"))
        screen.until("> ")
        screen.type(b"/undo\r/history\r")
        screen.until("(no messages yet)")
        screen.until("> ")
        screen.type(b"one\\\r")
        screen.until("| ")
        screen.type(b"two\r")
        screen.until("echo: 1 one\r\ntwo")
        screen.until("> ")
        screen.type(b"half" + CTRL_C)
        screen.until("(Ctrl-C again, Ctrl-D or /quit leaves)")
        screen.until("> ")
        screen.type(b"slow\r")
        screen.until("echo: 3 slow")
        screen.type(CTRL_C)
        screen.until("(stopped)")
        screen.until("> ")
        screen.type(CTRL_D)
        screen.ended(0)


# Editing


@pytest.mark.parametrize(
    "keys",
    [b"one\\\rtwo", b'"""one\rtwo"""', b"one\x1b\rtwo"],
    ids=["backslash", "block", "Alt-Enter"],
)
def test_a_message_of_several_lines_is_edited_as_one(keys: bytes) -> None:
    with terminal(CHAT) as screen:
        screen.prompt()
        screen.type(keys)
        screen.until("| two")
        screen.type(b"\x1b[A\x05!\x1b[B\x05\r")  # up, to the first line's end, and back
        screen.until("echo: 1 one!\r\ntwo")
        screen.leave()


def test_a_window_may_change_its_size_at_the_prompt_and_in_an_answer() -> None:
    with terminal(CHAT) as screen:
        screen.prompt()
        screen.resize(24)
        screen.type(b"words that fill more than a line\r")
        screen.until("echo: 1 words that fill\r\nmore than a line\r\n")
        screen.prompt()
        screen.type(b"slow\r")
        screen.until("echo: 3 slow")
        screen.resize(10)
        screen.until("\r\nslow echo:\r\n")
        screen.type(CTRL_C)
        screen.until("(stopped)")
        screen.leave()


# Format of answers


def test_a_piped_answer_is_not_wrapped() -> None:
    text = "a line of many words " * 20
    done = subprocess.run(CHAT, input=text + "\n", capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == f"echo: 1 {text} \n"


def test_a_sign_is_shown_until_the_first_word() -> None:
    with terminal(CHAT) as screen:
        screen.prompt()
        screen.type(b"read\r")
        shown = screen.until("echo: 1 read")
        assert "\r\x1b[2m…\x1b[22m\x1b[K\r\x1b[2m… ██████████           50 %\x1b[22m\x1b[K\r\x1b[Kecho: 1 read" in shown
        assert "…" not in screen.leave()
    with terminal(CHAT, NO_COLOR="1") as screen:
        screen.prompt()
        screen.type(b"read\r")
        assert "\r…\x1b[K\r… ██████████           50 %\x1b[K\r\x1b[Kecho: 1 read" in screen.until("echo: 1 read")
        assert "\x1b[2m" not in screen.shown


def test_quiet_shows_nothing_but_text() -> None:
    with terminal([*CHAT, "-q"]) as screen:
        assert plain(screen.prompt()) == ""
        screen.type(b"one\r")
        screen.until("\x1b[?2004l")
        assert plain(screen.prompt()) == "echo: 1 one\n"
        screen.leave()


def test_markdown_is_styled_and_plain_leaves_it(tmp_path: Path) -> None:
    with terminal(CHAT) as screen:
        screen.prompt()
        screen.type(b"some **bold** text\r")
        assert "echo: 1 some \x1b[0;2m**\x1b[0;1mbold\x1b[0;2m**\x1b[0m text" in screen.until("5 tokens")
        screen.leave()
    for command, environment in ([[*CHAT, "--plain"], {}], [CHAT, {"NO_COLOR": "1"}], [CHAT, {"TERM": "dumb"}]):
        with terminal(command, **environment) as screen:
            screen.until("Ctrl-D leaves.")
            screen.until("> " if "TERM" in environment else "\x1b[?2004h")
            screen.type(b"some **bold** text\r")
            screen.until("echo: 1 some **bold** text")


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_bytes_that_are_not_utf8_are_named_in_every_locale(locale: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUTF8"} | {"LC_ALL": locale}
    done = subprocess.run(CHAT, input=b"caf\xff\n", capture_output=True, timeout=60, check=False, env=environment)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"infer: stdin is not UTF-8: byte 3 of a line is invalid")


# History


def test_messages_are_found_again_in_the_next_chat(tmp_path: Path) -> None:
    history = tmp_path / "new" / "history"
    with terminal(CHAT, INFER_HISTORY=str(history)) as screen:
        screen.prompt()
        for message in (b"the first\r", b" not kept\r", b"\x1b[200~two\rlines\x1b[201~\r"):
            screen.type(message)
            screen.until("tokens/sec")
            screen.prompt()
        screen.leave()
    assert history.stat().st_mode & 0o777 == 0o600
    with terminal(CHAT, INFER_HISTORY=str(history)) as screen:
        screen.prompt()
        screen.type(b"\x1b[A\x1b[A\r")  # twice up, because the last line is /quit
        assert "echo: 1 two\nlines" in plain(screen.until("tokens/sec"))
        screen.prompt()
        screen.type(b"\x12the f")  # Ctrl-R
        screen.until("irst")
        screen.type(b"\r")
        screen.until("echo: 3 the first")
        screen.leave()
    assert [json.loads(line) for line in history.read_text().splitlines()][:3] == ["the first", "two\nlines", "/quit"]


def test_a_history_that_cannot_be_written_is_named_once(tmp_path: Path) -> None:
    with terminal(CHAT, columns=300, INFER_HISTORY=str(tmp_path)) as screen:
        screen.prompt()
        screen.type(b"one\r")
        screen.until(f"infer: {tmp_path} cannot be written: Is a directory (INFER_HISTORY names another file, or none)")
        screen.until("echo: 1 one")
        screen.leave()
        assert screen.shown.count("cannot be written") == 1


def test_tab_completes_commands_and_files(tmp_path: Path) -> None:
    (tmp_path / "two words.json").write_text("{}")
    with terminal(CHAT) as screen:
        screen.prompt()
        screen.type(b"/hist\t\r")
        screen.until("(no messages yet)")
        screen.prompt()
        screen.type(b"/re\t")
        assert {"/reasoning", "/regenerate", "/reset", "/result", "/retry"} <= set(plain(screen.prompt()).split())
        screen.type(CTRL_C)
        screen.until("leaves)")
        screen.type(f"/load {tmp_path}/two wo\t\r".encode())
        screen.until("not a conversation saved by /save")
        screen.leave()


# Another question


def test_the_last_question_is_edited_at_the_prompt_or_in_an_editor(tmp_path: Path) -> None:
    with terminal(CHAT, EDITOR="", VISUAL="") as screen:
        screen.prompt()
        screen.type(b"one\r")
        screen.until("echo: 1 one")
        screen.prompt()
        screen.type(b"/edit\r")
        screen.until("> one")
        screen.type(b" more\r")
        screen.until("echo: 1 one more")
        screen.leave()
    (tmp_path / "editor").write_text('#!/bin/sh\necho "from an editor" > "$1"\n')
    (tmp_path / "editor").chmod(0o755)
    with terminal(CHAT, VISUAL=str(tmp_path / "editor")) as screen:
        screen.prompt()
        screen.type(b"one\r")
        screen.until("echo: 1 one")
        screen.prompt()
        screen.type(b"/edit\r")
        screen.until("echo: 1 from an editor")
        screen.leave()
    with terminal(CHAT, VISUAL=str(tmp_path / "none")) as screen:
        screen.prompt()
        screen.type(b"one\r")
        screen.until("echo: 1 one")
        screen.prompt()
        screen.type(b"/edit\r")
        screen.until("infer:")
        screen.prompt()
        screen.leave()


def test_the_result_of_a_call_is_typed_where_the_prompt_begins_so(tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text('[{"type": "function", "function": {"name": "add"}}]')
    with terminal(CHAT) as screen:
        screen.prompt()
        screen.type(f"/tools {tmp_path}/tools.json\r".encode())
        screen.until("(the model may call add)")
        screen.prompt()
        screen.type(b"one\r")
        screen.until('call add {"a": 1}')
        screen.until("> /result")
        screen.type(b"7\r")
        screen.until("echo: 3 7")
        screen.leave()


def test_reasoning_is_a_sign_while_it_arrives_and_a_line_afterwards() -> None:
    with terminal(CHAT) as screen:
        screen.prompt()
        screen.type(b"think\r")
        screen.until("\x1b[2m… 3 tokens\x1b[22m\x1b[K")
        screen.until("echo: 1 think")
        screen.until("(thought for 3 tokens: /reasoning shows it)")
        screen.prompt()
        screen.type(b"/reasoning\r")
        screen.until("first this, then that")
        screen.leave()


def test_without_a_terminal_the_new_words_are_given() -> None:
    text = "one\n/edit\n/edit two\n/regenerate 5\n"
    done = subprocess.run(CHAT, input=text, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "echo: 1 one \necho: 1 two \necho: 1 two \n"
    assert "infer: /edit needs a text if there is no terminal: /edit TEXT\n" in done.stderr


# Signals


def test_a_second_ctrl_c_at_an_empty_prompt_leaves() -> None:
    with terminal(CHAT) as screen:
        screen.prompt()
        screen.type(b"half" + CTRL_C)
        screen.until("(Ctrl-C again, Ctrl-D or /quit leaves)")
        screen.prompt()
        screen.type(b"other half")
        screen.until("other half")
        screen.type(CTRL_C)
        screen.until("leaves)")
        screen.prompt()
        screen.type(CTRL_C)
        screen.ended(0)


def test_ctrl_c_stops_the_answer_and_prints_no_sign_of_itself() -> None:
    with terminal(CHAT) as screen:
        screen.prompt()
        screen.type(b"slow\r")
        screen.until("echo: 1 slow")
        assert screen.local_flags() & UNSEEN == 0
        screen.type(CTRL_C)
        screen.until("(stopped)")
        screen.prompt()
        screen.type(b"two\r")
        screen.until("echo: 3 two")
        screen.prompt()
        screen.type(b"half a thought")
        screen.until("half a thought")
        screen.type(CTRL_C)
        screen.until("(Ctrl-C again, Ctrl-D or /quit leaves)")
        screen.prompt()
        screen.leave()
        assert "^C" not in screen.shown
        assert screen.local_flags() & UNSEEN == UNSEEN


def test_text_typed_during_an_answer_is_the_next_message() -> None:
    with terminal(CHAT) as screen:
        screen.prompt()
        screen.type(b"slow\r")
        screen.until("echo: 1 slow")
        screen.type(b"typed early")
        assert screen.until("echo: 1 slow echo: 1 slow").count("typed") == 0
        screen.process.send_signal(signal.SIGINT)  # Ctrl-C would drop the typed text
        screen.until("(stopped)")
        screen.prompt()
        screen.type(b"\r")
        screen.until("echo: 3 typed early")
        screen.leave()


@pytest.mark.parametrize("when", ["at the prompt", "in an answer"])
def test_sigterm_ends_the_chat_with_the_terminal_as_it_was(when: str) -> None:
    with terminal(CHAT) as screen:
        screen.prompt()
        if when == "in an answer":
            screen.type(b"slow\r")
            screen.until("echo: 1 slow")
        screen.process.send_signal(signal.SIGTERM)
        screen.ended(143)
        assert screen.local_flags() & UNSEEN == UNSEEN


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("question", ["slow\n", "one\n"])
def test_without_a_terminal_a_signal_ends_the_chat(number: signal.Signals, status: int, question: str) -> None:
    process = subprocess.Popen([*CHAT, "-q"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(question.encode())
    process.stdin.flush()
    begin = os.read(process.stdout.fileno(), 100)
    process.send_signal(number)
    rest, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (status, b"")
    assert (begin + rest).startswith(b"echo: 1 "[: len(begin)])
    assert (begin + rest).endswith(b"\n")


def test_ctrl_z_restores_the_terminal_and_fg_continues() -> None:
    with terminal(["bash", "--norc", "--noprofile", "-i"]) as screen:
        screen.until("$ ")
        screen.type(" ".join(CHAT).encode() + b"\r")
        screen.until("Ctrl-D leaves.")
        screen.prompt()
        screen.type(b"slow")
        screen.until("slow")
        screen.type(CTRL_Z)
        screen.until("Stopped")
        screen.until("$ ")
        screen.type(b"fg\r")
        screen.until("> slow")  # the typed text is shown again
        screen.type(b"\r")
        screen.until("echo: 1 slow")
        screen.type(CTRL_Z)
        screen.until("Stopped")
        screen.until("$ ")
        screen.type(b"stty -a\r")
        assert {"echo", "echoctl"} <= set(screen.until("flusho").split())
        screen.type(b"fg\r")
        screen.until("echo: 1 slow")
        screen.until("echo: 1 slow")
        assert screen.local_flags() & UNSEEN == 0
        screen.type(CTRL_C)
        screen.until("(stopped)")
        screen.prompt()
        screen.type(b"/bye\r")
        screen.until("$ ")
        assert "^" not in screen.shown.partition("(stopped)")[0].partition("Stopped")[0]
