"""Convert arguments of each syntax to JSON while they arrive: characters in, characters of JSON out."""

import json
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import NamedTuple, final

_spelt = json.JSONEncoder(ensure_ascii=False).encode
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class Scanned(NamedTuple):
    """The JSON known so far, the number of characters read, and True if the arguments have ended."""

    json: str
    num_read: int
    is_done: bool


class ArgumentScanner(ABC):
    """Scanner of one call's arguments.

    Characters that were not read must be passed again, with the following text.
    """

    @abstractmethod
    def scan(self, text: str) -> Scanned: ...


@final
class JsonArguments(ArgumentScanner):
    """A JSON object, unchanged."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_text = self._is_escaped = False

    def scan(self, text: str) -> Scanned:
        for index, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_text:
                self._is_escaped = character == "\\"
                self._is_text = character != '"'
            elif character == '"':
                self._is_text = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return Scanned(text[: index + 1], index + 1, is_done=True)
        return Scanned(text, len(text), is_done=False)


class _RewrittenArguments(ArgumentScanner):
    """Arguments of a syntax other than JSON. `_found` is JSON that was not returned yet."""

    def __init__(self) -> None:
        self._found, self._word = "{", ""
        self._depth = 0
        self._is_text = False

    def _take(self) -> str:
        found, self._found = self._found, ""
        return found


@final
class PythonArguments(_RewrittenArguments):
    """`a=1, b="x", c=True, d='x'`, up to the closing parenthesis. Texts in double quotes are spelled as in JSON."""

    def __init__(self) -> None:
        super().__init__()
        self._quote = ""  # quote of the text that is being read
        self._is_escaped = False

    def scan(self, text: str) -> Scanned:
        for index, character in enumerate(text):
            if character == ")" and self._depth == 0 and not self._quote:
                self._end_word("")
                return Scanned(self._take() + "}", index, is_done=True)
            self._push(character)
        return Scanned(self._take(), len(text), is_done=False)

    def _push(self, character: str) -> None:
        if self._quote:
            self._push_text(character)
        elif character.isalnum() or character in "_+-.":
            self._word += character
        else:
            self._end_word(character)
            self._quote = character if character in ('"', "'") else ""
            self._depth += (character in "{[") - (character in "}]")
            self._found += '"' if self._quote else "" if character == "=" else character

    def _push_text(self, character: str) -> None:
        """Add a character of a text in JSON's spelling: double quotes are escaped, and apostrophes are not."""
        if self._is_escaped:
            self._found += character if character == "'" else "\\" + character
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == self._quote:
            self._found += '"'
            self._quote = ""
        else:
            self._found += '\\"' if character == '"' else character

    def _end_word(self, following: str) -> None:
        """Add the current word: a name if "=" follows, otherwise a value."""
        is_name = following == "="
        self._found += f"{_spelt(self._word)}: " if is_name else _PYTHON_WORDS.get(self._word, self._word)
        self._word = ""


@final
class GemmaArguments(_RewrittenArguments):
    """`a:1,b:<escape>x<escape>,c:{d:[true]}`, up to the closing brace. Names and texts have no JSON quotes."""

    def __init__(self, quote: str) -> None:
        super().__init__()
        self._quote = quote

    def scan(self, text: str) -> Scanned:
        at = 0
        while at < len(text):
            if self._is_text:
                end = text.find(self._quote, at)
                known = text[at : end if end >= 0 else len(text) - num_held(text[at:], self._quote)]
                self._found += _spelt(known)[1:-1]
                at += len(known)
                if end < 0:
                    break
            if text.startswith(self._quote, at):
                self._found += '"'
                self._is_text = not self._is_text
                at += len(self._quote)
            elif self._quote.startswith(text[at:]):
                break
            elif text[at] == "}" and self._depth == 0:
                return Scanned(self._take() + self._word + "}", at, is_done=True)
            else:
                self._push(text[at])
                at += 1
        return Scanned(self._take(), at, is_done=False)

    def _push(self, character: str) -> None:
        if character not in "{}[],:":
            self._word += character
            return
        self._depth += (character in "{[") - (character in "}]")
        word, self._word = self._word, ""
        self._found += _spelt(word) if character == ":" else word
        self._found += f"{character} " if character in ",:" else character


@final
class XmlArguments(ArgumentScanner):
    """For each argument: `before_key`, a name, `after_key`, a value, `after_value`. Texts have no quotes."""

    def __init__(self, text_names: Collection[str], before_key: str, after_key: str, after_value: str) -> None:
        self._text_names = text_names
        self._before_key, self._after_key, self._after_value = before_key, after_key, after_value
        self._is_inside = self._is_text = self._has_any = False

    def scan(self, text: str) -> Scanned:
        found, at = "", 0
        while True:
            step = self._value(text[at:]) if self._is_inside else self._between(text[at:])
            found, at = found + step.json, at + step.num_read
            if step.is_done or not step.num_read:
                return Scanned(found, at, step.is_done)

    def _between(self, text: str) -> Scanned:
        if not text.startswith(self._before_key):
            is_done = bool(text) and not self._before_key.startswith(text)
            return Scanned(("}" if self._has_any else "{}") if is_done else "", 0, is_done)
        end = text.find(self._after_key)
        if end < 0:
            return Scanned("", 0, is_done=False)
        name = text[len(self._before_key) : end]
        start = ", " if self._has_any else "{"
        self._is_inside = self._has_any = True
        self._is_text = name in self._text_names
        quote = '"' if self._is_text else ""
        return Scanned(f"{start}{_spelt(name)}: {quote}", end + len(self._after_key), is_done=False)

    def _value(self, text: str) -> Scanned:
        end = text.find(self._after_value)
        shown = text[: end if end >= 0 else len(text) - num_held(text, self._after_value)]
        found = _spelt(shown)[1:-1] if self._is_text else shown
        if end < 0:
            return Scanned(found, len(shown), is_done=False)
        self._is_inside = False
        return Scanned(found + '"' * self._is_text, end + len(self._after_value), is_done=False)


def num_held(text: str, literal: str) -> int:
    """Return how many characters at the end of a text could begin this literal, which the text does not contain."""
    most = min(len(text), len(literal) - 1)
    return next((length for length in range(most, 0, -1) if text.endswith(literal[:length])), 0)
