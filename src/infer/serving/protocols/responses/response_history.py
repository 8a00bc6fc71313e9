"""Convert bodies of `/v1/responses` from other programs to the items and tools that this server reads."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from infer.serving.protocols.chat_messages import last_user, own_tools, past_arguments, text_parts
from infer.serving.protocols.unknown_fields import Reading

_SEPARATOR = "__"  # between a namespace and a tool's name
_INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")
# Kinds of calls, with the field of their arguments and the name of a tool without a name.
_CALLS = {
    "function_call": ("arguments", ""),
    "custom_tool_call": ("input", "custom_tool"),
    "local_shell_call": ("action", "local_shell"),
    "shell_call": ("action", "shell"),
    "apply_patch_call": ("operation", "apply_patch"),
    "mcp_call": ("arguments", "mcp_tool"),
}


def complete_response(given: Any, reading: Reading) -> Any:
    """Return the body whose items, tools and tool choice have only known kinds.

    Raises BodyError for an image or a file in the user's last message, unless it has already been answered.
    """
    if not isinstance(given, dict):
        return given
    given = dict(given)
    if isinstance(items := given.get("input"), list):
        last = last_user(items)
        if any(map(_is_answer, items[last + 1 :])):
            last = -1
        given["input"] = [
            kept
            for index, item in enumerate(items)
            for kept in _items(item, f"input[{index}]", reading, is_last=index == last)
        ]
    if isinstance(tools := given.get("tools"), list):
        given["tools"] = own_tools(tools, reading, expand=partial(_functions, reading=reading))
    if isinstance(choice := given.get("tool_choice"), dict):
        given["tool_choice"] = _choice(choice, reading)
    if isinstance(include := given.get("include"), list):
        for each in include:
            if isinstance(each, str) and each not in _INCLUDED:
                reading.warn(f"include: {each!r:.60} was ignored: answers do not have it")
    return given


def name_in(namespace: Any, name: Any) -> Any:
    """Return the name by which the model calls a tool of a namespace."""
    return f"{namespace}{_SEPARATOR}{name}" if isinstance(namespace, str) and namespace else name


def name_apart(name: str, namespace: str) -> str:
    """Return the name that a tool has inside its namespace."""
    return name.removeprefix(namespace + _SEPARATOR)


def _is_answer(item: Any) -> bool:
    return isinstance(item, dict) and (item.get("role") == "assistant" or str(item.get("type", "")).endswith("_call"))


def _items(item: Any, path: str, reading: Reading, *, is_last: bool) -> list[Any]:
    """Return the items that replace one item, or none if it has nothing that a model can read. Raises BodyError."""
    if not isinstance(item, dict):
        return [item]
    kind = item.get("type", "message")
    match kind:
        case "message":
            return [_message({**item, "type": "message"}, path, reading, is_last=is_last)]
        case "function_call_output":
            return [{**item, "output": _output(item.get("output"), f"{path}.output", reading)}]
        case "reasoning":
            return _reasoning(item, path, reading)
        case str() if kind in _CALLS:
            return _call(item, kind, path, reading)
        case str() if kind.removesuffix("_output") in _CALLS:
            output = _output(item.get("output"), f"{path}.output", reading)
            return [{"type": "function_call_output", "call_id": _id_of(item), "output": output}]
        case str():
            reading.warn(f"{path} was left out: items of type {kind!r:.40} are unknown")
            return []
    return [item]


def _message(item: dict[str, Any], path: str, reading: Reading, *, is_last: bool) -> dict[str, Any]:
    content = item.get("content")
    if isinstance(content, list):
        return {**item, "content": text_parts(content, f"{path}.content", reading, "input_text", is_last=is_last)}
    return {**item, "content": ""} if content is None and "content" in item else item


def _call(item: dict[str, Any], kind: str, path: str, reading: Reading) -> list[Any]:
    field, name = _CALLS[kind]
    given = item.get(field)
    if kind == "custom_tool_call":
        given = {"input": given}
    found = {
        "type": "function_call",
        "call_id": _id_of(item),
        "name": name_in(item.get("namespace"), item.get("name") or name),
        "arguments": past_arguments(given, f"{path}.{field}", reading),
    }
    if kind != "mcp_call":
        return [found]
    output = _output(item.get("output") or item.get("error"), f"{path}.output", reading)
    return [found, {"type": "function_call_output", "call_id": found["call_id"], "output": output}]


def _id_of(item: Mapping[str, Any]) -> Any:
    """Return the id that links a call and its result."""
    return item.get("call_id") or item.get("id") or ""


def _output(given: Any, path: str, reading: Reading) -> Any:
    match given:
        case None:
            return ""
        case str():
            return given
        case [*parts] if all(isinstance(part, dict) and "type" in part for part in parts):
            return text_parts(parts, path, reading, "input_text", is_last=False)
    return msgspec.json.encode(given).decode()


def _reasoning(item: dict[str, Any], path: str, reading: Reading) -> list[Any]:
    content = item.get("content")
    parts = content if isinstance(content, list) else []
    found = [
        {"type": "reasoning_text", "text": part["text"]}
        for part in parts
        if isinstance(part, dict) and isinstance(part.get("text"), str)
    ]
    if not found and item.get("encrypted_content") is not None:
        reading.warn(f"{path} was left out: its reasoning is encrypted for another provider")
        return []
    return [{"type": "reasoning", "content": found}]


def _functions(tool: Any, path: str, reading: Reading) -> list[Any]:
    """Return the functions of a namespace, each named by both, or the tool itself."""
    match tool:
        case {"type": "namespace", "name": str(namespace), "tools": [*inner]}:
            found = [each for each in inner if isinstance(each, dict) and each.get("type") == "function"]
            if len(found) < len(inner):
                reading.warn(f"{path}: tools of {namespace!r:.60} that are not functions were left out")
            return [{**each, "name": name_in(namespace, each.get("name")), "namespace": namespace} for each in found]
        case {"type": "function"}:
            return [{name: value for name, value in tool.items() if name != "namespace"}]
    return [tool]


def _choice(choice: dict[str, Any], reading: Reading) -> dict[str, Any]:
    """Return the choice with the names that the model sees. Allowed tools that are not functions are left out."""
    if choice.get("type") == "function":
        return {"type": "function", "name": name_in(choice.get("namespace"), choice.get("name"))}
    tools = choice.get("tools")
    if choice.get("type") != "allowed_tools" or not isinstance(tools, list):
        return choice
    kept = own_tools(tools, reading)
    return {**choice, "tools": [_choice(each, reading) if isinstance(each, dict) else each for each in kept]}
