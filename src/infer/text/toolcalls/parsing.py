"""The interface of parsers of answers, scanners of arguments, and the parser of answers of messages with headers.

A scanner converts arguments of a syntax to JSON while they arrive: characters in, characters of JSON out. A header
names a channel, and a recipient for a call. An answer without tools has no grammar, so headers may be malformed. A
header is never shown. Text without a header, or in an unknown channel, is shown. The joined results are the same for
every division of the text into pieces.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Literal, NamedTuple, final

from infer.outputs import ReasoningDelta, ToolCallDelta
from infer.text.tokenizer.detokenizer import num_held
from infer.text.toolcalls.answer_format import AnswerFormat
from infer.text.toolcalls.formats import ArgumentSyntax, spelt

SPACES = " \t\r\n"
MARKS = re.compile("[\ud800-\udfff]")
Delta = ReasoningDelta | ToolCallDelta


class Parsed(NamedTuple):
    text: str
    deltas: tuple[Delta, ...] = ()


class Parser(ABC):
    """Parser of one answer. `mark_by_id` has the characters that represent control tokens in its text.

    `_held` is text that was not read yet; `_text` and `_deltas` are parts that were not returned yet.
    """

    def __init__(self, form: AnswerFormat, id_of: Callable[[int], str]) -> None:
        self._form, self._id_of = form, id_of
        self.mark_by_id = form.marks
        self._held = self._text = ""
        self._deltas: list[Delta] = []
        self._num_calls = 0

    @property
    @abstractmethod
    def is_reasoning(self) -> bool: ...

    @abstractmethod
    def push(self, text: str) -> Parsed: ...

    @abstractmethod
    def flush(self) -> Parsed: ...

    def _begin_call(self, name: str) -> None:
        self._deltas.append(ToolCallDelta(self._num_calls, self._id_of(self._num_calls), name))
        self._num_calls += 1

    def _add_arguments(self, written: str) -> None:
        self._deltas.append(ToolCallDelta(self._num_calls - 1, arguments=written))

    def _take(self) -> Parsed:
        """Return the parts since the last call, without the marks of control tokens."""
        text, deltas = MARKS.sub("", self._text), tuple(self._deltas)
        self._text = ""
        self._deltas.clear()
        return Parsed(text, deltas)


_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
# Per syntax: the bracket after the arguments, the sign after names, the pattern of signs, and JSON for some of them.
_SIGNS: dict[str, tuple[str, str, re.Pattern[str], dict[str, str]]] = {
    "python": (")", "=", re.compile(r"[^\w+\-.]"), {"=": ": "}),
    "bare": ("}", ":", re.compile(r"[{}\[\],:]"), {":": ": ", ",": ", "}),
}
_ESCAPED = {quote: re.compile(rf"\A(?:[^\\{quote}]|\\.)*", re.DOTALL) for quote in ('"', "'")}  # a text of Python
_REWRITTEN, _SPELLINGS = re.compile(r"\\.|\"", re.DOTALL), {"\\'": "'", '"': '\\"'}


class Scanned(NamedTuple):
    """The JSON known so far, the number of characters read, and True if the arguments have ended."""

    json: str
    num_read: int
    is_done: bool


@final
class JsonArguments:
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


@final
class RewrittenArguments:
    """Arguments of a syntax other than JSON, up to the closing bracket.

    Python: `a=1, b="x", c=True, d='x'`. Its texts in double quotes are spelled as in JSON. The bare syntax:
    `a:1,b:<escape>x<escape>,c:{d:[true]}`. Its names and texts have no JSON quotes, and no escapes.
    """

    def __init__(self, syntax: ArgumentSyntax, quote: str) -> None:
        """Begin. `quote` is around each text of the bare syntax."""
        self._has_escapes = syntax == "python"
        self._quotes = ('"', "'") if syntax == "python" else (quote,)
        self._closing, self._name_sign, self._signs, self._shown_by_sign = _SIGNS[syntax]
        self._start, self._word = "{", ""
        self._quote = ""  # quote of the text that is being read
        self._depth = 0

    def scan(self, text: str) -> Scanned:
        written, self._start, at = self._start, "", 0
        while at < len(text):
            if self._quote:
                length, shown = self._text(text[at:])
                written, at = written + shown, at + length
                if not text.startswith(self._quote, at):
                    break
                written, at, self._quote = written + '"', at + len(self._quote), ""
            elif quote := next((each for each in self._quotes if text.startswith(each, at)), ""):
                written, at, self._quote = written + self._end_word("") + '"', at + len(quote), quote
            elif any(each.startswith(text[at : at + len(each)]) for each in self._quotes):
                break
            elif text[at] == self._closing and self._depth == 0:
                return Scanned(written + self._end_word("") + "}", at, is_done=True)
            else:
                written, at = written + self._push(text[at]), at + 1
        return Scanned(written, at, is_done=False)

    def _text(self, text: str) -> tuple[int, str]:
        """Return the length of a text up to its quote or its last whole escape, and the text in JSON's spelling."""
        if not self._has_escapes:
            known, _ = known_before(text, self._quote)
            return len(known), spelt(known)[1:-1]
        (known,) = _ESCAPED[self._quote].findall(text)
        return len(known), _REWRITTEN.sub(lambda match: _SPELLINGS.get(match[0], match[0]), known)

    def _push(self, character: str) -> str:
        if not self._signs.match(character):
            self._word += character
            return ""
        self._depth += (character in "{[") - (character in "}]")
        return self._end_word(character) + self._shown_by_sign.get(character, character)

    def _end_word(self, following: str) -> str:
        """Return the current word: a name if the sign after names follows, otherwise a value."""
        word, self._word = self._word, ""
        return spelt(word) if following == self._name_sign else _PYTHON_WORDS.get(word, word)


