"""The tools of a request as values, the calls that are allowed or required, and the past calls of its messages.

The schema of a plain function has types from its signature and descriptions from its docstring (Google's style). Past
calls have their arguments as values, because chat templates write the arguments themselves. Clients send a call back as
they received it, and a truncated answer has only a part of its arguments.
"""

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal, final

from infer.errors import InvalidRequestError
from infer.request_limits import MAX_TOOLS
from infer.system.json_limits import JsonLimitError, check_limits, is_deeper, refuse_constant
from infer.text.grammar.schema_values import properties_of
from infer.text.toolcalls.formats import spelt

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_OBJECTS = frozenset({"parameters", "input_schema", "properties"})  # of a tool
_VALUES = frozenset({"default", "const", "enum", "examples"})
Schema = dict[str, Any]


def with_objects(value: Any, key: str = "") -> Any:
    """Return tools or a schema with {} for each [] that must be an object, because PHP writes both alike."""
    if key in _VALUES:
        return value
    if isinstance(value, list):
        return [with_objects(each) for each in value] if value or key not in _OBJECTS else {}
    if not isinstance(value, dict):
        return value
    return {name: with_objects(each, "" if key == "properties" else name) for name, each in value.items()}


def tool_of_function(function: Callable[..., Any]) -> Schema:
    """Return the function's schema in OpenAI's format. A parameter with a default is optional.

    Raises InvalidRequestError if the function has no schema.
    """
    name = getattr(function, "__name__", type(function).__name__)
    try:
        signature = inspect.signature(function)
        hints = typing.get_type_hints(function, include_extras=True)
    except (TypeError, ValueError, NameError) as error:
        raise InvalidRequestError(f"the tool {name} has no signature that can be read: {error}") from error
    summary, descriptions = _documented(inspect.getdoc(function) or "")
    properties, required = dict[str, Schema](), list[str]()
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise InvalidRequestError(f"the tool {name}: {parameter} cannot be passed by name: leave it out")
        schema = _schema_of(hints.get(parameter.name, Any), f"the tool {name}: {parameter.name}")
        if text := descriptions.get(parameter.name):
            schema = {**schema, "description": text}
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": summary, "parameters": parameters}}


def _schema_of(hint: Any, where: str) -> Schema:
    if hint is Any:
        return {}
    if isinstance(hint, type) and hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _of_values([member.value for member in hint])
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        required = [f.name for f in dataclasses.fields(hint) if _is_required(f)]
        return _record(typing.get_type_hints(hint, include_extras=True), required, where)
    if typing.is_typeddict(hint):
        return _record(typing.get_type_hints(hint), sorted(hint.__required_keys__), where)
    if hint in (list, tuple, Sequence):
        return {"type": "array"}
    if hint in (dict, Mapping):
        return {"type": "object"}
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        texts = [each for each in inner[1:] if isinstance(each, str)]
        return _schema_of(inner[0], where) | ({"description": texts[0]} if texts else {})
    if origin is typing.Literal:
        return _of_values(list(inner))
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema_of(each, where) for each in inner]}
    if origin in (list, Sequence, set, frozenset) or (origin is tuple and inner[1:] == (...,)):
        return {"type": "array", "items": _schema_of(inner[0], where)}
    if origin in (dict, Mapping) and inner[0] is str:
        return {"type": "object", "additionalProperties": _schema_of(inner[1], where)}
    raise InvalidRequestError(f"{where} is {hint}, which has no JSON schema: give the tool as a schema")


def _of_values(values: list[Any]) -> Schema:
    kinds = {_SCALARS.get(type(value)) for value in values}
    (kind, *others) = kinds
    return {"enum": values} if others or kind is None else {"type": kind, "enum": values}


def _record(hints: Mapping[str, Any], required: list[str], where: str) -> Schema:
    properties = {name: _schema_of(hint, f"{where}.{name}") for name, hint in hints.items()}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _is_required(found: "dataclasses.Field[Any]") -> bool:
    return found.default is dataclasses.MISSING and found.default_factory is dataclasses.MISSING


