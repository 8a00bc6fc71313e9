"""Convert conversations of other programs to messages and tools that this server reads, and these to a template's.

Clients send back the answers of any server, and their users cannot change these answers. So an earlier message is never
refused, except for an image or a file in the user's last message, which the answer would need.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from infer.serving.protocols.bodies import AssistantMessage, DeveloperMessage, Message, TextPart, ToolMessage
from infer.serving.protocols.body_fields import Reading, refuse
from infer.serving.protocols.response_items import OutputRefusal
from infer.text.toolcalls import past_calls

_WORDS = ("image", "audio", "video", "file", "document")
_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})


def complete_chat(given: Any, reading: Reading) -> Any:
    """Return a chat's body whose messages and tools have only known kinds of parts and tools.

    Raises BodyError for an image, audio or a file in the user's last message.
    """
    if not isinstance(given, dict):
        return given
    given = dict(given)
    if isinstance(messages := given.get("messages"), list):
        given["messages"] = complete_each(messages, reading, _message)
    if given.get("function_call") == "none":
        given.pop("functions", None)
    if isinstance(tools := given.get("tools"), list):
        given["tools"] = own_tools([_with_type(tool) for tool in tools], reading)
    return given


def complete_each(messages: list[Any], reading: Reading, complete: Callable[..., dict[str, Any]]) -> list[Any]:
    """Return the messages that `complete` makes. For the user's last message, it is called with `is_last`."""
    last = last_user(messages)
    return [
        complete(each, f"messages[{index}]", reading, is_last=index == last) if isinstance(each, dict) else each
        for index, each in enumerate(messages)
    ]


def last_user(messages: list[Any]) -> int:
    """Return the index of the user's last message, or -1 if there is none."""
    found = [index for index, each in enumerate(messages) if isinstance(each, dict) and each.get("role") == "user"]
    return found[-1] if found else -1


def own_tools(
    tools: list[Any],
    reading: Reading,
    own_kind: str = "function",
    expand: Callable[[Any, str], list[Any]] = lambda tool, path: [tool],
) -> list[Any]:
    """Return the tools that the client runs; a tool of another kind is left out with a warning.

    `expand` returns the tools that replace a tool, which it receives with its path.
    """
    found = list[Any]()
    for index, given in enumerate(tools):
        path = f"tools[{index}]"
        for tool in expand(given, path):
            kind = tool.get("type") if isinstance(tool, dict) else None
            if isinstance(kind, str) and kind != own_kind:
                reading.warn(f"{path} was left out: tools of type {kind!r:.40} cannot be run here")
            else:
                found.append(tool)
    return found


def text_parts(parts: list[Any], path: str, reading: Reading, text_type: str, *, is_last: bool) -> list[Any]:
    """Return the parts with this type for texts, and with a placeholder for each part that has no text.

    Raises BodyError for a part that has no text if `is_last`.
    """
    found = list[Any]()
    for index, part in enumerate(parts):
        if isinstance(part, str):
            found.append({"type": text_type, "text": part})
        elif not isinstance(part, dict) or not isinstance(kind := part.get("type", "text"), str):
            found.append(part)
        elif kind in _TEXT_TYPES:
            own = {name: value for name, value in part.items() if name not in ("type", "text")}
            kept = {**part, "type": text_type} if "type" in part or "text" in part else part
            found.append(kept | {"own": own} if own else kept)
        elif kind == "refusal":
            found.append(part)
        else:
            text = placeholder(kind, f"{path}[{index}]", reading, is_refused=is_last)
            found.append({"type": text_type, "text": text})
    return found


def placeholder(kind: str, path: str, reading: Reading, *, is_refused: bool) -> str:
    """Return the text that replaces a part that has no text, and warn about it. Raises BodyError if `is_refused`."""
    word = next((each for each in _WORDS if each in kind), "part")
    if is_refused:
        raise refuse(f"{path} is of type {kind!r:.40}: the model reads only text, leave the {word} out", path)
    reading.warn(f"{path} is of type {kind!r:.40} and was replaced by [{word}]: the model reads only text")
    return f"[{word}]"


