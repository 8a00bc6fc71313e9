"""How families of models write tool calls and reasoning: a row of a table for each.

In a format that is `in_vocabulary` a control token is one lone surrogate: no decoded text has one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeVar, final

ArgumentSyntax = Literal["json", "python", "xml"]
_FIRST_MARK = 0xD800


@final
@dataclass(frozen=True, kw_only=True)
class ToolCallFormat:
    """A call is `before_name` name `before_arguments` arguments `after_arguments`. The calls of an answer stand between
    `opening` and `closing`, with `separator` between two. Text may stand before the first `trigger`; without one, calls
    are told from text by how an answer begins.
    """

    name: str
    before_name: str = '{"name": "'
    before_arguments: str = '", "arguments": '
    after_arguments: str = "}"
    syntax: ArgumentSyntax = "json"
    opening: str = ""
    separator: str = ""
    closing: str = ""
    trigger: str = ""
    is_parallel: bool = True  # whether an answer may have several calls
    has_short_ids: bool = False

    @property
    def start(self) -> str:
        """What stands before the name of the first call."""
        return self.opening + self.before_name

    def beginnings(self, names: Sequence[str]) -> list[str]:
        """How an answer begins that is calls, where there is no trigger."""
        if len(self.start) > 1:
            return [self.start]
        return [self.start + name + self.before_arguments for name in names]

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as (name, arguments in this syntax)."""
        each = [
            self.before_name + name + self.before_arguments + arguments + self.after_arguments
            for name, arguments in calls
        ]
        return self.opening + self.separator.join(each) + self.closing


@final
@dataclass(frozen=True)
class ReasoningFormat:
    opening: str
    closing: str


REASONING_FORMATS = (ReasoningFormat("<think>", "</think>"), ReasoningFormat("[THINK]", "[/THINK]"))

GENERIC = ToolCallFormat(name="json", separator="\n")
_FORMATS = (
    ToolCallFormat(
        name="hermes",
        before_name='<tool_call>\n{"name": "',
        before_arguments='", "arguments": ',
        after_arguments="}\n</tool_call>",
        separator="\n",
        trigger="<tool_call>",
    ),
    ToolCallFormat(
        name="qwen3-coder",
        before_name="<tool_call>\n<function=",
        before_arguments=">\n",
        after_arguments="</function>\n</tool_call>",
        syntax="xml",
        separator="\n",
        trigger="<tool_call>",
    ),
    ToolCallFormat(
        name="mistral",
        opening="[TOOL_CALLS][",
        separator=", ",
        closing="]",
        trigger="[TOOL_CALLS]",
        has_short_ids=True,
    ),
    ToolCallFormat(
        name="mistral-v3",
        opening="[TOOL_CALLS] [",
        separator=", ",
        closing="]",
        trigger="[TOOL_CALLS]",
        has_short_ids=True,
    ),
    ToolCallFormat(
        name="mistral-v11",
        before_name="[TOOL_CALLS]",
        before_arguments="[ARGS]",
        after_arguments="",
        trigger="[TOOL_CALLS]",
        has_short_ids=True,
    ),
    ToolCallFormat(
        name="phi-4-mini",
        opening="<|tool_call|>[",
        separator=", ",
        closing="]<|/tool_call|>",
        trigger="<|tool_call|>",
    ),
    ToolCallFormat(
        name="granite",
        opening="<|tool_call|>[",
        separator=", ",
        closing="]",
        trigger="<|tool_call|>",
    ),
    ToolCallFormat(
        name="functools",
        opening="functools[",
        separator=", ",
        closing="]",
        trigger="functools[",
    ),
    ToolCallFormat(
        name="deepseek-v3",
        opening="<｜tool▁calls▁begin｜>",
        before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        before_arguments="\n```json\n",
        after_arguments="\n```<｜tool▁call▁end｜>",
        separator="\n",
        closing="<｜tool▁calls▁end｜>",
        trigger="<｜tool▁calls▁begin｜>",
    ),
    ToolCallFormat(
        name="deepseek-v3.1",
        opening="<｜tool▁calls▁begin｜>",
        before_name="<｜tool▁call▁begin｜>",
        before_arguments="<｜tool▁sep｜>",
        after_arguments="<｜tool▁call▁end｜>",
        closing="<｜tool▁calls▁end｜>",
        trigger="<｜tool▁calls▁begin｜>",
    ),
    ToolCallFormat(
        name="lfm2",
        opening="<|tool_call_start|>[",
        before_name="",
        before_arguments="(",
        after_arguments=")",
        syntax="python",
        separator=", ",
        closing="]<|tool_call_end|>",
        trigger="<|tool_call_start|>",
    ),
    ToolCallFormat(
        name="llama",
        before_arguments='", "parameters": ',
        after_arguments="}",
        is_parallel=False,
    ),
    GENERIC,
    ToolCallFormat(
        name="pythonic",
        opening="[",
        before_name="",
        before_arguments="(",
        after_arguments=")",
        syntax="python",
        separator=", ",
        closing="]",
    ),
)
FORMATS = {each.name: each for each in _FORMATS}

_Format = TypeVar("_Format", ToolCallFormat, ReasoningFormat)


def literals_of(form: ToolCallFormat | ReasoningFormat) -> list[str]:
    """What it writes itself."""
    values = [getattr(form, field.name) for field in fields(form) if field.name not in ("name", "syntax")]
    return [value for value in values if isinstance(value, str)]


def marks_of(control_ids: Mapping[str, int]) -> dict[str, str]:
    """Of each control token's text the character that stands for it; longer texts first."""
    ordered = sorted(control_ids, key=len, reverse=True)
    return {text: chr(_FIRST_MARK + index) for index, text in enumerate(ordered)}


def in_vocabulary(form: _Format, marks: Mapping[str, str]) -> _Format:
    """The format with marks in place of control tokens."""

    def marked(value: object) -> object:
        for text, mark in marks.items() if isinstance(value, str) else ():
            assert isinstance(value, str)
            value = value.replace(text, mark)
        return value

    names = [field.name for field in fields(form) if field.name not in ("name", "syntax")]
    changes = {name: marked(getattr(form, name)) for name in names}
    return replace(form, **changes)  # type: ignore[arg-type]
