"""Read a tool's schema for a format of calls: its properties, and the keywords that the format can enforce."""

import json
import re
from collections.abc import Iterable, Mapping, Set
from typing import Any, NamedTuple, NoReturn

from infer.errors import PropertyNameError, SchemaError
from infer.text.toolcalls.formats import ToolCallFormat
from infer.text.toolcalls.tools import Tool

_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$/&~#]")
LENGTHS = ("minLength", "maxLength")
PYTHON_KEYS = frozenset({"type", "enum", "const", "anyOf", "items", "properties", "required", "additionalProperties"})
NUMBER_KEYS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
GEMMA_KEYS = {
    "anyOf": {"anyOf"},
    "enum": {"enum", "type"},
    "const": {"const", "type"},
    "type": {"type", "properties", "required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems"}
    | {"format", "pattern", *LENGTHS, *NUMBER_KEYS},
}  # each with the keywords that may be next to it
NOTES = frozenset({"title", "description", "default", "examples", "$schema", "deprecated"})
NOT_HELD = NOTES | {"$defs", "definitions"}
OBJECT_KEYS = NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
ASSERTIONS = frozenset(
    {
        *("type", "properties", "required", "items", "additionalProperties", "patternProperties", "prefixItems"),
        *("additionalItems", "enum", "const", "pattern", "format", "minLength", "maxLength", "minItems", "maxItems"),
        *("minProperties", "maxProperties", "minContains", "maxContains", "minimum", "maximum", "exclusiveMinimum"),
        *("exclusiveMaximum", "multipleOf", "divisibleBy", "uniqueItems", "contains", "propertyNames", "if", "then"),
        *("else", "not", "anyOf", "oneOf", "allOf", "extends", "disallow", "dependencies", "dependentRequired"),
        *("dependentSchemas", "unevaluatedProperties", "unevaluatedItems", "$ref", "$dynamicRef", "$recursiveRef"),
    }
)
DEFINITIONS = frozenset({"$defs", "definitions"})
_XML_NAME = re.compile(r"[\w$@.:/-]+")
_GEMMA_SIGNS = re.compile(r"[{}\[\],:]|^$")


class Spot(NamedTuple):
    """A schema inside a tool's parameters: the name of the argument, and the JSON pointer."""

    name: str
    pointer: str

    def inner(self, *steps: str | int) -> "Spot":
        return Spot(self.name, self.pointer + "".join(f"/{step}" for step in steps))

    def member(self, name: str) -> "Spot":
        """Return the place of a property. Messages name it by the property's name."""
        escaped = name.replace("~", "~0").replace("/", "~1")
        return Spot(name, f"{self.pointer}/properties/{escaped}")

    def refuse(self, problem: str) -> NoReturn:
        """Raise SchemaError for this place."""
        raise SchemaError(problem, self.pointer)

    def allow(self, schema: Mapping[str, Any], words: Set[str], kind: str = "") -> None:
        """Raise SchemaError for keywords that are not among these."""
        if others := sorted(set(schema) - words):
            self.refuse(f"{others[0]} of {kind}{self.name} cannot be enforced in this tool format: leave it out")


ROOT = Spot("the parameters", "")


def as_pattern(text: str) -> str:
    """Return the text as a pattern."""
    return _SPECIAL.sub(r"\\\g<0>", text).replace("\n", "\\n")


def properties_of(tool: Tool, form: str) -> dict[str, Any]:
    """Return each property with the definitions to which it may refer. Raises SchemaError."""
    if others := sorted(set(tool.parameters) - OBJECT_KEYS):
        ROOT.refuse(f"{others[0]} cannot be enforced in the tool format {form}: leave it out")
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    return {
        name: {**shared, **schema} if shared and isinstance(schema, Mapping) else schema
        for name, schema in tool.properties.items()
    }


def of_texts(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that constrain texts."""
    return {key: schema[key] for key in ("pattern", *LENGTHS) if key in schema}


def check_name(spot: Spot, form: ToolCallFormat) -> None:
    """Raise PropertyNameError for an argument that the format cannot name."""
    if form.syntax == "gemma":
        check_member_name(spot, form)
    elif not (_XML_NAME.fullmatch(spot.name) if form.syntax == "xml" else spot.name.isidentifier()):
        raise PropertyNameError(f"the tool format {form.name} cannot name {spot.name!r:.80}: rename it", spot.pointer)


def check_member_name(spot: Spot, form: ToolCallFormat) -> None:
    """Raise PropertyNameError for a member of an object that Gemma's formats cannot name."""
    if _GEMMA_SIGNS.search(spot.name) or form.quote in spot.name:
        raise PropertyNameError(f"the tool format {form.name} cannot name {spot.name!r:.80}: rename it", spot.pointer)


def words_of(problem: str) -> list[str]:
    """Return the words in a message, some of which may be keywords of a schema."""
    return re.findall(r"\$?\w+", problem)


def required_of(schema: Mapping[str, Any]) -> list[str]:
    """Return the required names. Draft 3 has a boolean in each property instead."""
    found = schema.get("required")
    inside = [name for name, each in _properties(schema).items() if _is_required(each)]
    return [*(found if isinstance(found, list) else ()), *inside]


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _is_required(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("required") is True


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    found: list[Any] | None = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return found


def one_of(rules: Iterable[str]) -> str:
    return f"({' | '.join(rules)})"


def has_words(schema: Any) -> bool:
    """Return True if a value may contain a word that Python and JSON spell differently."""
    if not isinstance(schema, Mapping):
        return False
    if (values := values_of(schema)) is not None:
        return not all(isinstance(value, str) or type(value) in (int, float) for value in values)
    if schema.get("type") == "array":
        return has_words(schema.get("items"))
    return schema.get("type") not in ("string", "integer", "number")


def has_texts(schema: Any) -> bool:
    """Return True if a value is a text, or a list of texts, that Python may write in single quotes."""
    if not isinstance(schema, Mapping):
        return False
    if (values := values_of(schema)) is not None:
        return any(in_single_quotes(value) for value in values)
    if schema.get("type") == "array":
        return has_texts(schema.get("items"))
    return schema.get("type") == "string"


def in_single_quotes(value: Any) -> list[str]:
    """Return the text in single quotes, or [] if it is not a text or needs an escape there."""
    is_simple = isinstance(value, str) and json.dumps(value, ensure_ascii=False) == f'"{value}"' and "'" not in value
    return [f"'{value}'"] if is_simple else []
