"""The tools of a request as values: what may be called, and what of it must be."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

from infer.errors import InvalidRequestError
from infer.toolcalls.signature import tool_of_function

MAX_TOOLS = 128
MAX_NAME = 128
_NAME = re.compile(rf"[a-zA-Z0-9_.-]{{1,{MAX_NAME}}}")
ToolLike = Mapping[str, Any] | Callable[..., Any]
Kind = Literal["auto", "none", "required"]


@final
@dataclass(frozen=True)
class Tool:
    """`parameters` is the JSON schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    is_strict: bool = False

    def to_json(self) -> dict[str, Any]:
        """As templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@final
@dataclass(frozen=True)
class ToolChoice:
    """Whether calls may or must be; of the tools with these names, or of all."""

    kind: Kind = "auto"
    names: tuple[str, ...] | None = None


def read_tools(given: Any) -> tuple[Tool, ...]:
    """Functions, or schemas as OpenAI's or the function alone. Raises InvalidRequestError."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        raise InvalidRequestError(f"tools must be a list of functions or schemas, got {given!r:.80}")
    if len(given) > MAX_TOOLS:
        raise InvalidRequestError(f"tools: there may be {MAX_TOOLS} of them, got {len(given)}")
    tools = tuple(_tool(f"tools[{index}]", each) for index, each in enumerate(given))
    names = [tool.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidRequestError(f"tools: names must differ, got {twice!r} twice: rename one")
    return tools


def read_tool_choice(given: Any, tools: Sequence[Tool]) -> ToolChoice:
    """ "auto", "none", "required", a name, or OpenAI's objects. Raises InvalidRequestError."""
    choice = _tool_choice(given)
    known = [tool.name for tool in tools]
    if choice.kind == "required" and not tools:
        raise InvalidRequestError(f"tool_choice {given!r:.80} needs tools: give some")
    for name in choice.names or ():
        if name not in known:
            raise InvalidRequestError(f"tool_choice: {name!r:.80} is no tool; there are {', '.join(known) or 'none'}")
    return choice


def _tool_choice(given: Any) -> ToolChoice:
    match given:
        case None | "auto":
            return ToolChoice()
        case "none" | "required":
            return ToolChoice(given)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return ToolChoice("required", (name,))
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}} if mode in _MODES:
            return ToolChoice(mode, tuple(map(_allowed_name, tools)))
        case {"type": "allowed_tools", "mode": mode, "tools": list(tools)} if mode in _MODES:
            return ToolChoice(mode, tuple(map(_allowed_name, tools)))
        case str(name):
            return ToolChoice("required", (name,))
    raise InvalidRequestError(
        f"tool_choice must be 'auto', 'none', 'required', the name of a tool or allowed_tools, got {given!r:.80}"
    )


_MODES = ("auto", "required")


def _allowed_name(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    raise InvalidRequestError(f"tool_choice.tools must hold functions with names, got {tool!r:.80}")


def _tool(path: str, given: Any) -> Tool:
    if callable(given):
        given = tool_of_function(given)
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"{path} must be a function or its schema, got {given!r:.80}")
    if given.get("type", "function") != "function":
        raise InvalidRequestError(f"{path}.type must be 'function', got {given['type']!r:.80}")
    function = given.get("function", given)
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{path}.function must be an object, got {function!r:.80}")
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        rule = f"1 to {MAX_NAME} letters, digits, '_', '.' or '-'"
        raise InvalidRequestError(f"{path}: a tool's name must be {rule}, got {name!r:.80}")
    if not isinstance(description, str | None):
        raise InvalidRequestError(f"{path}: the description of {name} must be a text, got {description!r:.80}")
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping | None):
        raise InvalidRequestError(f"{path}: the parameters of {name} must be a schema, got {parameters!r:.80}")
    schema = {"type": "object", "properties": {}, **(parameters or {})}
    if schema["type"] != "object":
        raise InvalidRequestError(
            f"{path}: the parameters of {name} must be of type object, got {schema['type']!r:.80}"
        )
    return Tool(name, description or "", schema, function.get("strict") is True)
