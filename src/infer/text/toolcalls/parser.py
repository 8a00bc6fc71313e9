"""Parse an answer's text as it arrives: reasoning, text, calls.

The input of `AnswerParser` is text that the answer's grammar allows, or a prefix of such text, so it never guesses.
`BareCallParser` reads calls that a model writes as fenced or bare JSON instead of in its own format, as Qwen2.5-Coder
does. Such a call is `{"name": …, "arguments": {…}}` at the beginning of a line, with the name of one of the request's
tools and nothing else. `parameters` is read as `arguments`. Several calls may be in a list or in one fence. Other text
is delivered whole and in its order. The joined results are the same for every division of the text into pieces.
"""

import json
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, final

from infer.outputs import ReasoningDelta, ToolCallDelta
from infer.text.toolcalls.answer_format import AnswerFormat, is_plain_text
from infer.text.toolcalls.formats import pattern_of
from infer.text.toolcalls.parsing import (
    MARKS,
    SPACES,
    ArgumentScanner,
    ChannelParser,
    Delta,
    JsonArguments,
    Parsed,
    Parser,
    RewrittenArguments,
    XmlArguments,
    known_before,
)

_FENCE = re.compile(r"```[A-Za-z_]*[ \t]*\r?\n\s*")
_PART_OF_FENCE = re.compile(r"`{1,2}|```[A-Za-z_]*[ \t]*\r?\n?\s*")
_BEGINNINGS = [bracket + each for bracket in ("", "[") for each in ('{"name":"', '{"arguments":{', '{"parameters":{')]
_NAME = re.compile(r'\[?\s*\{\s*"name"\s*:\s*"([^"\\]*)("?)')
_DECODER = json.JSONDecoder(strict=False)
_KEYS = ({"name", "arguments"}, {"name", "parameters"})
_WORDS = ("true", "false", "null")
_PART_OF_NUMBER = re.compile(r"-|\.|[eE][-+]?")
_Calls = list[tuple[str, str]]  # names and arguments
_Found = TypeVar("_Found")
Reading = Generator[None, None, _Found]


class _IncompleteError(Exception):
    """The text may become a call."""


class _NoCallError(Exception):
    """The text is no call, whatever follows."""


@final
class BareCallParser(Parser):
    """Parser of one answer: the parts of `AnswerParser`, with the calls that are in its text."""

    def __init__(self, form: AnswerFormat, id_of: Callable[[int], str]) -> None:
        super().__init__(form, id_of)
        assert form.calls is not None
        self._names, self._is_parallel = {tool.name for tool in form.calls.tools}, form.calls.is_parallel
        self._inner = AnswerParser(form, id_of)
        self._is_after_text = False  # True if text, and no call, is before the held text
        self._is_in_fence = False  # True between two fences that are text
        self._has_own_calls = False  # True once the model's own format was used

    @property
    def is_reasoning(self) -> bool:
        return self._inner.is_reasoning

    def push(self, text: str) -> Parsed:
        return self._with_calls(self._inner.push(text), is_end=False)

    def flush(self) -> Parsed:
        return self._with_calls(self._inner.flush(), is_end=True)

    def _with_calls(self, parsed: Parsed, *, is_end: bool) -> Parsed:
        self._held += parsed.text
        has_own_calls = self._has_own_calls or any(isinstance(delta, ToolCallDelta) for delta in parsed.deltas)
        is_end |= has_own_calls
        while self._held and self._read(is_end=is_end):
            pass
        if is_end:
            self._text, self._held = self._text + self._held, ""
        self._has_own_calls = has_own_calls
        found = self._take()
        inner = parsed.deltas
        if self._num_calls and not self._is_parallel:
            inner = tuple(delta for delta in inner if not isinstance(delta, ToolCallDelta))
        return Parsed(found.text, (*found.deltas, *map(self._shifted, inner)))

    def _shifted(self, delta: Delta) -> Delta:
        """Return a delta of the inner parser with its place after the calls in the text."""
        if not isinstance(delta, ToolCallDelta):
            return delta
        index = delta.index + self._num_calls
        return replace(delta, index=index, id=None if delta.id is None else self._id_of(index))

    def _read(self, *, is_end: bool) -> bool:
        """Read calls or a line. Return False if the rest must wait."""
        rest = self._held.lstrip(SPACES)
        before = self._held[: len(self._held) - len(rest)]
        if not rest:
            return False
        is_line = not self._is_after_text or "\n" in before
        if is_line and rest in ("`", "``") and not is_end:
            return False
        if is_line and not self._is_in_fence and not self._has_own_calls:
            try:
                calls, end = self._calls(rest, is_end=is_end)
            except _IncompleteError:
                if not is_end:
                    return False
            except _NoCallError:
                pass
            else:
                for name, arguments in calls:
                    self._begin_call(name)
                    self._add_arguments(arguments)
                self._held, self._is_after_text = rest[end:], False
                return True
        shown = rest.partition("\n")[0].rstrip(SPACES)
        self._is_in_fence ^= is_line and shown.startswith("```")
        self._text += before + shown
        self._held, self._is_after_text = rest[len(shown) :], True
        return True

    def _calls(self, text: str, *, is_end: bool) -> tuple[_Calls, int]:
        """Return the calls at the beginning of a text, and the place after them."""
        fence = _FENCE.match(text)
        if fence is None and text.startswith("`"):
            raise _IncompleteError if _PART_OF_FENCE.fullmatch(text) else _NoCallError
        at = fence.end() if fence is not None else 0
        found = _Calls()
        while True:
            self._check_beginning(text[at:])
            value, at = _decoded(text, at)
            found += map(self._call, value if isinstance(value, list) else [value])
            if not found or (not self._is_parallel and self._num_calls + len(found) > 1):
                raise _NoCallError
            if fence is None:
                return found, at
            following = text[at:].lstrip(SPACES + ",")
            at = len(text) - len(following)
            if following.startswith("```"):
                return found, at + 3
            if is_end and not following:
                return found, at
            if "```".startswith(following):
                raise _IncompleteError

    def _check_beginning(self, text: str) -> None:
        squeezed = "".join(text[:200].split())
        if not any(squeezed.startswith(each) or each.startswith(squeezed) for each in _BEGINNINGS):
            raise _NoCallError
        if (named := _NAME.match(text)) is not None:
            name, is_whole = named[1], bool(named[2])
            if not any(each == name if is_whole else each.startswith(name) for each in self._names):
                raise _NoCallError

    def _call(self, value: Any) -> tuple[str, str]:
        if not (isinstance(value, dict) and set(value) in _KEYS):
            raise _NoCallError
        if not (isinstance(value["name"], str) and value["name"] in self._names):
            raise _NoCallError
        arguments = value.get("arguments", value.get("parameters"))
        if not isinstance(arguments, dict):
            raise _NoCallError
        try:
            written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            written.encode()  # half a surrogate pair is no text
        except (ValueError, RecursionError):
            raise _NoCallError from None
        return value["name"], written


