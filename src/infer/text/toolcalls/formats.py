"""The notation of tool calls and reasoning in each family of models, as rows of a table.

In a format that is `in_vocabulary`, a control token is one lone surrogate, because decoded text never contains one.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Literal, TypeVar, final

ArgumentSyntax = Literal["json", "python", "xml", "gemma"]
ID = "{id}"  # in `before_arguments`: nine letters and digits of the model's own, which are skipped
ID_PATTERN = "[A-Za-z0-9]{9}"
_FIRST_MARK = 0xD800
_EFFORTS = {"max": "xhigh"}  # templates use OpenAI's name
_HEADED_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}  # gpt-oss was trained with three


@final
@dataclass(frozen=True, kw_only=True)
class ToolCallFormat:
    """Notation of tool calls.

    A call is `before_name` name `before_arguments` arguments `after_arguments`. The calls of an answer are between
    `opening` and `closing`, with `separator` between two calls. Text may be before the first `trigger`. Without a
    trigger, the beginning of an answer distinguishes calls from text. In XML an argument is `before_key` key
    `after_key` value `after_value`. In Gemma's syntax a text is between two `quote`.
    """

    name: str
    before_name: str = '{"name": "'
    before_arguments: str = '", "arguments": '
    after_arguments: str = "}"
    syntax: ArgumentSyntax = "json"
    before_key: str = ""
    after_key: str = ""
    after_value: str = ""
    quote: str = ""
    opening: str = ""
    separator: str = ""
    closing: str = ""
    trigger: str = ""
    is_parallel: bool = True  # True if an answer may have several calls
    has_short_ids: bool = False
    ends_reasoning: bool = False  # True if models may begin a call without closing their reasoning

    @property
    def start(self) -> str:
        """Text before the name of the first call."""
        return self.opening + self.before_name

    @property
    def name_end(self) -> re.Pattern[str]:
        """Pattern of the text after a name. Without such a text, arguments or the end of the call follow."""
        if self.before_arguments:
            return pattern_of(self.before_arguments)
        return re.compile(f"(?={re.escape(self.before_key)}|{re.escape(self.after_arguments)})")

    def beginnings(self, names: Sequence[str]) -> list[str]:
        """Return the possible beginnings of an answer with calls, for a format without a trigger."""
        if len(self.start) > 1:
            return [self.start]
        return [self.start + name + self.before_arguments for name in names]

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return calls as text. Each call is (name, arguments in this syntax)."""
        return "".join(text for text, _ in self.written_parts(calls))

    def written_parts(self, calls: Sequence[tuple[str, str]]) -> list[tuple[str, bool]]:
        """Return the parts of the calls as text, each with True if the format itself writes it."""
        parts = [(self.opening, True)]
        for index, (name, arguments) in enumerate(calls):
            before_arguments = self.before_arguments.replace(ID, f"{index:09}")
            parts += [((self.separator if index else "") + self.before_name, True), (name, False)]
            parts += [(before_arguments, True), (arguments, False), (self.after_arguments, True)]
        return [*parts, (self.closing, True)]


@final
@dataclass(frozen=True)
class ReasoningFormat:
    """Notation of reasoning: the text between `opening` and `closing`.

    With a `body`, the whole answer consists of messages. A message is `start`, `role`, a header, `body`, a text and
    `closing`; the prompt ends after the first `start` and `role`. A header names a channel after `channel`; for
    reasoning it is in `opening`. It may name a type after `constrain`, and a tool as in `ToolCallFormat.before_name`.
    Text in `text_channel` is the answer, and text in `aside_channel` is shown before a call.
    """

    opening: str
    closing: str
    start: str = ""
    role: str = ""
    channel: str = ""
    constrain: str = ""
    body: str = ""
    text_channel: str = ""
    aside_channel: str = ""

    @property
    def sign(self) -> str:
        """Text that is in the template of every model with this format."""
        return self.opening if self.body else self.closing

    @property
    def own_channel(self) -> str:
        """Name of the channel of reasoning."""
        return self.opening.removeprefix(self.channel).removesuffix(self.body)

    def nearest_effort(self, effort: str) -> str:
        """Return the most similar effort that the models of the format know."""
        return (_HEADED_EFFORTS if self.body else _EFFORTS).get(effort, effort)