@final
class XmlArguments:
    """For each argument: `before_key`, a name, `after_key`, a value, `after_value`. Texts have no quotes."""

    def __init__(self, text_names: Collection[str], before_key: str, after_key: str, after_value: str) -> None:
        self._text_names = text_names
        self._before_key, self._after_key, self._after_value = before_key, after_key, after_value
        self._is_inside = self._is_text = self._has_any = False

    def scan(self, text: str) -> Scanned:
        written, at = "", 0
        while at < len(text):
            if self._is_inside:
                shown, end = known_before(text[at:], self._after_value)
                written, at = written + (spelt(shown)[1:-1] if self._is_text else shown), at + len(shown) + len(end)
                if not end:
                    break
                written, self._is_inside = written + '"' * self._is_text, False
            elif text.startswith(self._before_key, at):
                end_of_key = text.find(self._after_key, at)
                if end_of_key < 0:
                    break
                name = text[at + len(self._before_key) : end_of_key]
                self._is_text = name in self._text_names
                written += f"{', ' if self._has_any else '{'}{spelt(name)}: " + '"' * self._is_text
                at, self._is_inside, self._has_any = end_of_key + len(self._after_key), True, True
            elif self._before_key.startswith(text[at:]):
                break
            else:
                return Scanned(written + ("}" if self._has_any else "{}"), at, is_done=True)
        return Scanned(written, at, is_done=False)


# Scanners of one call's arguments. Characters that were not read must be passed again, with the following text.
ArgumentScanner = JsonArguments | RewrittenArguments | XmlArguments


def known_before(text: str, *literals: str) -> tuple[str, str]:
    """Return the text before the first of these literals, and the literal.

    Without a literal in the text, return all but the end of the text, with which one may begin, and "".
    """
    places = {at: each for each in literals if each and (at := text.find(each)) >= 0}
    if places:
        return text[: min(places)], places[min(places)]
    return text[: len(text) - max(num_held(text, each) for each in literals)], ""


