"""readline, if Python has it: editing, completion and history at a prompt."""

import os
from collections.abc import Callable
from types import ModuleType
from typing import final

from infer.cli.terminal import note
from infer.cli.typed_history import VARIABLE, add_to_history, history_path, read_history

Complete = Callable[[str], list[str]]


@final
class LineEditor:
    """The editor of the process's only terminal. Without readline it does nothing."""

    def __init__(self, complete: Complete) -> None:
        """Create the editor. `complete` returns the completions of the line up to the cursor."""
        self.marks_pastes = False
        self._readline = _readline()
        self._path = history_path()
        self._complete, self._candidates = complete, list[str]()
        if (readline := self._readline) is None:
            return
        readline.set_auto_history(False)
        for message in [] if self._path is None else read_history(self._path):
            readline.add_history(message)
        readline.set_completer_delims(" ")
        readline.set_completer(self._candidate)
        if "libedit" in (readline.__doc__ or ""):
            readline.parse_and_bind("bind ^I rl_complete")
            return
        readline.parse_and_bind("tab: complete")
        self.marks_pastes = os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")
        if self.marks_pastes:
            readline.parse_and_bind("set enable-bracketed-paste on")

    def add_history(self, message: str) -> None:
        """Add a message to the history. Later chats have it as well, unless it begins with a space."""
        if (readline := self._readline) is None or not message.strip():
            return
        length = readline.get_current_history_length()
        if length and readline.get_history_item(length) == message:
            return
        readline.add_history(message)
        if self._path is None or message.startswith(" "):
            return
        try:
            add_to_history(self._path, message)
        except OSError as error:
            note(f"infer: {self._path} cannot be written: {error.strerror} ({VARIABLE} names another file, or none)")
            self._path = None

    def typed(self) -> str:
        """Return the text that is typed at the prompt."""
        return "" if self._readline is None else self._readline.get_line_buffer()

    def begin_with(self, text: str) -> None:
        """Set the text with which the next prompt begins."""
        if (readline := self._readline) is None:
            return

        def insert() -> None:
            readline.insert_text(text)
            readline.set_startup_hook(None)

        readline.set_startup_hook(insert)

    def _candidate(self, text: str, state: int) -> str | None:
        """Return completion number `state` of the word that readline completes, or None after the last one."""
        if state == 0 and self._readline is not None:
            begin = self._readline.get_begidx()
            line = self._readline.get_line_buffer()[:begin] + text
            self._candidates = [each[begin:] for each in self._complete(line)]
        return self._candidates[state] if state < len(self._candidates) else None


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:
        return None
    return readline
