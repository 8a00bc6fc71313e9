"""The grammar of a call's arguments in llguidance's Lark, from the schema of a tool and the syntax of its format."""

import json
from collections.abc import Mapping
from typing import Any, Protocol, final, runtime_checkable

from infer.errors import SchemaError
from infer.text.toolcalls.answer_format import gemma_value, is_plain_text, written_value
from infer.text.toolcalls.formats import ToolCallFormat
from infer.text.toolcalls.lark_rules import ANY_TEXT, LarkRules
from infer.text.toolcalls.schema_words import (
    GEMMA_KEYS,
    LENGTHS,
    NOT_HELD,
    NOTES,
    NUMBER_KEYS,
    OBJECT_KEYS,
    PYTHON_KEYS,
    ROOT,
    Spot,
    as_pattern,
    check_member_name,
    check_name,
    has_texts,
    has_words,
    in_single_quotes,
    of_texts,
    one_of,
    properties_of,
    required_of,
    values_of,
)
from infer.text.toolcalls.tools import Tool

_SINGLE_QUOTED = r"""/'([^'\\\x00-\x1f]|\\['"\\nrt])*'/"""
_SEPARATORS = {"python": '", "', "xml": '""', "gemma": '","'}


@runtime_checkable
class Rules(Protocol):
    """Compiler of a tool's schema to Lark. Raises InvalidRequestError."""

    def json_rule(self, schema: Mapping[str, Any]) -> str: ...

    def text_pattern(self, pattern: str) -> str: ...

    def unreadable_parts(self, schema: Mapping[str, Any]) -> list[tuple[str, str]]: ...


