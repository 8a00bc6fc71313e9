"""Parse calls that a model writes as fenced or bare JSON instead of in its own format, as Qwen2.5-Coder does.

A call is `{"name": …, "arguments": {…}}` at the beginning of a line, with the name of one of the request's tools and
nothing else. `parameters` is read as `arguments`. Several calls may be in a list or in one fence. Other text is
delivered whole and in its order.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

from infer.outputs import ToolCallDelta
from infer.text.toolcalls.answer_format import AnswerFormat
from infer.text.toolcalls.parsed import SPACES, Delta, Parsed, Parser

_FENCE = re.compile(r"```[A-Za-z_]*[ \t]*\r?\n\s*")
_PART_OF_FENCE = re.compile(r"`{1,2}|```[A-Za-z_]*[ \t]*\r?\n?\s*")
_BEGINNINGS = [bracket + each for bracket in ("", "[") for each in ('{"name":"', '{"arguments":{', '{"parameters":{')]
_NAME = re.compile(r'\[?\s*\{\s*"name"\s*:\s*"([^"\\]*)("?)')
_DECODER = json.JSONDecoder(strict=False)
_KEYS = ({"name", "arguments"}, {"name", "parameters"})
_WORDS = ("true", "false", "null")
_PART_OF_NUMBER = re.compile(r"-|\.|[eE][-+]?")
_Calls = list[tuple[str, str]]  # names and arguments


class _IncompleteError(Exception):
    """The text may become a call."""


class _NoCallError(Exception):
    """The text is no call, whatever follows."""


@final
class BareCallParser(Parser):
    """Parser of one answer: the parts of `make_inner`'s parser, with the calls that are in its text."""

    def __init__(
        self,
        form: AnswerFormat,
        id_of: Callable[[int], str],
        make_inner: Callable[[AnswerFormat, Callable[[int], str]], Parser],
    ) -> None:
        super().__init__(form, id_of)
        assert form.calls is not None
        self._names, self._is_parallel = {tool.name for tool in form.calls.tools}, form.calls.is_parallel
        self._inner = make_inner(form, id_of)
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
                    self._deltas.append(ToolCallDelta(self._num_calls, self._id_of(self._num_calls), name))
                    self._deltas.append(ToolCallDelta(self._num_calls, arguments=arguments))
                    self._num_calls += 1
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