_BETWEEN = "\n\n"  # between two messages of one kind
_TO = "to="
_RECIPIENT = re.compile("to=(?:functions[.])?([^\\s<\ud800-\udfff]+)")
_PEOPLE = ("user", "assistant", "all")
_MAX_HEADER = 300


@final
class ChannelParser(Parser):
    """Parser of one answer. It holds back a header until the header's end."""

    def __init__(self, form: AnswerFormat, id_of: Callable[[int], str]) -> None:
        super().__init__(form, id_of)
        assert form.reasoning is not None
        self._notation = form.reasoning
        self._kind: Literal["text", "reasoning", "call"] = "reasoning"
        self._is_inside = form.is_open  # True in a message's text, False in its header
        self._is_new = True  # True until a part of the message was returned
        self._shown = set[str]()  # kinds of messages of which a part was returned
        self._arguments: JsonArguments | None = None  # arguments of an incomplete call

    @property
    def is_reasoning(self) -> bool:
        return self._is_inside and self._kind == "reasoning"

    def push(self, text: str) -> Parsed:
        self._held += text
        while self._held and (self._read_body() if self._is_inside else self._read_header()):
            pass
        return self._take()

    def flush(self) -> Parsed:
        """Return the held text at the end of the answer. An incomplete header is dropped."""
        if self._is_inside:
            self._show(self._held)
        elif _TO[:-1].startswith(self._held.lstrip(SPACES)):
            self._begin("text")
            self._show(self._held)
        self._held = ""
        return self._take()

    def _read_header(self) -> bool:
        end = self._held.find(self._notation.body)
        if not self._may_be_header(self._held if end < 0 else self._held[:end]):
            self._held = self._held.removeprefix(self._notation.start).removeprefix(self._notation.role)
            self._begin("text")
            return True
        if end < 0:
            return False
        header, self._held = self._held[:end], self._held[end + len(self._notation.body) :]
        self._begin_with(header)
        return True

    def _may_be_header(self, text: str) -> bool:
        text, notation = text.lstrip(SPACES), self._notation
        beginnings = (notation.start, notation.channel, notation.constrain, notation.body, _TO)
        return len(text) <= _MAX_HEADER and any(text.startswith(each) or each.startswith(text) for each in beginnings)

    def _begin_with(self, header: str) -> None:
        """Begin the text of a message with this header."""
        recipient = _RECIPIENT.search(header)
        channel = MARKS.split(header.rpartition(self._notation.channel)[2].strip(SPACES))[0].partition(" ")[0]
        if recipient is None or recipient[1] in _PEOPLE:
            self._begin("reasoning" if channel == self._notation.own_channel else "text")
        elif self._form.allowed_calls is None:
            self._begin("reasoning")
        else:
            self._begin("call")
            self._arguments = JsonArguments()
            self._begin_call(recipient[1])

    def _begin(self, kind: Literal["text", "reasoning", "call"]) -> None:
        self._kind, self._is_inside, self._is_new = kind, True, True

    def _read_body(self) -> bool:
        """Read text up to the end of the message, or up to the next header if there is no end."""
        notation = self._notation
        known, end = known_before(self._held, notation.closing, notation.start, notation.channel)
        self._show(known)
        self._held = self._held[len(known) :].removeprefix(notation.closing)
        self._is_inside = not end
        return bool(end)

    def _show(self, text: str) -> None:
        text = MARKS.sub("", text)
        if not text:
            return
        if self._kind == "call":
            self._show_arguments(text)
            return
        is_text = self._kind == "text" or not self._form.is_apart
        part = "text" if is_text else "reasoning"
        if self._is_new and part in self._shown:
            text = _BETWEEN + text
        self._is_new = False
        self._shown.add(part)
        if is_text:
            self._text += text
        else:
            self._deltas.append(ReasoningDelta(text))

    def _show_arguments(self, text: str) -> None:
        if self._arguments is None:  # the arguments are complete
            return
        found = self._arguments.scan(text)
        self._add_arguments(found.json)
        if found.is_done:
            self._arguments = None