@final
class ArgumentGrammar:
    """Rules of arguments in one format, which are added to `lark`. `schemas` compiles the schemas."""

    def __init__(self, form: ToolCallFormat, lark: LarkRules, schemas: Rules) -> None:
        self._form, self._lark, self._schemas = form, lark, schemas
        self._literal, self._json_rule = lark.literal, schemas.json_rule

    def rule(self, tool: Tool, name: str) -> str:
        """Return the rule of a tool's arguments. `name` begins the names of its parts.

        Raises InvalidRequestError if a schema cannot be enforced; SchemaError if the place is known.
        """
        if self._form.syntax == "json":
            is_simple = not set(tool.parameters) - OBJECT_KEYS
            return self._json_rule({"additionalProperties": False, **tool.parameters} if is_simple else tool.parameters)
        if self._form.syntax == "gemma":
            self._json_rule(tool.parameters)  # it refuses values that are not schemas
        required = required_of(tool.parameters)
        for key in tool.properties:
            check_name(ROOT.member(key), self._form)
        each = [
            (self._argument(ROOT.member(key), schema), key in required)
            for key, schema in properties_of(tool, self._form.name).items()
        ]
        return self._lark.in_order(name, each, _SEPARATORS[self._form.syntax])

    def _argument(self, spot: Spot, schema: Any) -> str:
        try:
            match self._form.syntax:
                case "python":
                    return f"{json.dumps(spot.name + '=')} {self._python(schema)}"
                case "gemma":
                    return f"{json.dumps(spot.name + ':')} {self._gemma(spot, schema)}"
            return self._parameter(spot, schema)
        except SchemaError as error:
            if error.pointer is not None and error.pointer.startswith(spot.pointer):
                raise
            inside = error.pointer or ""  # place in the argument's own schema, which has the definitions next to it
            pointer = inside if inside.startswith(("/$defs/", "/definitions/")) else spot.pointer + inside
            raise SchemaError(str(error), pointer, error.problem) from error

    def _parameter(self, spot: Spot, schema: Any) -> str:
        opened = self._literal(self._form.before_key + spot.name + self._form.after_key)
        closed = self._literal(self._form.after_value)
        if not is_plain_text(schema):
            return f"{opened} {self._json_rule(schema)} {closed}"
        if (values := values_of(schema)) is not None:
            return f"{opened} {one_of(json.dumps(value, ensure_ascii=False) for value in values)} {closed}"
        return f"{opened} {self._plain_text(spot, schema, self._form.after_value)}"

    def _plain_text(self, spot: Spot, schema: Mapping[str, Any], closed: str) -> str:
        """Return a rule for any text that the schema allows, up to and including the first occurrence of this literal.

        Raises SchemaError for keywords that cannot be enforced.
        """
        spot.allow(schema, NOT_HELD | {"type", "format", "pattern", *LENGTHS}, "the text ")
        number, end = self._lark.next_number(), "" if self._lark.is_control(closed) else as_pattern(closed)
        bounds = f"{schema.get('minLength', 0)},{schema.get('maxLength', '')}"
        held = [] if bounds == "0," else [f"(.|\\n){{{bounds}}}"]
        if "pattern" in schema:
            held.append(self._schemas.text_pattern(schema["pattern"]))
        limits = [f"/{each}{end}/" for each in held]
        if not end:
            self._lark.rules[f"TEXT_{number}"] = " & ".join([f"/{ANY_TEXT}/", *limits])
            may_be_empty = not schema.get("minLength") and "pattern" not in schema
            return f"TEXT_{number}{'?' * may_be_empty} {self._literal(closed)}"
        limits += [f"~/{ANY_TEXT}{end}(.|\\n)+/"] * bool(held)  # the end appears only once
        self._lark.rules[f"text_{number}[lazy]"] = " & ".join([f"/{ANY_TEXT}{end}/", *limits])
        return f"text_{number}"

    def _gemma(self, spot: Spot, schema: Any) -> str:
        """Return the rule of a schema's values with Gemma's quotes. Raises SchemaError."""
        if schema is False:
            spot.refuse(f"no value fulfils {spot.name}: leave it out")
        held = {} if schema is True else {key: schema[key] for key in schema if key not in NOT_HELD}
        if not held:
            return self._any_gemma()
        word = next((each for each in ("anyOf", "enum", "const") if each in held), "type")
        spot.allow(held, GEMMA_KEYS[word])
        if (values := values_of(held)) is not None:
            return one_of(self._literal(gemma_value(value, self._form.quote)) for value in values)
        if "anyOf" in held:
            return one_of(self._gemma(spot.inner("anyOf", index), each) for index, each in enumerate(held["anyOf"]))
        match schema.get("type"):
            case list(kinds):
                return one_of(self._gemma(spot, {**schema, "type": kind}) for kind in kinds)
            case "string":
                return f"{self._literal(self._form.quote)} {self._plain_text(spot, of_texts(schema), self._form.quote)}"
            case "array":
                return self._gemma_array(spot, schema)
            case "object":
                return self._gemma_object(spot, schema)
            case None:
                spot.refuse(f"{spot.name} needs a type in this tool format")
        return self._json_rule({key: held[key] for key in held if key == "type" or key in NUMBER_KEYS})

    def _gemma_array(self, spot: Spot, schema: Mapping[str, Any]) -> str:
        least, most, rule = schema.get("minItems", 0), schema.get("maxItems"), f"item_{self._lark.next_number()}"
        if parts := schema.get("prefixItems"):
            if schema.get("items") is not False or least != len(parts):
                spot.refuse(f"prefixItems of {spot.name} need items: false and minItems: {len(parts)} here")
            inner = enumerate(parts)
            each = ' "," '.join(self._gemma(spot.inner("prefixItems", index), part) for index, part in inner)
            return f'"[" {each} "]"'
        if most == 0:
            return '"[]"'
        self._lark.rules[rule] = self._gemma(spot.inner("items"), schema.get("items", {}))
        bounds = f"{max(least - 1, 0)},{'' if most is None else most - 1}"
        others = "" if most == 1 else f'("," {rule}){{{bounds}}}'
        return f'"[" ({rule} {others}){"" if least else "?"} "]"'

    def _gemma_object(self, spot: Spot, schema: Mapping[str, Any]) -> str:
        """Return the rule of an object. If members are named, no others are allowed; otherwise any member is."""
        members, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        rule, required, each = f"object_{self._lark.next_number()}", required_of(schema), list[tuple[str, bool]]()
        if absent := sorted(set(required) - set(members)):
            spot.refuse(f"{absent[0]} of {spot.name} is required: add it to the properties")
        if not members and more is not False:
            return self._gemma_members(self._gemma(spot.inner("additionalProperties"), more))
        for key, inner in members.items():
            at = spot.member(key)
            check_member_name(at, self._form)
            each.append((f"{json.dumps(key + ':', ensure_ascii=False)} {self._gemma(at, inner)}", key in required))
        return f'"{{" {self._lark.in_order(rule, each, _SEPARATORS["gemma"])} "}}"'

    def _gemma_members(self, value: str) -> str:
        """Return the rule of an object with any members of this value."""
        rule = f"member_{self._lark.next_number()}"
        self._lark.rules[rule] = f'/[A-Za-z_][A-Za-z_0-9]*/ ":" {value}'
        return f'"{{" ({rule} ("," {rule})*)? "}}"'

    def _any_gemma(self) -> str:
        if "any_value" not in self._lark.rules:
            self._lark.rules["any_value"] = ""
            text = f"{self._literal(self._form.quote)} {self._plain_text(ROOT, {}, self._form.quote)}"
            plain = self._json_rule({"type": ["number", "boolean", "null"]})
            items = '"[" (any_value ("," any_value)*)? "]"'
            self._lark.rules["any_value"] = f"{text} | {plain} | {items} | {self._gemma_members('any_value')}"
        return "any_value"

    def _python(self, schema: Any) -> str:
        """Return the rule of a schema's values as Python writes them.

        They are written as JSON if nothing differs, or if the schema has keywords that are not supported here. Texts
        may also have single quotes.
        """
        if not (has_words(schema) or has_texts(schema)) or set(schema) - NOTES - PYTHON_KEYS:
            return self._json_rule(schema)
        if (values := values_of(schema)) is not None:
            written = [text for value in values for text in (written_value(value), *in_single_quotes(value))]
            return one_of(json.dumps(text, ensure_ascii=False) for text in written)
        if "anyOf" in schema:
            return one_of(map(self._python, schema["anyOf"]))
        match schema.get("type"):
            case list(kinds):
                return one_of(self._python({**schema, "type": kind}) for kind in kinds)
            case "string":
                self._lark.rules["QUOTED"] = _SINGLE_QUOTED
                return f"({self._json_rule(schema)} | QUOTED)"
            case "boolean":
                return '("True" | "False")'
            case "null":
                return '"None"'
            case "array" if "items" in schema:
                item = self._python(schema["items"])
                return f'"[" ({item} (", " {item})*)? "]"'
            case "object" if schema.get("properties") and not schema.get("additionalProperties"):
                name, required = f"object_{self._lark.next_number()}", required_of(schema)
                each = [
                    (f"{self._literal(f'{written_value(key)}: ')} {self._python(inner)}", key in required)
                    for key, inner in schema["properties"].items()
                ]
                return f'"{{" {self._lark.in_order(name, each, json.dumps(", "))} "}}"'
        return self._json_rule(schema)
