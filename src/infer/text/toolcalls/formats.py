"""The notation of tool calls and reasoning in each family of models, as rows of a table.

In a format that is `in_vocabulary`, a control token is one lone surrogate, because decoded text never contains one.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Literal, TypeVar, final

ArgumentSyntax = Literal["json", "python", "xml", "bare"]
spelt = json.JSONEncoder(ensure_ascii=False).encode  # a value as JSON, with all characters as they are
ID = "{id}"  # in a call: nine letters and digits of the model's own, which are skipped
INDEX = "{index}"  # in a call: its number among the calls of an answer
PATTERNS = {ID: "[A-Za-z0-9]{9}", INDEX: "[0-9]{1,3}"}
_FIRST_MARK = 0xD800
_SIGN_OF_CALLS = re.compile(r"[\ud800-\udfff]|<[^<>]+>|\[[A-Z_]+\]|\w{1,32}\[|to=\w+\.")
_EFFORTS = {"max": "xhigh"}  # templates use OpenAI's name
_HEADED_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}  # gpt-oss was trained with three


@final
@dataclass(frozen=True)
class ToolCallFormat:
    """Notation of tool calls, as samples.

    `call` has the places `{name}` and `{arguments}`, and perhaps `{id}` or `{index}`. `calls` has two `{call}`, and the
    text around and between the calls of an answer. In XML, `argument` has `{key}` and `{value}`. The bare syntax is
    JSON with names that have no quotes, and with each text between two `quote`.
    """

    name: str
    call: str
    calls: str = "{call}{call}"
    argument: str = ""
    syntax: ArgumentSyntax = "json"
    quote: str = ""
    is_parallel: bool = True  # True if an answer may have several calls
    has_short_ids: bool = False
    ends_reasoning: bool = False  # True if models may begin a call without closing their reasoning

    @property
    def before_name(self) -> str:
        return self.call.partition("{name}")[0]

    @property
    def before_arguments(self) -> str:
        return self.call.partition("{name}")[2].partition("{arguments}")[0]

    @property
    def after_arguments(self) -> str:
        return self.call.partition("{arguments}")[2]

    @property
    def around_argument(self) -> list[str]:
        """The texts before, inside and after an argument of XML."""
        return re.split(r"\{key\}|\{value\}", self.argument)

    @property
    def around_calls(self) -> list[str]:
        """The texts before, between and after the calls of an answer."""
        return self.calls.split("{call}")

    @property
    def start(self) -> str:
        """Text before the name of the first call."""
        return self.around_calls[0] + self.before_name

    @property
    def trigger(self) -> str:
        """The sign of a call before which text may be, or "" if only the beginning of an answer shows that it calls."""
        sign = _SIGN_OF_CALLS.match(self.start)
        return "" if sign is None else sign[0]

    @property
    def name_end(self) -> re.Pattern[str]:
        """Pattern of the text after a name. Without such a text, arguments or the end of the call follow."""
        if self.before_arguments:
            return pattern_of(self.before_arguments)
        return re.compile(f"(?={re.escape(self.around_argument[0])}|{re.escape(self.after_arguments)})")

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return calls as text. Each call is (name, arguments in this syntax)."""
        return "".join(text for text, _ in self.written_parts(calls))

    def written_parts(self, calls: Sequence[tuple[str, str]]) -> list[tuple[str, bool]]:
        """Return the parts of the calls as text, each with True if the format itself writes it."""
        opening, separator, closing = self.around_calls
        parts = [(opening, True)]
        for index, (name, arguments) in enumerate(calls):
            before_arguments = self.before_arguments.replace(ID, f"{index:09}")
            before_name = (separator if index else "") + self.before_name.replace(INDEX, str(index))
            parts += [(before_name, True), (name, False)]
            parts += [(before_arguments, True), (arguments, False), (self.after_arguments, True)]
        return [*parts, (closing, True)]


@final
@dataclass(frozen=True)
class ReasoningFormat:
    """Notation of reasoning: the text between `opening` and `closing`.

    Models may write the answer's text between `answer_opening` and `answer_closing`, which are never shown.

    With a `body`, the whole answer consists of messages. A message is `start`, `role`, a header, `body`, a text and
    `closing`; the prompt ends after the first `start` and `role`. A header names a channel after `channel`; for
    reasoning it is in `opening`. It may name a type after `constrain`, and a tool as in `ToolCallFormat.before_name`.
    Text in `text_channel` is the answer, and text in `aside_channel` is shown before a call.
    """

    opening: str
    closing: str
    answer_opening: str = ""
    answer_closing: str = ""
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
    ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ReasoningFormat(  # Command R7B and later
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        answer_opening="<|START_RESPONSE|>",
        answer_closing="<|END_RESPONSE|>",
    ),
)