REASONING_FORMATS = (
    ReasoningFormat("<think>", "</think>"),
    ReasoningFormat("[THINK]", "[/THINK]"),
    ReasoningFormat("<seed:think>", "</seed:think>"),
    ReasoningFormat(  # Harmony
        "<|channel|>analysis<|message|>",
        "<|end|>",
        start="<|start|>",
        role="assistant",
        channel="<|channel|>",
        constrain="<|constrain|>",
        body="<|message|>",
        text_channel="final",
        aside_channel="commentary",
    ),
    ReasoningFormat("<|channel>thought", "<channel|>"),  # Gemma 4
)

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
        before_key="<parameter=",
        after_key=">\n",
        after_value="\n</parameter>\n",
        separator="\n",
        trigger="<tool_call>",
        ends_reasoning=True,
    ),
    ToolCallFormat(
        name="glm-4.5",
        before_name="<tool_call>",
        before_arguments="\n",
        after_arguments="</tool_call>",
        syntax="xml",
        before_key="<arg_key>",
        after_key="</arg_key>\n<arg_value>",
        after_value="</arg_value>\n",
        separator="\n",
        trigger="<tool_call>",
    ),
    ToolCallFormat(
        name="glm-4.7",
        before_name="<tool_call>",
        before_arguments="",
        after_arguments="</tool_call>",
        syntax="xml",
        before_key="<arg_key>",
        after_key="</arg_key><arg_value>",
        after_value="</arg_value>",
        trigger="<tool_call>",
    ),
    ToolCallFormat(
        name="minimax-m2",
        opening="<minimax:tool_call>\n",
        before_name='<invoke name="',
        before_arguments='">\n',
        after_arguments="</invoke>\n",
        syntax="xml",
        before_key='<parameter name="',
        after_key='">',
        after_value="</parameter>\n",
        closing="</minimax:tool_call>",
        trigger="<minimax:tool_call>",
    ),
    ToolCallFormat(
        name="seed-oss",
        before_name="<seed:tool_call>\n<function=",
        before_arguments=">\n",
        after_arguments="</function>\n</seed:tool_call>",
        syntax="xml",
        before_key="<parameter=",
        after_key=">",
        after_value="</parameter>\n",
        separator="\n",
        trigger="<seed:tool_call>",
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
        name="mistral-call-id",
        before_name="[TOOL_CALLS]",
        before_arguments=f"[CALL_ID]{ID}[ARGS]",
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
        name="functiongemma",
        before_name="<start_function_call>call:",
        before_arguments="{",
        after_arguments="}<end_function_call>",
        syntax="gemma",
        quote="<escape>",
        trigger="<start_function_call>",
    ),
    ToolCallFormat(
        name="gemma-4",
        before_name="<|tool_call>call:",
        before_arguments="{",
        after_arguments="}<tool_call|>",
        syntax="gemma",
        quote='<|"|>',
        trigger="<|tool_call>",
    ),
    ToolCallFormat(
        name="harmony",
        before_name="to=functions.",
        before_arguments="<|channel|>commentary json<|message|>",
        after_arguments="",
        trigger="to=functions.",
        is_parallel=False,
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
SIGNS = {"<|tool_list_start|>": "lfm2", "List of tools: [": "lfm2"}  # texts of templates that only list tools
HEADED = "harmony"  # the format of calls in answers of messages with headers

_Format = TypeVar("_Format", ToolCallFormat, ReasoningFormat)


@cache
def pattern_of(literal: str) -> re.Pattern[str]:
    """Return the pattern that finds a literal of a format in a text."""
    return re.compile(re.escape(literal).replace(re.escape(ID), ID_PATTERN))


def literals_of(form: ToolCallFormat | ReasoningFormat) -> list[str]:
    """Return the texts that the format itself writes."""
    values = [getattr(form, field.name) for field in fields(form) if field.name not in ("name", "syntax")]
    return [value for value in values if isinstance(value, str)]


def marks_of(control_ids: Mapping[str, int]) -> dict[str, str]:
    """Return the character that represents each control token, by the token's text; longer texts first."""
    ordered = sorted(control_ids, key=len, reverse=True)
    return {text: chr(_FIRST_MARK + index) for index, text in enumerate(ordered)}


def in_vocabulary(form: _Format, marks: Mapping[str, str]) -> _Format:
    """Return the format with marks in place of control tokens."""

    def marked(value: object) -> object:
        for text, mark in marks.items() if isinstance(value, str) else ():
            assert isinstance(value, str)
            value = value.replace(text, mark)
        return value

    names = [field.name for field in fields(form) if field.name not in ("name", "syntax")]
    changes = {name: marked(getattr(form, name)) for name in names}
    return replace(form, **changes)  # type: ignore[arg-type]
