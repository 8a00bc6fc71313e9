"""The tools of a request as values: the calls that are allowed, and the calls that are required."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, final

from infer.errors import InvalidRequestError
from infer.request_limits import MAX_TOOLS
from infer.system.json_limits import is_deeper
from infer.text.toolcalls.signature import tool_of_function

MAX_NAME = 128
_MAX_NAMES = 256  # of a schema that allows anything
_NAME = re.compile(rf"[a-zA-Z0-9_.-]{{1,{MAX_NAME}}}")
ToolLike = Mapping[str, Any] | Callable[..., Any]
Kind = Literal["auto", "none", "required"]


@final
@dataclass(frozen=True)
class Tool:
    """A tool. `parameters` is the JSON schema of an object. `warnings` name the parts that were left out.

    The schema of a strict tool is enforced exactly, or the tool is refused. For any other tool, parts that cannot be
    enforced are left out.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    is_strict: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def properties(self) -> Mapping[str, Any]:
        found = self.parameters.get("properties")
        return found if isinstance(found, Mapping) else {}

    def to_json(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates expect."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def as_given(self) -> dict[str, Any]:
        """Return the tool in the form that `read_tools` accepts."""
        found = self.to_json()
        if self.is_strict:
            found["function"]["strict"] = True
        return found


@final
@dataclass(frozen=True)
class ToolChoice:
    """Choice of calls: allowed, required or none, for the tools with these names or for all.

    `is_named` is true if one tool is requested by name.
    """

    kind: Kind = "auto"
    names: tuple[str, ...] | None = None
    is_named: bool = False


def read_tools(given: Any) -> tuple[Tool, ...]:
    """Return tools from functions or schemas, in OpenAI's format or as the function only.

    Equal tools with the same name count once. Raises InvalidRequestError for an invalid tool.
    """
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        raise InvalidRequestError(f"tools must be a list of functions or schemas, got {given!r:.80}")
    if len(given) > MAX_TOOLS:
        raise InvalidRequestError(f"tools must have at most {MAX_TOOLS} entries, got {len(given)}")
    tools = tuple(_tool(f"tools[{index}]", each) for index, each in enumerate(given))
    found, texts = dict[str, Tool](), dict[str, str]()
    for tool in tools:
        known = found.setdefault(tool.name, tool)
        if known is not tool and tool.name not in texts:
            texts[tool.name] = _text_of(known.parameters)  # only once, because it may be long
        if known is not tool and _text_of(tool.parameters) != texts[tool.name]:
            raise InvalidRequestError(
                f"tools: names must differ, got {tool.name!r} twice with different parameters: rename one"
            )
        if tool.is_strict and not known.is_strict:
            found[tool.name] = replace(known, is_strict=True)
    return tuple(found.values())


def anything_for(parameters: Mapping[str, Any], *, is_json: bool) -> dict[str, Any]:
    """Return a schema of objects that allows anything. Formats other than JSON can only write named arguments."""
    anything = {"type": "object", "additionalProperties": True}
    properties = parameters.get("properties")
    names = list(properties) if isinstance(properties, Mapping) else []
    if is_json or not names or len(names) > _MAX_NAMES:
        return anything
    return {**anything, "properties": {str(name): {} for name in names}}


def _text_of(schema: Mapping[str, Any]) -> str:
    """Return a text that is equal for equal schemas."""
    try:
        return json.dumps(schema, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return repr(id(schema))


def read_tool_choice(given: Any, tools: Sequence[Tool]) -> ToolChoice:
    """Return the choice that is given as "auto", "none", "required", a name, or an object of OpenAI's API.

    Raises InvalidRequestError for an invalid choice or an unknown tool.
    """
    choice = _tool_choice(given)
    known = [tool.name for tool in tools]
    if choice.kind == "required" and not tools:
        raise InvalidRequestError(f"tool_choice {given!r:.80} needs tools: add them to the request")
    for name in choice.names or ():
        if name not in known:
            raise InvalidRequestError(
                f"tool_choice: {name!r:.80} is not a tool of the request: use one of {', '.join(known) or 'none'}"
            )
    return choice


def _tool_choice(given: Any) -> ToolChoice:
    match given:
        case None | "auto":
            return ToolChoice()
        case "none" | "required":
            return ToolChoice(given)
        case {"type": "function"}:
            return ToolChoice("required", (_allowed_name(given),), is_named=True)
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}:
            return _tool_choice({"type": "allowed_tools", "mode": mode, "tools": tools})
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(tools)}:
            return ToolChoice(mode, tuple(map(_allowed_name, tools)))
        case str(name):
            return ToolChoice("required", (name,), is_named=True)
    raise InvalidRequestError(
        f"tool_choice must be 'auto', 'none', 'required', the name of a tool or allowed_tools, got {given!r:.80}"
    )


def _allowed_name(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    raise InvalidRequestError(f"tool_choice must contain functions with names, got {tool!r:.80}")


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
    return _with_parameters(path, Tool(name, description or "", _EMPTY, function.get("strict") is True), function)


_MAX_DEPTH = 200  # of schemas for templates
_EMPTY: Mapping[str, Any] = {"type": "object", "properties": {}}


def _with_parameters(path: str, tool: Tool, function: Mapping[str, Any]) -> Tool:
    """Return the tool with the function's parameters.

    Raises InvalidRequestError for a strict tool whose parameters are not the schema of an object.
    """
    given = function.get("parameters")
    if given is None:
        return tool
    problem = ""
    if not isinstance(given, Mapping):
        problem = f"the parameters of {tool.name} must be a schema, got {given!r:.80}"
    elif is_deeper(given, _MAX_DEPTH):
        problem = f"the parameters of {tool.name} must be nested at most {_MAX_DEPTH} deep"
    if problem or not isinstance(given, Mapping):
        if tool.is_strict:
            raise InvalidRequestError(f"{path}: {problem}")
        anything = {**_EMPTY, "additionalProperties": True}
        return replace(tool, parameters=anything, warnings=(f"tool {tool.name!r}: left out: {problem}",))
    parameters = {**_EMPTY, **given}
    if tool.is_strict and parameters["type"] != "object":
        kind = parameters["type"]
        raise InvalidRequestError(f"{path}: the parameters of {tool.name} must be of type object, got {kind!r:.80}")
    return replace(tool, parameters=parameters)
