"""A JSON schema, checked before any compiler sees it: its size, its keywords, and whether anything can fulfil it.

Each message names the place as a JSON pointer. All loops are over lists: depth costs no stack.
"""

import difflib
import json
import math
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple
from urllib.parse import unquote

from infer.constraint.horn import Clause, shortest
from infer.constraint.pattern import check_pattern, encoded
from infer.errors import InvalidRequestError

MAX_BYTES = 65_536
MAX_DEPTH = 64
MAX_ENUM = 10_000
MAX_OPTIONAL = 256
MAX_SHORTEST = 100_000  # bytes: no context holds more

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_IN_LIST = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_IN_MAP = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_IN_PLACE = frozenset({"items", "additionalProperties"})
_COUNTS = {"Length": "characters", "Items": "items", "Properties": "properties"}
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_ENFORCED = (
    frozenset(["type", "const", "enum", "$ref", "required", "pattern", "format"])
    | _IN_LIST
    | _IN_PLACE
    | _NUMBERS
    | {"properties", "patternProperties"}
    | {f"{end}{what}" for end in ("min", "max") for what in _COUNTS}
)
_ANNOTATIONS = frozenset(
    {
        *("$defs", "definitions", "$schema", "$id", "$anchor", "$comment", "title", "description"),
        *("default", "examples", "deprecated", "readOnly", "writeOnly", "contentMediaType"),
        *("contentEncoding",),
    }
)


class _Node(NamedTuple):
    pointer: str
    schema: Any


def check_schema(text: str, keywords: Set[str] | None = None, where: str = "json_schema") -> None:
    """`keywords` are those that the backend enforces, None for all. Raises InvalidRequestError."""
    size = len(encoded(text, where))
    if size > MAX_BYTES:
        raise InvalidRequestError(f"{where}: a schema may have {MAX_BYTES} bytes, got {size}")
    _check_depth(text, where)
    root = _read(text, where)
    nodes = {node.pointer: node.schema for node in _nodes(root, where)}
    for pointer, schema in nodes.items():
        at = f"{where} at {pointer or '/'}"
        if isinstance(schema, Mapping):
            _check_keywords(schema, keywords, pointer, at)
            _check_values(schema, at)
    _check_fulfillable(nodes, where)


def _read(text: str, where: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r:.80} is there twice")
        return found

    try:
        return json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
    except ValueError as error:
        raise InvalidRequestError(f"{where} is not JSON: {error}") from None


def _check_depth(text: str, where: str) -> None:
    depth, in_string, escaped = 0, False, False
    for index, character in enumerate(text):
        if in_string:
            if escaped or character == "\\":
                escaped = not escaped
            elif character == '"':
                in_string = False
        elif character == '"':
            in_string = True
        elif character in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise InvalidRequestError(f"{where}: brackets may be nested {MAX_DEPTH} deep, not so at {index + 1}")
        elif character in "]}":
            depth -= 1


def _nodes(root: Any, where: str) -> Iterator[_Node]:
    """Every subschema with its place. What is no schema where one must be is an error; values of enums are not read."""
    pending = [_Node("", root)]
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node.schema, bool):
            continue
        if not isinstance(node.schema, Mapping):
            raise InvalidRequestError(
                f"{where} at {node.pointer or '/'}: a schema is an object, true or false, got {node.schema!r:.40}"
            )
        for keyword, value in node.schema.items():
            place = f"{node.pointer}/{_escaped(keyword)}"
            if keyword in _IN_PLACE:
                pending.append(_Node(place, value))
            elif keyword in _IN_LIST and isinstance(value, list):
                pending += [_Node(f"{place}/{index}", item) for index, item in enumerate(value)]
            elif keyword in _IN_MAP and isinstance(value, Mapping):
                pending += [_Node(f"{place}/{_escaped(name)}", item) for name, item in value.items()]


def _check_keywords(schema: Mapping[str, Any], keywords: Set[str] | None, pointer: str, at: str) -> None:
    for keyword in schema:
        if keyword in _ANNOTATIONS or (keyword in _ENFORCED and (keywords is None or keyword in keywords)):
            continue
        if keyword in _ENFORCED:
            raise InvalidRequestError(f"{at}: the keyword {keyword!r} is not supported by this grammar backend")
        near = difflib.get_close_matches(keyword[:40], _ENFORCED, n=1)
        meant = f": did you mean {near[0]!r}?" if near and len(keyword) <= 40 else ""
        raise InvalidRequestError(f"{at}: the keyword {keyword!r:.80} is not supported{meant}")


