"""The schema of a plain function: types from its signature, descriptions from its docstring (Google's style)."""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from infer.errors import InvalidRequestError

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")
_ARGUMENT = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
Schema = dict[str, Any]


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
    return _generic(hint, typing.get_origin(hint), typing.get_args(hint), where)


def _generic(hint: Any, origin: Any, inner: tuple[Any, ...], where: str) -> Schema:
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
