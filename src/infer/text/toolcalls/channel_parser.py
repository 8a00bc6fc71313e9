"""Parse an answer that consists of messages with headers. A header names a channel, and a recipient for a call.

An answer without tools has no grammar, so headers may be malformed. A header is never shown. Text without a header, or
in an unknown channel, is shown. The joined results are the same for every division of the text into pieces.
"""

import re
from collections.abc import Callable
from typing import Literal, final

from infer.outputs import ReasoningDelta, ToolCallDelta
from infer.text.toolcalls.answer_format import AnswerFormat
from infer.text.toolcalls.arguments import JsonArguments, num_held
from infer.text.toolcalls.parsed import MARKS, SPACES, Parsed, Parser

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
        calls, recipient = self._form.calls, _RECIPIENT.search(header)
        channel = MARKS.split(header.rpartition(self._notation.channel)[2].strip(SPACES))[0].partition(" ")[0]
        if recipient is None or recipient[1] in _PEOPLE:
            self._begin("reasoning" if channel == self._notation.own_channel else "text")
        elif calls is None or calls.kind == "none":
            self._begin("reasoning")
        else:
            self._begin("call")
            self._arguments = JsonArguments()
            self._deltas.append(ToolCallDelta(self._num_calls, self._id_of(self._num_calls), recipient[1]))
            self._num_calls += 1

    def _begin(self, kind: Literal["text", "reasoning", "call"]) -> None:
        self._kind, self._is_inside, self._is_new = kind, True, True

    def _read_body(self) -> bool:
        """Read text up to the end of the message, or up to the next header if there is no end."""
        closing = self._notation.closing
        ends = (closing, self._notation.start, self._notation.channel)
        places = [at for each in ends if (at := self._held.find(each)) >= 0]
        end = min(places) if places else len(self._held) - max(num_held(self._held, each) for each in ends)
        self._show(self._held[:end])
        self._held = self._held[end:]
        if not places:
            return False
        self._held = self._held.removeprefix(closing)
        self._is_inside = False
        return True

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
        self._deltas.append(ToolCallDelta(self._num_calls - 1, arguments=found.json))
        if found.is_done:
            self._arguments = None