def _check_values(schema: Mapping[str, Any], at: str) -> None:
    for keyword, value in schema.items():
        if keyword in _IN_LIST | {"enum", "required"} and not isinstance(value, list):
            raise InvalidRequestError(f"{at}: {keyword!r} must be a list, got {value!r:.40}")
        if keyword in _IN_MAP and not isinstance(value, Mapping):
            raise InvalidRequestError(f"{at}: {keyword!r} must be an object, got {value!r:.40}")
        if keyword in ("pattern", "format", "$ref") and not isinstance(value, str):
            raise InvalidRequestError(f"{at}: {keyword!r} must be a string, got {value!r:.40}")
        if keyword in _NUMBERS and not (_is_number(value) and (keyword != "multipleOf" or value > 0)):
            raise InvalidRequestError(
                f"{at}: {keyword!r} must be a finite number{' above 0' * (keyword == 'multipleOf')}, got {value!r:.40}"
            )
        if keyword[3:] in _COUNTS and not (_is_number(value) and value >= 0 and value == int(value)):
            raise InvalidRequestError(f"{at}: {keyword!r} must be an integer from 0, got {value!r:.40}")
    types = schema.get("type", [])
    for name in types if isinstance(types, list) else [types]:
        if name not in _TYPES:
            raise InvalidRequestError(f"{at}: 'type' must be one of {', '.join(_TYPES)}, got {name!r:.40}")
    if len(schema.get("enum", ())) > MAX_ENUM:
        raise InvalidRequestError(f"{at}: 'enum' may have {MAX_ENUM} values, got {len(schema['enum'])}")
    optional = set(schema.get("properties", ())) - {name for name in schema.get("required", ()) if name == str(name)}
    if len(optional) > MAX_OPTIONAL:
        raise InvalidRequestError(f"{at}: {MAX_OPTIONAL} properties may be optional, got {len(optional)}")
    for pattern in ([schema["pattern"]] if "pattern" in schema else []) + list(schema.get("patternProperties", ())):
        check_pattern(pattern, f"{at}: pattern")
    if not all(isinstance(name, str) for name in schema.get("required", ())):
        raise InvalidRequestError(f"{at}: 'required' must be a list of strings")
    _check_texts(schema, at)
    _check_ranges(schema, at)


def _check_texts(schema: Mapping[str, Any], at: str) -> None:
    """JSON may spell lone surrogates."""
    values = [schema.get("const"), *schema.get("enum", ()), *schema.get("properties", ()), *schema.get("required", ())]
    while values:
        value = values.pop()
        if isinstance(value, str):
            encoded(value, at)
        elif isinstance(value, Mapping):
            values += [*value, *value.values()]
        elif isinstance(value, list):
            values += value


def _check_ranges(schema: Mapping[str, Any], at: str) -> None:
    for what, unit in _COUNTS.items():
        least, most = schema.get(f"min{what}", 0), schema.get(f"max{what}", math.inf)
        if least > most:
            raise InvalidRequestError(f"{at}: nothing has at least {least} and at most {most} {unit}")
    least, most = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    above, below = schema.get("exclusiveMinimum", -math.inf), schema.get("exclusiveMaximum", math.inf)
    if max(least, above) > min(most, below) or above >= min(most, below) or max(least, above) >= below:
        raise InvalidRequestError(f"{at}: no number lies between its minimum and its maximum")


def _check_fulfillable(nodes: Mapping[str, Any], where: str) -> None:
    """Something finite fulfils it: no `$ref` that must be followed leads back for ever, nor on for too long."""
    clauses: list[Clause] = []
    for pointer, schema in nodes.items():
        if schema is True:
            clauses.append(Clause(pointer))
        elif schema is not False:
            clauses += _clauses(pointer, schema, nodes, where)
    lengths = shortest(clauses)
    if "" not in lengths:
        impossible = set(nodes) - lengths.keys()
        deepest = max(impossible, key=lambda pointer: (pointer.count("/"), pointer))
        raise InvalidRequestError(f"{where} at {deepest or '/'}: nothing can fulfil it")
    if lengths[""] > MAX_SHORTEST:
        raise InvalidRequestError(f"{where}: nothing shorter than {MAX_SHORTEST} bytes can fulfil it")


def _clauses(pointer: str, schema: Mapping[str, Any], nodes: Mapping[str, Any], where: str) -> Iterator[Clause]:
    needed: list[str] = []
    length = 0
    if "$ref" in schema:
        needed.append(_target(schema["$ref"], nodes, f"{where} at {pointer or '/'}"))
    if "allOf" in schema:  # what fulfils all of them is at least as long as what fulfils one
        for index in range(len(schema["allOf"])):
            yield Clause(f"{pointer}/allOf/{index} exists", (f"{pointer}/allOf/{index}",), times=0)
            needed.append(f"{pointer}/allOf/{index} exists")
    if schema.get("type") == "object":
        properties = schema.get("properties", {})
        for name in dict.fromkeys(schema.get("required", ())):
            length += len(name)
            if name in properties:
                needed.append(f"{pointer}/properties/{_escaped(name)}")
            elif "additionalProperties" in schema and not schema.get("patternProperties"):
                needed.append(f"{pointer}/additionalProperties")
    elif schema.get("type") == "array":
        least, first = int(schema.get("minItems", 0)), len(schema.get("prefixItems", ()))
        length += least
        needed += [f"{pointer}/prefixItems/{index}" for index in range(min(least, first))]
        if least > first and "items" in schema:
            yield Clause(f"{pointer} items", (f"{pointer}/items",), times=least - first)
            needed.append(f"{pointer} items")
    elif schema.get("type") == "string":
        length += int(schema.get("minLength", 0))
    for keyword in ("anyOf", "oneOf", "enum", "type"):
        options = schema.get(keyword)
        if isinstance(options, list):
            group = f"{pointer} {keyword}"
            needed.append(group)
            for index in range(len(options)):
                yield Clause(group, (f"{pointer}/{keyword}/{index}",) if keyword in _IN_LIST else ())
    yield Clause(pointer, needed, length)


def _target(reference: str, nodes: Mapping[str, Any], at: str) -> str:
    if not reference.startswith("#"):
        raise InvalidRequestError(f"{at}: '$ref' must stay in the schema (#/...), got {reference!r:.80}")
    pointer = unquote(reference[1:])
    if pointer not in nodes:
        raise InvalidRequestError(f"{at}: '$ref' leads to no schema: {reference!r:.80}")
    return pointer


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
