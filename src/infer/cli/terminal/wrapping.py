"""Wrap a text that arrives in pieces, so that words move to the next line as a whole.

The output depends on the text only, not on its pieces. The model's own line breaks stay. Code between fences and rows
of tables are not wrapped.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import final

FENCES = ("```", "~~~")
UNBROKEN = "\xa0\u202f"  # spaces at which no line may break
MIN_WIDTH = 8  # columns; a narrower terminal wraps nothing
TAB = 8
_STYLE = re.compile(r"\x1b\[[\d;]*m")
_JOINER = "\u200d"  # joins the characters before and after it to one sign


@final
class WordWrap:
    """Wraps text. `width` returns the terminal's columns, and is called for every word: the window may change."""

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0  # after the last output
        self._spaces = ""  # between the last output and the word
        self._word = ""  # held back until it is complete
        self._is_held = False  # False for the first word of a line, which need not wait
        self._line = ""  # the beginning of the model's line, without spaces
        self._in_code = False
        self._previous = ""

    def feed(self, text: Iterable[str]) -> str:
        """Return the part of the text so far that can be shown, with line breaks so that no word is cut.

        The text may have escape sequences that set a style between its characters.
        """
        return "".join(map(self._take, text))

    def finish(self) -> str:
        """Return the text that is still held back."""
        return self._end_word()

    def _take(self, character: str) -> str:
        if len(character) > 1:
            return self._set_style(character)
        previous, self._previous = self._previous, character
        if character == "\n":
            return self._end_line()
        if len(self._line) < 3 and (self._line or not character.isspace()):
            self._line += character
        if self._in_code or self._line.startswith(("|", *FENCES)):
            return self._end_word() + self._show(character)
        if character.isspace() and character not in UNBROKEN:
            shown = self._end_word()
            self._spaces += character
            return shown
        columns = display_width(character)
        if not self._word and not self._spaces and (columns == 0 or previous == _JOINER):
            return character  # it is part of the previous sign
        if columns == 2:
            return self._end_word() + self._add(character) + self._end_word()
        return self._add(character)

    def _add(self, character: str) -> str:
        """Add a character to the word.

        A word that would pass the margin moves to the next line, where it is no longer held back.
        """
        if not self._is_held:
            return self._show(character)
        self._word += character
        width = self._width()
        if width < MIN_WIDTH or _column_after(self._column, self._spaces + self._word) <= width:
            return ""
        word, self._word, self._spaces = self._word, "", ""
        self._column, self._is_held = 0, False
        return "\n" + self._show(word)

    def _set_style(self, sequence: str) -> str:
        if not self._is_held:
            return self._show(sequence)
        self._word += sequence
        return ""

    def _show(self, text: str) -> str:
        shown, self._spaces = self._spaces + text, ""
        column = _column_after(self._column, shown)
        # The terminal itself breaks a longer word.
        self._column = column if column <= self._width() else display_width(text)
        return shown

    def _end_word(self) -> str:
        word, self._word = self._word, ""
        shown = self._show(word) if word else ""
        self._is_held = self._line != ""
        return shown

    def _end_line(self) -> str:
        shown = self._end_word()
        self._in_code ^= self._line.startswith(FENCES)
        self._column, self._spaces, self._line, self._is_held = 0, "", "", False
        return shown + "\n"


def _column_after(column: int, text: str) -> int:
    first, *others = text.split("\t")
    column += display_width(first)
    for part in others:
        column += TAB - column % TAB + display_width(part)
    return column


def shortened(text: str, width: int) -> str:
    while display_width(text) > width:
        text = text.removesuffix("…")[:-1] + "…"
    return text


def display_width(text: str) -> int:
    """Return the number of terminal columns of a text.

    Wide East Asian characters have two columns; combining and invisible characters and styles have none.
    """
    return sum(map(_columns, _STYLE.sub("", text) if "\x1b" in text else text))


def _columns(character: str) -> int:
    if " " <= character <= "~":
        return 1
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