def _decoded(text: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        rest = text[error.pos :].strip()
        is_cut = error.msg.startswith(("Unterminated", "Invalid \\")) or any(word.startswith(rest) for word in _WORDS)
        raise _IncompleteError if is_cut or _PART_OF_NUMBER.fullmatch(rest) else _NoCallError from None
    except (RecursionError, ValueError):
        raise _NoCallError from None


def make_parser(form: AnswerFormat, id_of: Callable[[int], str], *, is_held: bool = False) -> Parser:
    """Return a parser of one answer. `id_of` returns the id of a call by its index.

    If the answer's text `is_held` by the request's own grammar, JSON in it is no call.
    """
    if form.reasoning is not None and form.reasoning.body:
        return ChannelParser(form, id_of)
    if form.calls is not None and form.calls.kind == "auto" and not is_held:
        return BareCallParser(form, id_of)
    return AnswerParser(form, id_of)


@final
class AnswerParser(Parser):
    """Parser of one answer. It holds back text that could begin another part.

    Spaces around reasoning and before calls are not text. Reasoning may begin after text if a control token opens it.
    """

    def __init__(self, form: AnswerFormat, id_of: Callable[[int], str]) -> None:
        super().__init__(form, id_of)
        opening = form.reasoning.opening if form.reasoning is not None and form.is_apart else ""
        self._later_opening = opening if MARKS.match(opening) else ""
        tags = form.reasoning if form.is_apart else None
        self._tags = () if tags is None else tuple(filter(None, (tags.answer_opening, tags.answer_closing)))
        self._has_reasoned = False  # True after any reasoning was found
        is_open = form.reasoning is not None and form.is_open
        self._part: Literal["reasoning", "text", "calls"] = "reasoning" if is_open else "text"
        self._reading = self._read()

    @property
    def is_reasoning(self) -> bool:
        return self._part == "reasoning"

    def push(self, text: str) -> Parsed:
        self._held += text
        if self._held:
            next(self._reading)
        return self._take()

    def flush(self) -> Parsed:
        """Return the held text at the end of the answer.

        The known part of an incomplete call was already returned.
        """
        if self._part == "reasoning":
            self._reason(self._held.rstrip(SPACES))
        elif self._part == "text":
            self._text += self._held
        self._held = ""
        return self._take()

    # The readers of parts. A `yield` waits until more text is held.

    def _read(self) -> Reading[None]:
        if self._form.reasoning is not None and not self.is_reasoning:
            yield from self._start(self._form.reasoning.opening)
        has_call = False
        while not has_call:
            if self.is_reasoning:
                has_call = yield from self._until_closing()
            if not has_call:
                has_call = yield from self._until_call()
        yield from self._calls()

    def _start(self, opening: str) -> Reading[None]:
        """Read the start of an answer that may begin with reasoning."""
        if (yield from self._begins_with([opening])):
            before, _, self._held = self._held.partition(opening)
            self._text += "" if self._form.is_apart else before + opening
            self._part = "reasoning"

    def _until_closing(self) -> Reading[bool]:
        """Read reasoning. Return True if a call ends it."""
        assert self._form.reasoning is not None
        closing, is_apart = self._form.reasoning.closing, self._form.is_apart
        ends, end = (closing, *self._form.calls_in_reasoning), ""
        while not end:
            known, end = known_before(self._held, *ends)
            shown = known.rstrip(SPACES) if is_apart else known
            self._reason(shown)
            self._held = self._held[len(shown if self._has_reasoned and not end else known) :]
            if not end:
                yield
        self._part = "text"
        if end != closing:
            return True
        self._held = self._held[len(closing) :]
        if not is_apart:
            self._text += closing
            return False
        while not (rest := self._held.lstrip(SPACES)):
            self._held = ""
            yield
        self._held = rest
        return False

    def _reason(self, text: str) -> None:
        if not self._form.is_apart:
            self._text += text
        elif text := MARKS.sub("", text if self._has_reasoned else text.lstrip(SPACES)):
            self._has_reasoned = True
            self._deltas.append(ReasoningDelta(text))

    def _until_call(self) -> Reading[bool]:
        """Read text. Return True if a call ends it, and False if reasoning does."""
        calls = self._form.allowed_calls
        if calls is not None and not calls.form.trigger and (yield from self._begins_with(calls.beginnings)):
            self._held = self._held.lstrip(SPACES)
            return True
        trigger = "" if calls is None else calls.form.trigger
        while True:
            known, end = known_before(self._held, trigger or self._later_opening, *self._tags)
            shown = known.rstrip(SPACES) if trigger and end not in self._tags else known
            self._text += shown
            self._held = self._held[len(known if end else shown) :]
            if not end:
                yield
            elif end == trigger:
                return True
            else:
                self._held = self._held[len(end) :]
                if end not in self._tags:
                    self._part = "reasoning"
                    return False

    def _begins_with(self, beginnings: Sequence[str]) -> Reading[bool]:
        """Return True if a text follows that begins so, perhaps after spaces."""
        while not (rest := self._held.lstrip(SPACES)).startswith((*beginnings,)):
            if not any(each.startswith(rest) for each in beginnings):
                return False
            yield
        return True

    def _calls(self) -> Reading[None]:
        assert self._form.calls is not None
        form, self._part = self._form.calls.form, "calls"
        _, separator, _ = form.around_calls
        yield from self._pass(form.start)
        while True:
            while (name_end := form.name_end.search(self._held)) is None:
                yield
            name, self._held = self._held[: name_end.start()], self._held[name_end.end() :]
            self._begin_call(name)
            arguments = self._arguments_of(name)
            while not self._is_read(arguments):
                yield
            yield from self._pass(form.after_arguments)
            yield from self._pass(separator + form.before_name)  # never after the last call

    def _pass(self, literal: str) -> Reading[None]:
        while (match := pattern_of(literal).match(self._held)) is None:
            yield
        self._held = self._held[match.end() :]

    def _arguments_of(self, name: str) -> ArgumentScanner:
        assert self._form.calls is not None
        form = self._form.calls.form
        if form.syntax == "json":
            return JsonArguments()
        if form.syntax != "xml":
            return RewrittenArguments(form.syntax, form.quote)
        tool = next((each for each in self._form.calls.tools if each.name == name), None)
        properties = {} if tool is None else tool.properties
        text_names = [key for key, schema in properties.items() if is_plain_text(schema)]
        return XmlArguments(text_names, *form.around_argument)

    def _is_read(self, arguments: ArgumentScanner) -> bool:
        """Return the known part of the arguments, and then True if they have ended."""
        if not self._held:
            return False
        scanned = arguments.scan(self._held)
        if scanned.json:
            self._add_arguments(scanned.json)
        self._held = self._held[scanned.num_read :]
        return scanned.is_done