def past_arguments(given: Any, path: str, reading: Reading) -> str:
    """Return the arguments of an earlier call as a JSON object, and warn if they are not one."""
    if isinstance(given, dict):
        return msgspec.json.encode(given).decode()
    text = given if isinstance(given, str | None) else msgspec.json.encode(given).decode()
    values, warning = past_calls.past_arguments(text)
    if warning is not None:
        reading.warn(f"{path}: {warning}")
    return json.dumps(values)


def _message(message: dict[str, Any], path: str, reading: Reading, *, is_last: bool) -> dict[str, Any]:
    found = dict(message)
    if found.get("role") == "function":  # OpenAI's format before tools
        found["role"] = "tool"
    if isinstance(content := found.get("content"), list):
        found["content"] = text_parts(content, f"{path}.content", reading, "text", is_last=is_last)
    calls = found.get("tool_calls")
    if isinstance(call := found.get("function_call"), dict) and not calls:  # OpenAI's format before tools
        calls = [{"function": call}]
    if isinstance(calls, list):
        found["tool_calls"] = [
            _call(each, f"{path}.tool_calls[{index}]", reading) if isinstance(each, dict) else each
            for index, each in enumerate(calls)
        ]
    return found


def _call(call: dict[str, Any], path: str, reading: Reading) -> dict[str, Any]:
    found = {name: value for name, value in call.items() if value is not None}
    if found.get("type") == "custom" and isinstance(custom := found.get("custom"), dict):
        arguments = {"input": custom.get("input")}
        return {**found, "type": "function", "function": {"name": custom.get("name"), "arguments": past_arguments(
            arguments, path, reading)}}  # fmt: skip
    if isinstance(function := found.get("function"), dict):
        place = f"{path}.function.arguments"
        found["function"] = {**function, "arguments": past_arguments(function.get("arguments"), place, reading)}
    return found


def _with_type(tool: Any) -> Any:
    """Return a tool of a chat with its type, which some clients leave out."""
    return {"type": "function", **tool} if isinstance(tool, dict) and "function" in tool else tool


# Messages for templates


def messages_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages as chat templates expect them.

    The tokenizer gives each template the form of contents that it reads. The developer's role becomes system, and the
    arguments of calls become objects.
    """
    return [_as_shown(message) for message in messages]


def _as_shown(message: Message) -> dict[str, Any]:
    role = "system" if isinstance(message, DeveloperMessage) else message.__struct_config__.tag
    content = message.content
    if isinstance(content, list) and not isinstance(message, AssistantMessage | ToolMessage):
        parts = [{**part.own, "type": "text", "text": part.text} for part in content if isinstance(part, TextPart)]
        found: dict[str, Any] = {"role": role, "content": parts}
    else:
        found = {"role": role, "content": text_of(content)}
    if message.name is not None:
        found["name"] = message.name
    if isinstance(message, ToolMessage) and message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        if message.content is None:
            found["content"] = message.refusal or ""
        if (reasoning := message.reasoning_content or message.reasoning) is not None:
            found["reasoning_content"] = reasoning
        if message.tool_calls:
            found["tool_calls"] = [
                call_of_message(call.id, call.function.name, call.function.arguments) for call in message.tool_calls
            ]
    return found


def call_of_message(call_id: str, name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """Return a past call with its arguments as values, because templates serialize them themselves.

    `arguments` is an object, or its JSON.
    """
    values = arguments if isinstance(arguments, dict) else msgspec.json.decode(arguments, type=dict[str, Any])
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": values}}


def text_of(content: Any) -> str:
    """Return the text of a content. The texts of parts are joined; without a content, the text is empty."""
    if not isinstance(content, list):
        return content or ""
    return "".join(part.refusal if isinstance(part, OutputRefusal) else part.text for part in content)
