"""Convert conversations of other programs to the messages and tools that this server reads.

Clients send back the answers of any server, and their users cannot change them. So a history is never refused, except
for an image or a file in the user's last message, which the answer would need.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from infer.server.refusals import refuse
from infer.server.unknown_fields import Reading
from infer.toolcalls import past_calls

_WORDS = ("image", "audio", "video", "file", "document")
_TEXT_TYPES = frozenset({"text", "input_text", "output_text", "refusal"})


def complete_chat(given: Any, reading: Reading) -> Any:
    """Return a chat's body whose messages and tools have only known kinds of parts and tools.

    Raises ApiError 400 for an image, audio or a file in the user's last message.
    """
    if not isinstance(given, dict):
        return given
    given = dict(given)
    if isinstance(messages := given.get("messages"), list):
        last = last_user(messages)
        given["messages"] = [
            _message(message, f"messages[{index}]", reading, is_last=index == last)
            if isinstance(message, dict)
            else message
            for index, message in enumerate(messages)
        ]
    if given.get("function_call") == "none":
        given.pop("functions", None)
    if isinstance(tools := given.get("tools"), list):
        given["tools"] = function_tools(tools, reading, _with_type)
    return given


def last_user(messages: list[Any]) -> int:
    """Return the index of the user's last message, or -1 if there is none."""
    found = [index for index, each in enumerate(messages) if isinstance(each, dict) and each.get("role") == "user"]
    return found[-1] if found else -1


def function_tools(
    tools: list[Any], reading: Reading, complete: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> list[Any]:
    """Return the tools that are functions; a tool of another kind is left out with a warning."""
    found = list[Any]()
    for index, tool in enumerate(tools):
        tool = complete(tool) if isinstance(tool, dict) else tool
        if isinstance(tool, dict) and isinstance(kind := tool.get("type"), str) and kind != "function":
            reading.warn(f"tools[{index}] was left out: tools of type {kind!r:.40} are not run here")
            continue
        found.append(tool)
    return found


def text_parts(
    parts: list[Any], path: str, reading: Reading, *, is_last: bool, make: Callable[[str], dict[str, Any]]
) -> list[Any]:
    """Return the parts, with a placeholder for each part without text. Raises ApiError 400 for such a part if
    `is_last`.
    """
    found = list[Any]()
    for index, part in enumerate(parts):
        if isinstance(part, str):
            found.append(make(part))
        elif not isinstance(part, dict) or not isinstance(kind := part.get("type", "text"), str):
            found.append(part)
        elif kind in _TEXT_TYPES:
            found.append({"type": kind, **part} if "type" in part else make(part["text"]) if "text" in part else part)
        else:
            found.append(make(placeholder(kind, f"{path}[{index}]", reading, is_refused=is_last)))
    return found


def placeholder(kind: str, path: str, reading: Reading, *, is_refused: bool) -> str:
    """Return the text that replaces a part without text, and warn about it. Raises ApiError 400 if `is_refused`."""
    word = next((each for each in _WORDS if each in kind), "part")
    if is_refused:
        raise refuse(f"{path} is of type {kind!r:.40}: the model reads only text, so leave the {word} out", path)
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
    if found.get("role") == "function":  # OpenAI's, before tools
        found["role"] = "tool"
    if isinstance(content := found.get("content"), list):
        parts = text_parts(content, f"{path}.content", reading, is_last=is_last, make=_text_part)
        found["content"] = [_without_input(part) for part in parts]
    calls = found.get("tool_calls")
    if isinstance(call := found.get("function_call"), dict) and not calls:  # OpenAI's, before tools
        calls = [{"function": call}]
    if isinstance(calls, list):
        found["tool_calls"] = [
            _call(each, f"{path}.tool_calls[{index}]", reading) if isinstance(each, dict) else each
            for index, each in enumerate(calls)
        ]
    return found


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _without_input(part: Any) -> Any:
    """Return a part of /v1/responses as one of a chat."""
    if isinstance(part, dict) and part.get("type") in ("input_text", "output_text"):
        return part | {"type": "text"}
    return part


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


def _with_type(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool of a chat with the type that some clients leave out."""
    return {"type": "function", **tool} if "function" in tool else dict(tool)
