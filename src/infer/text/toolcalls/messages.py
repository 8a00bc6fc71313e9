"""Messages with tools, calls and results, in the form that a chat template can show."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from infer.text.templates.chat_template import REASONING_FIELDS
from infer.text.templates.special_tokens import ComposedText
from infer.text.templates.template_messages import SYSTEM_ROLES, text_of_content
from infer.text.toolcalls.answer_format import TemplateFormats, written_arguments
from infer.text.toolcalls.formats import ToolCallFormat, spelt
from infer.text.toolcalls.tools import Tool, with_values

Message = Mapping[str, Any]
_AFTER_RESULTS = "\nNow answer with this, in words."  # without it, small models repeat the call


def shown_messages(messages: Sequence[Message], tools: Sequence[Tool], formats: TemplateFormats) -> list[Message]:
    """Return the messages, with everything that the template does not show written into their texts."""
    messages, _ = with_values(messages)
    if formats.shows_calls and not formats.calls.is_parallel:
        messages = _with_single_calls(messages)
    names = _names_by_id(messages)
    if not formats.takes_text_before_calls:
        messages = _with_text_before_calls(messages)
    if formats.takes_results_in_calls:
        messages = _with_results_in_calls(messages, names)
    shown_messages = list[Message]()
    for index, message in enumerate(messages):
        shown = message
        if isinstance(message, Mapping) and message.get("tool_calls"):
            shown = _as_taken(message, formats) if formats.shows_calls else _call_as_text(message, tools, formats.calls)
        elif _role_of(message) == "tool" and not formats.shows_results:
            text = _result_as_text(message, names)
            if index > 0 and _role_of(messages[index - 1]) == "tool":
                before = shown_messages[-1]["content"].removesuffix(_AFTER_RESULTS)
                shown_messages[-1] = {"role": "user", "content": f"{before}\n{text}"}
                continue
            shown = {"role": "user", "content": text}
        shown_messages.append(shown)
    return shown_messages if not tools or formats.shows_tools else _with_tools(shown_messages, tools, formats)


def shown_tools(tools: Sequence[Tool], formats: TemplateFormats) -> list[dict[str, Any]]:
    """Return the tools in the form that the template expects."""
    given = [tool.to_json() for tool in tools]
    return [each["function"] for each in given] if formats.takes_plain_tools else given


def _with_single_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with one call each, each followed by the results of its call."""
    ordered = list[Message]()
    pending = deque[Message]()  # messages with the further calls of one message
    num_pending = Counter[str | None]()  # number of these per call id
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        if _role_of(message) == "tool" and pending:
            wanted = _text_of(message, "tool_call_id")
            is_next = num_pending[wanted] == 0  # its call is already before it
            while not is_next:
                ordered.append(pending.popleft())
                call_id = _text_of(ordered[-1]["tool_calls"][0], "id")
                num_pending[call_id] -= 1
                is_next = call_id == wanted
        elif pending:
            ordered += pending
            pending.clear()
            num_pending.clear()
        if isinstance(calls, list) and len(calls) > 1 and all(isinstance(call, Mapping) for call in calls):
            message = {**message, "tool_calls": calls[:1]}
            pending = deque({"role": "assistant", "content": "", "tool_calls": [call]} for call in calls[1:])
            num_pending = Counter(_text_of(call, "id") for call in calls[1:])
        ordered.append(message)
    return [*ordered, *pending]


def _with_text_before_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the messages, with the text of a message with calls moved to a message before it."""
    divided = list[Message]()
    for message in messages:
        if isinstance(message, Mapping) and message.get("tool_calls") and message.get("content"):
            divided += [{"role": message.get("role"), "content": message["content"]}, {**message, "content": ""}]
        else:
            divided.append(message)
    return divided


def _with_results_in_calls(messages: Sequence[Message], names: Mapping[str, str]) -> list[Message]:
    """Return the messages with the results of calls inside the calling message, and the text that answers them."""
    joined = list[Message]()
    for message in messages:
        last = joined[-1] if joined and isinstance(joined[-1], Mapping) else {}
        calls, role = last.get("tool_calls"), _role_of(message)
        if role == "tool" and calls:
            name = message.get("name") or names.get(str(message.get("tool_call_id")), "unknown")
            response = {"name": name, "response": message.get("content")}
            joined[-1] = {**last, "tool_responses": [*last.get("tool_responses", ()), response]}
        elif role == "assistant" and last.get("tool_responses") and not message.get("tool_calls"):
            joined[-1] = {**last, "content": message.get("content")}
        else:
            joined.append(message)
    return joined


def _text_of(value: Mapping[str, Any], name: str) -> str | None:
    text = value.get(name)
    return text if isinstance(text, str) else None


def _role_of(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _as_taken(message: Message, formats: TemplateFormats) -> Message:
    shown = dict(message)
    name = next((each for each in REASONING_FIELDS if shown.get(each)), None)
    if not formats.takes_both and name is not None and shown.get("content"):
        shown[name] = f"{shown[name]}\n\n{text_of_content(shown['content'])}"
        shown["content"] = ""
    if formats.takes_no_content and not shown.get("content"):
        shown.pop("content", None)
    if not formats.takes_values:
        shown["tool_calls"] = [_call_with_text(call) for call in shown["tool_calls"]]
    return shown


def _call_with_text(call: Any) -> Any:
    match call:
        case {"function": {"arguments": dict(arguments)} as function}:
            return {**call, "function": {**function, "arguments": spelt(arguments)}}
    return call


def _call_as_text(message: Message, tools: Sequence[Tool], form: ToolCallFormat) -> Message:
    by_name = {tool.name: tool for tool in tools}
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [
        (each["name"], written_arguments(form, by_name.get(each["name"]), each["arguments"])) for each in functions
    ]
    text = text_of_content(message.get("content"))
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": ComposedText([(f"{text}\n" if text else "", False), *form.written_parts(calls)])}


def _names_by_id(messages: Sequence[Message]) -> dict[str, str]:
    calls = [call for message in messages if isinstance(message, Mapping) for call in message.get("tool_calls") or ()]
    return {str(call["id"]): call["function"]["name"] for call in calls if "id" in call}


def _result_as_text(message: Message, names: Mapping[str, str]) -> str:
    name = message.get("name") or names.get(str(message.get("tool_call_id")), "the function")
    return f"Result of {name}: {text_of_content(message.get('content'))}{_AFTER_RESULTS}"


def _with_tools(messages: Sequence[Message], tools: Sequence[Tool], formats: TemplateFormats) -> list[Message]:
    has_system = bool(messages) and messages[0].get("role") in SYSTEM_ROLES
    system: Message = messages[0] if has_system else {"role": "system", "content": ""}
    if formats.takes_tools_in_system:
        functions = [tool.to_json()["function"] for tool in tools]
        system = {**system, "tools": spelt(functions)}
    else:
        texts = text_of_content(system.get("content")), _tools_as_text(tools, formats.calls)
        text = "\n\n".join(filter(None, texts))
        system = {**system, "content": text}
    return [system, *messages[has_system:]]


def _tools_as_text(tools: Sequence[Tool], form: ToolCallFormat) -> str:
    lines = [spelt(tool.to_json()["function"]) for tool in tools]
    call = form.written([("NAME", '{"ARGUMENT": "VALUE"}')])
    last = f"To call one, answer with {call} and nothing else."
    return "\n".join(["You can call these functions, each with its JSON schema:", *lines, last])
