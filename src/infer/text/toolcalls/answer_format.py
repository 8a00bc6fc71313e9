"""The parts of an answer besides text: reasoning first, then text, then calls, in the notation of a chat template.

The notation is found by rendering the template: how it writes calls, and which parts of tools it shows.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, final

from infer.errors import InvalidRequestError
from infer.text.toolcalls.formats import (
    FORMATS,
    GENERIC,
    HEADED,
    REASONING_FORMATS,
    SIGNS,
    SYSTEM_TOOLS_SIGN,
    WITH_SYSTEM_TOOLS,
    ReasoningFormat,
    ToolCallFormat,
    pattern_of,
    spelt,
)
from infer.text.toolcalls.tools import Kind, Tool

_SHORT_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SHORT_LENGTH = 9


@final
@dataclass(frozen=True)
class Calls:
    """Calls of these tools in this format, in the vocabulary of the tokenizer."""

    form: ToolCallFormat
    tools: tuple[Tool, ...]
    kind: Kind = "auto"
    is_parallel: bool = True

    @property
    def beginnings(self) -> list[str]:
        """Beginnings of calls, which distinguish calls from text."""
        if self.form.trigger or len(self.form.start) > 1:
            return [self.form.trigger or self.form.start]
        return self.first_texts

    @property
    def first_texts(self) -> list[str]:
        """The text of a first call up to its arguments, per tool."""
        return [self.form.start + tool.name + self.form.before_arguments for tool in self.tools]


@final
@dataclass(frozen=True)
class AnswerFormat:
    """Format of an answer.

    `marks` represent control tokens, by their ids. Reasoning `is_open` if the prompt has begun it. If it is not
    `is_apart`, it is a part of the text. After `budget` tokens the reasoning is closed. `warnings` name the parts of
    tools' schemas that are not enforced.
    """

    calls: Calls | None = None
    reasoning: ReasoningFormat | None = None
    is_open: bool = False
    is_apart: bool = True
    budget: int | None = None
    marks: Mapping[int, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def calls_in_reasoning(self) -> list[str]:
        """Beginnings of calls that end the reasoning like its closing, one per tool; [] if none does.

        With a budget, only the closing ends the reasoning.
        """
        calls = self.allowed_calls
        return calls.first_texts if calls and calls.form.ends_reasoning and self.budget is None else []

    @property
    def allowed_calls(self) -> Calls | None:
        return None if self.calls is None or self.calls.kind == "none" else self.calls

    def call_id(self, salt: bytes, index: int) -> str:
        """Return the id of a call: equal for equal requests, different for other requests and calls."""
        digest = blake2b(salt + index.to_bytes(4, "little"), digest_size=12)
        if self.calls is None or not self.calls.form.has_short_ids:
            return f"call_{digest.hexdigest()}"
        number, base = int.from_bytes(digest.digest(), "little"), len(_SHORT_ALPHABET)
        return "".join(_SHORT_ALPHABET[number // base**place % base] for place in range(_SHORT_LENGTH))


def is_plain_text(schema: Any) -> bool:
    """Return True if every value that the schema describes is a text."""
    if not isinstance(schema, Mapping):
        return False
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list | tuple):
        return all(isinstance(value, str) for value in values)
    return schema.get("type") == "string"


def written_arguments(form: ToolCallFormat, tool: Tool | None, arguments: Mapping[str, Any]) -> str:
    """Return arguments in the syntax of the format."""
    if form.syntax == "json":
        return spelt(arguments)
    if form.syntax == "python":
        return ", ".join(f"{name}={written_value(value)}" for name, value in arguments.items())
    if form.syntax == "bare":
        return written_value(arguments, form.quote)[1:-1]
    properties = {} if tool is None else tool.properties
    before_key, after_key, after_value = form.around_argument
    texts = [(name, each if is_plain_text(properties.get(name)) else spelt(each)) for name, each in arguments.items()]
    return "".join(f"{before_key}{name}{after_key}{text}{after_value}" for name, text in texts)


def written_value(value: Any, quote: str = "") -> str:
    """Return a value as Python writes it, but with texts as in JSON.

    With a quote, return it in the bare syntax: JSON without spaces, with bare names, and texts between two quotes.
    """
    separator, after_name = (",", ":") if quote else (", ", ": ")
    match value:
        case Mapping():
            members = ((name if quote else spelt(name), written_value(each, quote)) for name, each in value.items())
            return "{" + separator.join(f"{name}{after_name}{each}" for name, each in members) + "}"
        case list() | tuple():
            return f"[{separator.join(written_value(each, quote) for each in value)}]"
        case str() if quote:
            return f"{quote}{value}{quote}"
        case None | bool() if not quote:
            return str(value)
    return spelt(value)


Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]] | None], str]  # messages and tools; it may refuse
_PROPERTIES = {"probed_city": {"type": "string"}}
_TOOL = Tool("probed_weather", "", {"type": "object", "properties": _PROPERTIES, "required": ["probed_city"]})
_ARGUMENTS = {"probed_city": "Paris"}
_RESULT = "probed result"
_USER = {"role": "user", "content": "Hello"}
_ID = "abcdefghi"  # an id that Mistral's templates accept
_TOOLS = [_TOOL.to_json()]
_PLAIN_TOOLS = [_TOOL.to_json()["function"]]
_HEARD = {"role": "tool", "tool_call_id": _ID, "name": _TOOL.name, "content": _RESULT}
_STYLES = ((False, True), (True, True), (False, False), (True, False))  # takes_no_content, takes_values
_RESPONSES = "tool_responses"  # key of a message with calls, in the first templates of Gemma 4


@final
@dataclass(frozen=True)
class TemplateFormats:
    """Format of tool calls, and how the template expects them.

    `shows_…` is true if the template writes tools, past calls or their results; otherwise our own messages contain
    them. With `takes_tools_in_system`, it expects tools as a system message's `tools`, with `takes_plain_tools`, as
    functions that no object of type "function" contains, and with `takes_results_in_calls`, results as a calling
    message's `tool_responses`. The other fields describe how it expects a message with calls.
    """

    calls: ToolCallFormat
    shows_tools: bool = True
    shows_calls: bool = True
    shows_results: bool = True
    takes_tools_in_system: bool = False
    takes_plain_tools: bool = False
    takes_values: bool = True  # arguments are values, not a text
    takes_no_content: bool = False  # None as the content of a message with calls but no text
    takes_both: bool = True  # both reasoning and text in a message with calls
    takes_results_in_calls: bool = False
    takes_text_before_calls: bool = True  # text in the calling message is shown before the calls, not after the results


def reasoning_of(source: str) -> ReasoningFormat | None:
    """Return the reasoning format of a template that reads or opens it, or None."""
    return next((each for each in REASONING_FORMATS if each.sign in source), None)


def probe_template(render: Render, source: str, name: str | None) -> TemplateFormats:
    """Return the formats of a template. The call format is the one with this name, or the one that the template writes.

    Raises InvalidRequestError for an unknown name, or if the template's own call format is unknown.
    """
    if name is not None and name not in FORMATS:
        raise InvalidRequestError(f"tool_format must be one of {', '.join(FORMATS)}, got {name!r:.80}")
    reasoning = reasoning_of(source)
    if reasoning is not None and reasoning.body and name not in (None, HEADED):
        raise InvalidRequestError(f"tool_format must be {HEADED} with this chat template, got {name!r:.80}")
    in_system = SYSTEM_TOOLS_SIGN in source
    render, is_plain = _with_tools_as_taken(render)
    num_names = _tried(render, [_USER], _TOOLS).count(_TOOL.name)  # occurrences in the list of tools
    shows_tools = num_names > 0
    past_calls = [_past_call(render, *style) for style in _STYLES]
    found = FORMATS[name] if name is not None else _written_format(past_calls) or _named_format(source)
    if found is None and any(text.count(_TOOL.name) > num_names for text in past_calls) and shows_tools:
        known = ", ".join(FORMATS)
        raise InvalidRequestError(
            f"the chat template writes tool calls in an unknown format: set tool_format to one of {known}"
        )
    found = found if found is not None and (shows_tools or in_system or name) else GENERIC
    styles = [style for style, text in zip(_STYLES, past_calls, strict=True) if _is_written(found, text)]
    shows_calls, (takes_no_content, takes_values) = bool(styles), (styles or _STYLES)[0]
    shows_results = (shows_tools or in_system) and _shows_results(render, shows_calls)
    takes_both = not shows_calls or _takes_both(render, takes_values)
    takes_results = shows_calls and _takes_results_in_calls(render, source)
    return TemplateFormats(
        found,
        shows_tools=shows_tools,
        shows_calls=shows_calls,
        shows_results=shows_results,
        takes_tools_in_system=in_system,
        takes_plain_tools=is_plain,
        takes_values=takes_values,
        takes_no_content=takes_no_content,
        takes_both=takes_both,
        takes_results_in_calls=takes_results,
        takes_text_before_calls=not shows_results or _takes_text_before_calls(render, takes_results),
    )


def _with_tools_as_taken(render: Render) -> tuple[Render, bool]:
    """Return a renderer that passes tools as the template expects, and True if it expects plain functions."""
    if [_TOOL.name in _tried(render, [_USER], tools) for tools in (_TOOLS, _PLAIN_TOOLS)] != [False, True]:
        return render, False
    return lambda messages, tools: render(messages, tools and [each["function"] for each in tools]), True


def _past_call(render: Render, takes_no_content: bool, takes_values: bool) -> str:
    """Return a rendered conversation with a call."""
    message = _call_message(takes_values=takes_values)
    return _tried(render, [_USER, message | ({} if takes_no_content else {"content": ""})], _TOOLS)


def _takes_both(render: Render, takes_values: bool) -> bool:
    """Return False if the template refuses reasoning next to the text of a message with calls, but accepts the text."""
    message = _call_message(takes_values=takes_values) | {"content": "probed text"}
    both = message | {"reasoning_content": "probed reasoning"}
    return bool(_tried(render, [_USER, both], _TOOLS)) or not _tried(render, [_USER, message], _TOOLS)


def _call_message(*, takes_values: bool = True) -> dict[str, Any]:
    arguments = _ARGUMENTS if takes_values else json.dumps(_ARGUMENTS)
    call = {"id": _ID, "type": "function", "function": {"name": _TOOL.name, "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def _tried(render: Render, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
    """Return the rendered text, or "" if the template refuses."""
    try:
        return render(messages, tools)
    except InvalidRequestError:
        return ""


def _written_format(past_calls: Sequence[str]) -> ToolCallFormat | None:
    """Return the format that the template writes exactly, or otherwise one that differs only in spaces."""
    for squeeze in (str, _squeezed):
        for form in FORMATS.values():
            if any(_is_written(form, text, squeeze) for text in past_calls):
                return form
    return None


def _is_written(form: ToolCallFormat, text: str, squeeze: Callable[[str], str] | None = None) -> bool:
    squeeze = squeeze or _squeezed
    written = form.start + _TOOL.name + form.before_arguments + written_arguments(form, _TOOL, _ARGUMENTS)
    if form.syntax == "python":  # some templates write texts in single quotes
        text = text.replace("'", '"')
    return pattern_of(squeeze(written)).search(squeeze(text)) is not None


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _named_format(source: str) -> ToolCallFormat | None:
    """Return the format of a template that tells the model how to call, but does not write past calls itself."""
    if SYSTEM_TOOLS_SIGN in source:
        return FORMATS[WITH_SYSTEM_TOOLS]
    forms = [form for form in FORMATS.values() if form.trigger and form.name != WITH_SYSTEM_TOOLS]
    signed = (FORMATS[name] for sign, name in SIGNS.items() if sign in source)
    return next((form for form in forms if form.trigger in source), next(signed, None))


def _shows_results(render: Render, shows_calls: bool) -> bool:
    call = _call_message() if shows_calls else {"role": "assistant", "content": "probed call"}
    return any(_RESULT in _tried(render, [_USER, call | content, _HEARD], _TOOLS) for content in ({}, {"content": ""}))


def _takes_results_in_calls(render: Render, source: str) -> bool:
    """Return True if the template shows the results in a message with calls, and no separate message with a result."""
    if _RESPONSES not in source:
        return False
    inside, found, _ = _with_result(render, "", is_inside=True).partition(_RESULT)
    return bool(found) and inside != _with_result(render, "", is_inside=False).partition(_RESULT)[0]


def _takes_text_before_calls(render: Render, takes_results_in_calls: bool) -> bool:
    """Return False if the template shows a message's text after the results of the message's calls."""
    text = _with_result(render, "probed text", is_inside=takes_results_in_calls)
    return text.find("probed text") <= text.find(_RESULT)


def _with_result(render: Render, text: str, *, is_inside: bool) -> str:
    """Return a rendered conversation with a text, a call and its result, inside the calling message or separate."""
    call = _call_message() | {"content": text}
    responses = [{"name": _TOOL.name, "response": _RESULT}]
    messages = [_USER, call | {_RESPONSES: responses}] if is_inside else [_USER, call, _HEARD]
    return _tried(render, messages, _TOOLS)
