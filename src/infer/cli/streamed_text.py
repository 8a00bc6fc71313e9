"""Text that arrives in pieces at a terminal: its words are wrapped, and its Markdown is styled.

The output depends on the text only, not on its pieces. The model's own line breaks stay. Code between fences and rows
of tables are not wrapped.

Every character of Markdown is kept. Marks (`**`, `#`, fences) are shown dimly, so that text copied from the terminal
equals the model's text. Nothing is overwritten, so nothing flickers. A mark is held back until the next character
decides its meaning.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from typing import final

FENCES = ("```", "~~~")
UNBROKEN = "\xa0\u202f"  # spaces at which no line may break
MIN_WIDTH = 8  # columns; a narrower terminal wraps nothing
TAB = 8
_STYLE = re.compile(r"\x1b\[[\d;]*m")
_JOINER = "\u200d"  # joins the characters before and after it to one sign
_HEADING, _LIST, _QUOTE = r"#{1,6} ", r"[-*+] |\d{1,9}[.)] ", "> ?"
_BLOCK = re.compile(rf"(?P<indent>[ \t]*)((?P<heading>{_HEADING})|(?P<mark>{_LIST}|{_QUOTE})|(?P<fence>```|~~~))?")
_UNDECIDED = re.compile(r"[ \t]*(#{0,6}|[-*+]|\d{0,9}[.)]?|`{0,2}|~{0,2})")
_MARKS = "*_`"
_BOLD, _DIM, _ITALIC, _CODE = 1, 2, 3, 36  # parameters of SGR; code is cyan


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


@final
class MarkdownStyle:
    """Adds styles to a text. The text may arrive in any pieces: the output depends on the text only."""

    def __init__(self) -> None:
        self._shown: tuple[int, ...] = ()  # the style of the last output
        self._fence = ""  # the marks that opened the current code block
        self._begin_line()

    def _begin_line(self) -> None:
        self._head: str | None = ""  # the beginning of the line, until its kind is known
        self._style: set[int] = set()
        self._code = ""  # the marks that opened the current inline code
        self._run = ""  # held marks, whose meaning the next character decides
        self._before = " "  # the character before the held marks
        self._is_table, self._is_fence = False, False

    def feed(self, text: str) -> Iterator[str]:
        """Yield the text's characters as they are, and escape sequences between them that change the style."""
        for character in text:
            yield from self._take(character)

    def finish(self) -> Iterator[str]:
        """Yield the characters that are still held back, and restore the terminal's own style."""
        yield from self._end_line("")

    def _take(self, character: str) -> Iterator[str]:
        if character == "\n":
            yield from self._end_line(character)
        elif self._head is None:
            yield from self._inline(character)
        elif self._is_head(self._head + character):
            self._head += character
        else:
            head, self._head = self._head + character, None
            yield from self._begin(head)

    def _is_head(self, text: str) -> bool:
        if self._fence:
            return self._fence.startswith(text.lstrip(" \t")) and text.lstrip(" \t") != self._fence
        return _UNDECIDED.fullmatch(text) is not None

    def _begin(self, head: str) -> Iterator[str]:
        """Yield the beginning of a line whose kind is known: a block's mark, and the text after it."""
        if self._fence:
            if head.lstrip(" \t") == self._fence:
                self._fence, self._is_fence = "", True
            yield from self._show(head, _DIM if self._is_fence else _CODE)
            return
        found = _BLOCK.match(head)
        assert found is not None
        yield from self._show(found["indent"])
        rest = head[found.end("indent") :]
        if found["fence"]:
            self._fence, self._is_fence = found["fence"], True
            yield from self._show(rest, _DIM)
            return
        mark = found["heading"] or found["mark"] or ""
        self._is_table = rest.startswith("|")
        yield from self._show(mark, _DIM)
        self._style = {_BOLD} if found["heading"] else set()
        for character in rest[len(mark) :]:
            yield from self._inline(character)

    def _inline(self, character: str) -> Iterator[str]:
        if self._fence or self._is_fence:
            yield from self._show(character, _DIM if self._is_fence else _CODE)
            return
        is_mark = character in _MARKS and (self._code != "" or self._before != "\\")
        if is_mark and self._run in ("", character * len(self._run)):
            self._run += character
            return
        yield from self._end_run(character)
        if is_mark:
            self._run = character
            return
        is_bar = self._is_table and character == "|"
        yield from self._show(character, *((_DIM,) if is_bar else (_CODE,) if self._code else ()))
        self._before = character

    def _end_run(self, following: str) -> Iterator[str]:
        """Yield the marks that were held back.

        The characters before and after the marks decide if they open or close a style, or are plain text.
        """
        run, self._run = self._run, ""
        if not run:
            return
        before, self._before = self._before, run[-1]
        if run[0] == "`" and self._code in ("", run):
            self._code = "" if self._code else run
            yield from self._show(run, _DIM)
            return
        styles = {1: {_ITALIC}, 2: {_BOLD}, 3: {_BOLD, _ITALIC}}.get(len(run) * (run[0] != "`"), set())
        closes = styles <= self._style and not before.isspace() and not (run[0] == "_" and following.isalnum())
        opens = not styles & self._style and not following.isspace() and not (len(run) == 1 and before.isalnum())
        if not styles or self._code or not (closes or opens):
            yield from self._show(run, *((_CODE,) if self._code else ()))
            return
        if closes:
            self._style = self._style - styles
        yield from self._show(run, _DIM)
        if not closes:
            self._style = self._style | styles

    def _end_line(self, end: str) -> Iterator[str]:
        if self._head:
            head, self._head = self._head, None
            yield from self._begin(head)
        yield from self._end_run("\n")
        self._style = set()
        yield from self._show(end)
        if self._shown:
            self._shown = ()
            yield "\x1b[0m"
        self._begin_line()

    def _show(self, text: str, *further: int) -> Iterator[str]:
        style = tuple(sorted({*self._style, *further}))
        if text and style != self._shown:
            self._shown = style
            yield f"\x1b[{';'.join(map(str, (0, *style)))}m"
        yield from text
