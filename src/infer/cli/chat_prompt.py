"""The prompt of a chat at a terminal, by prompt_toolkit: editing, completion, pasting and a history.

The history is a file that later chats read, with one line of JSON per message. Only its owner can read it.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import final

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition, is_searching
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.search import accept_search
from prompt_toolkit.shortcuts import CompleteStyle

from infer.cli.chat_commands import ChatInput
from infer.cli.terminal import note
from infer.system.atomic import replacing

MAX_MESSAGES = 1000
VARIABLE = "INFER_HISTORY"


@final
class ChatPrompt(ChatInput):
    """Reads messages at a terminal. `complete` returns the completions of the line up to the cursor."""

    def __init__(self, complete: Callable[[str], Iterable[str]]) -> None:
        self._history = TypedHistory(history_path())
        self._is_pasted = False
        output = Vt100_Output.from_pty(sys.stdout)
        output.enable_cpr = False
        bindings = KeyBindings()
        bindings.add(Keys.BracketedPaste)(self._paste)
        bindings.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
        bindings.add("enter", filter=is_searching)(_ask_found)
        bindings.add("enter", filter=Condition(self._is_continued) & ~is_searching)(_continue_line)
        self._session: PromptSession[str] = PromptSession(
            "> ",
            completer=_Completer(complete),
            complete_style=CompleteStyle.READLINE_LIKE,
            complete_while_typing=False,
            enable_suspend=True,
            history=self._history,
            key_bindings=bindings,
            multiline=Condition(lambda: not self._is_pasted and self.is_open_block(self._text)),
            output=output,
            prompt_continuation=lambda width, line_number, wrap_count: "" if wrap_count else "| ",
        )

    def message(self, begin: str) -> str | None:
        self._is_pasted = False
        try:
            text = self._session.prompt(default=begin)
        except EOFError:
            return None
        self._history.report_trouble()
        return text.strip("\n") if self._is_pasted else self.message_of(text)

    def discard(self) -> bool:
        return not self._text

    @property
    def _text(self) -> str:
        return self._session.default_buffer.text

    def _is_continued(self) -> bool:
        """Return True if a backslash continues the text on another line."""
        return self._text.endswith("\\") and not self._is_pasted and not self.is_open_block(self._text)

    def _paste(self, event: KeyPressEvent) -> None:
        """Insert a pasted text. If it has several lines, marks have no meaning in it."""
        pasted = event.data.replace("\r\n", "\n").replace("\r", "\n")
        self._is_pasted |= "\n" in pasted
        event.current_buffer.insert_text(pasted)


@final
class TypedHistory(History):
    """The messages of all chats. A message that begins with a space is not kept for later chats."""

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self._path, self._trouble = path, ""

    def load_history_strings(self) -> Iterable[str]:
        return [] if self._path is None else reversed(read_history(self._path))

    def store_string(self, string: str) -> None:
        """Append a message immediately, so that a chat that is killed keeps it."""
        if self._path is None or not string.strip() or string.startswith(" "):
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(json.dumps(string).encode() + b"\n")
        except OSError as error:
            self._trouble = f"infer: {self._path} cannot be written: {error.strerror}"
            self._path = None

    def report_trouble(self) -> None:
        """Print once why the last message could not be saved."""
        if self._trouble:
            note(f"{self._trouble} ({VARIABLE} names another file, or none)")
            self._trouble = ""


@final
class _Completer(Completer):
    def __init__(self, complete: Callable[[str], Iterable[str]]) -> None:
        self._complete = complete

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        line = document.text_before_cursor
        for each in self._complete(line):
            yield Completion(each, start_position=-len(line))


def _continue_line(event: KeyPressEvent) -> None:
    """Replace the backslash at the end with a line break."""
    event.current_buffer.cursor_position = len(event.current_buffer.text)
    event.current_buffer.delete_before_cursor()
    event.current_buffer.newline(copy_margin=False)


def _ask_found(event: KeyPressEvent) -> None:
    """End a search of the history, and submit the message that it found."""
    accept_search()
    event.app.current_buffer.validate_and_handle()


def history_path() -> Path | None:
    """Return $INFER_HISTORY, or by default a file in the folder for programs' state.

    Return None if the variable is empty, which disables the history, or if the home folder is unknown.
    """
    named, state = os.environ.get(VARIABLE), os.environ.get("XDG_STATE_HOME")
    if named == "":
        return None
    with suppress(RuntimeError):  # the home folder is unknown
        return Path(named or Path(state or "~/.local/state") / "infer" / "history").expanduser()
    return None


def read_history(path: Path) -> list[str]:
    """Return the last messages, oldest first. Other lines are skipped; an unreadable file has no messages."""
    try:
        lines = path.read_bytes().splitlines()
    except (OSError, ValueError):
        return []
    messages = list[str]()
    for line in lines[-MAX_MESSAGES:]:
        with suppress(ValueError, RecursionError):
            if isinstance(message := json.loads(line), str):
                messages.append(message)
    if len(lines) > 2 * MAX_MESSAGES:
        with suppress(OSError), replacing(path) as file:
            file.write(b"\n".join(lines[-MAX_MESSAGES:]) + b"\n")
    return messages
