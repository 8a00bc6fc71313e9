"""The interface of parsers of answers, and the parts that they return."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from infer.outputs import ReasoningDelta, ToolCallDelta
from infer.text.toolcalls.answer_format import AnswerFormat

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

    def _take(self) -> Parsed:
        """Return the parts since the last call, without the marks of control tokens."""
        text, deltas = MARKS.sub("", self._text), tuple(self._deltas)
        self._text = ""
        self._deltas.clear()
        return Parsed(text, deltas)