def _documented(text: str) -> tuple[str, dict[str, str]]:
    """Return the text before the first section, and the description of each argument."""
    lines = text.splitlines()
    starts = [index for index, line in enumerate(lines) if _SECTION.match(line)]
    summary = " ".join(line.strip() for line in lines[: starts[0] if starts else None] if line.strip())
    found = dict[str, str]()
    for start in starts:
        if _SECTION.match(lines[start])[1] not in ("Args", "Arguments", "Parameters"):  # type: ignore[index]
            continue
        name = ""
        for line in lines[start + 1 :]:
            if _SECTION.match(line) or (line.strip() and not line.startswith((" ", "\t"))):
                break
            if argument := _ARGUMENT.match(line):
                name, found[argument[1]] = argument[1], argument[2].strip()
            elif name and line.strip():
                found[name] += " " + line.strip()
    return summary, found


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
        return properties_of(self.parameters)

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
    names = list(properties_of(parameters))
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


INVALID = "INVALID_JSON"


def past_arguments(given: Any) -> tuple[dict[str, Any], str | None]:
    """Return the arguments of a past call as an object, and a warning if they are not a JSON object.

    An empty text, null and an empty list, which is PHP's empty object, are `{}`. Some clients encode an object twice.
    Anything else becomes `{"INVALID_JSON": text}`.
    """
    if isinstance(given, dict):
        return given, None
    try:
        values = _decoded(_decoded(given))
        if isinstance(values, dict):
            json.dumps(values, ensure_ascii=False, allow_nan=False).encode()  # a lone surrogate is not text
            return values, None
        problem = f"they are {_written(values):.40}"
    except JsonLimitError as error:
        problem = f"they are {error}"
    except UnicodeEncodeError:
        problem = "they contain a lone surrogate"
    except ValueError as error:
        problem = str(error)
    text = given if isinstance(given, str) else _written(given)
    return {INVALID: text}, f'the arguments are not a JSON object ({problem:.120}): shown as {{"{INVALID}": …}}'


def _decoded(value: Any) -> Any:
    """Return the value of a JSON text, or the value itself; {} for a value that means an empty object."""
    if isinstance(value, str):
        check_limits(value)
        value = json.loads(value, parse_constant=refuse_constant) if value.strip() else None
    return {} if value in (None, []) else value


def with_values(messages: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """Return the messages with every call's arguments as an object, and a warning for each that is not one.

    A call may lack its `function`, as in templates' examples, if it has a name. Raises InvalidRequestError for one
    without a name.
    """
    shown, warnings = list[Any](), list[str]()
    for index, message in enumerate(messages):
        calls, where = (
            message.get("tool_calls") if isinstance(message, Mapping) else None,
            f"messages[{index}].tool_calls",
        )
        if calls and not isinstance(calls, list | tuple):
            raise InvalidRequestError(f"{where} must be a list of calls, got {calls!r:.60}")
        with_objects = list[Any]()
        for number, call in enumerate(calls or ()):
            call, warning = _call_with_values(call, f"{where}[{number}]")
            with_objects.append(call)
            if warning is not None:
                warnings.append(f"{where}[{number}]: {warning}")
        shown.append({**message, "tool_calls": with_objects} if calls else message)
    return shown, warnings


def _call_with_values(call: Any, where: str) -> tuple[Any, str | None]:
    match call:
        case {"function": {"name": str()} as function}:
            pass
        case {"name": str(name), **others} if "function" not in others:
            function, call = {"name": name, "arguments": others.pop("arguments", None)}, others
        case _:
            raise InvalidRequestError(f"{where} must have a function with a name, got {call!r:.60}")
    values, warning = past_arguments(function.get("arguments"))
    return {**call, "function": {**function, "arguments": values}}, warning


def _written(value: Any) -> str:
    try:
        return spelt(value)
    except (TypeError, ValueError, RecursionError):
        return repr(value)