_OBJECT = '{"name": "{name}", "arguments": {arguments}}'
_LINES = "{call}\n{call}"
GENERIC = ToolCallFormat("json", _OBJECT, _LINES)
_FORMATS = (
    ToolCallFormat("hermes", f"<tool_call>\n{_OBJECT}\n</tool_call>", _LINES),
    ToolCallFormat(
        "qwen3-coder",
        "<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
        _LINES,
        "<parameter={key}>\n{value}\n</parameter>\n",
        syntax="xml",
        ends_reasoning=True,
    ),
    ToolCallFormat(
        "glm-4.5",
        "<tool_call>{name}\n{arguments}</tool_call>",
        _LINES,
        "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
        syntax="xml",
    ),
    ToolCallFormat(
        "glm-4.7",
        "<tool_call>{name}{arguments}</tool_call>",
        argument="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
        syntax="xml",
    ),
    ToolCallFormat(
        "minimax-m2",
        '<invoke name="{name}">\n{arguments}</invoke>\n',
        "<minimax:tool_call>\n{call}{call}</minimax:tool_call>",
        '<parameter name="{key}">{value}</parameter>\n',
        syntax="xml",
    ),
    ToolCallFormat(
        "seed-oss",
        "<seed:tool_call>\n<function={name}>\n{arguments}</function>\n</seed:tool_call>",
        _LINES,
        "<parameter={key}>{value}</parameter>\n",
        syntax="xml",
    ),
    ToolCallFormat("mistral", _OBJECT, "[TOOL_CALLS][{call}, {call}]", has_short_ids=True),
    ToolCallFormat("mistral-v3", _OBJECT, "[TOOL_CALLS] [{call}, {call}]", has_short_ids=True),
    ToolCallFormat("mistral-v11", "[TOOL_CALLS]{name}[ARGS]{arguments}", has_short_ids=True),
    ToolCallFormat("mistral-call-id", f"[TOOL_CALLS]{{name}}[CALL_ID]{ID}[ARGS]{{arguments}}", has_short_ids=True),
    ToolCallFormat("phi-4-mini", _OBJECT, "<|tool_call|>[{call}, {call}]<|/tool_call|>"),
    ToolCallFormat("granite", _OBJECT, "<|tool_call|>[{call}, {call}]"),
    ToolCallFormat("functools", _OBJECT, "functools[{call}, {call}]"),
    ToolCallFormat(
        "apertus",
        '{"{name}": {arguments}}',
        "<|tools_prefix|>[{call}, {call}]<|tools_suffix|>",
        ends_reasoning=True,
    ),
    ToolCallFormat("hunyuan", _OBJECT, "<tool_calls>[{call}, {call}]</tool_calls>"),
    ToolCallFormat("jamba", _OBJECT, "<tool_calls>[\n    {call},\n    {call}\n]</tool_calls>"),
    ToolCallFormat(
        "command-r7b",
        '{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": {arguments}}',
        "<|START_ACTION|>[\n    {call},\n    {call}\n]<|END_ACTION|>",
    ),
    ToolCallFormat(
        "deepseek-v3",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>{call}\n{call}<｜tool▁calls▁end｜>",
    ),
    ToolCallFormat(
        "deepseek-v3.1",
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>{call}{call}<｜tool▁calls▁end｜>",
    ),
    ToolCallFormat(
        "lfm2",
        "{name}({arguments})",
        "<|tool_call_start|>[{call}, {call}]<|tool_call_end|>",
        syntax="python",
    ),
    ToolCallFormat(
        "functiongemma",
        "<start_function_call>call:{name}{{arguments}}<end_function_call>",
        syntax="bare",
        quote="<escape>",
    ),
    ToolCallFormat("gemma-4", "<|tool_call>call:{name}{{arguments}}<tool_call|>", syntax="bare", quote='<|"|>'),
    ToolCallFormat("harmony", "to=functions.{name}<|channel|>commentary json<|message|>{arguments}", is_parallel=False),
    ToolCallFormat("llama", '{"name": "{name}", "parameters": {arguments}}', is_parallel=False),
    GENERIC,
    ToolCallFormat("pythonic", "{name}({arguments})", "[{call}, {call}]", syntax="python"),
)
FORMATS = {each.name: each for each in _FORMATS}
# A template with this text reads the tools of a system message, and has the format of this name.
SYSTEM_TOOLS_SIGN, WITH_SYSTEM_TOOLS = "<|tool|>", "phi-4-mini"
SIGNS = {"<|tool_list_start|>": "lfm2", "List of tools: [": "lfm2"}  # texts of templates that only list tools
HEADED = "harmony"  # the format of calls in answers of messages with headers

_Format = TypeVar("_Format", ToolCallFormat, ReasoningFormat)


@cache
def pattern_of(literal: str) -> re.Pattern[str]:
    """Return the pattern that finds a literal of a format in a text."""
    pattern = re.escape(literal)
    for place, text in PATTERNS.items():
        pattern = pattern.replace(re.escape(place), text)
    return re.compile(pattern)


def literals_of(form: ToolCallFormat | ReasoningFormat) -> list[str]:
    """Return the texts that the format itself writes."""
    return [*_literal_by_field(form).values()]


def _literal_by_field(form: ToolCallFormat | ReasoningFormat) -> dict[str, str]:
    values = {field.name: getattr(form, field.name) for field in fields(form) if field.name not in ("name", "syntax")}
    return {name: value for name, value in values.items() if isinstance(value, str)}


def marks_of(control_ids: Mapping[str, int]) -> dict[str, str]:
    """Return the character that represents each control token, by the token's text; longer texts first."""
    ordered = sorted(control_ids, key=len, reverse=True)
    return {text: chr(_FIRST_MARK + index) for index, text in enumerate(ordered)}


def in_vocabulary(form: _Format, marks: Mapping[str, str]) -> _Format:
    """Return the format with marks in place of control tokens."""
    literals = _literal_by_field(form)
    for text, mark in marks.items():
        literals = {name: literal.replace(text, mark) for name, literal in literals.items()}
    return replace(form, **literals)  # type: ignore[arg-type]
