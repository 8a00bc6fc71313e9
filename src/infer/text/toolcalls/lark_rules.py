"""Rules of a grammar in llguidance's Lark, by name, and the keywords of a tool's schema from which they are made."""

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import count
from typing import Any, NamedTuple, final

from infer.errors import SchemaError
from infer.text.grammar.schema_logic import TYPES
from infer.text.grammar.schema_rewriter import ASSERTIONS, COMPANIONS
from infer.text.grammar.schema_values import escaped, is_required, properties_of
from infer.text.toolcalls.formats import PATTERNS, ToolCallFormat, spelt

ANY_TEXT = "(.|\\n)*"
_PARTS = re.compile("([\ud800-\udfff]|" + "|".join(map(re.escape, PATTERNS)) + ")")


@final
class LarkRules:
    """Rules of one grammar. `marks` represent control tokens in literals, by their ids."""

    def __init__(self, marks: Mapping[int, str]) -> None:
        self.rules: dict[str, str] = {}
        self._id_by_mark = {mark: token_id for token_id, mark in marks.items()}
        self._numbers = count()

    def text(self) -> str:
        return "\n".join(f"{name}: {rule}" for name, rule in self.rules.items()) + "\n"

    def next_number(self) -> int:
        """Return a number for the name of a rule that is made inside another rule."""
        return next(self._numbers)

    def in_order(self, name: str, each: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return the rule of all required items and any of the optional ones, in this order."""
        self.rules[f"{name}_first_{len(each)}"] = self.rules[f"{name}_more_{len(each)}"] = '""'
        for index in range(len(each) - 1, -1, -1):
            rule, is_required = each[index]
            first, more = f"{name}_first_{index + 1}", f"{name}_more_{index + 1}"
            self.rules[f"{name}_first_{index}"] = f"{rule} {more}" + ("" if is_required else f" | {first}")
            self.rules[f"{name}_more_{index}"] = f"({separator} {rule}){'' if is_required else '?'} {more}"
        return f"{name}_first_0"

    def is_control(self, literal: str) -> bool:
        return literal[:1] in self._id_by_mark

    def literal(self, text: str) -> str:
        return " ".join(self._part(part) for part in _PARTS.split(text) if part)

    def _part(self, part: str) -> str:
        if part in PATTERNS:
            return f"/{PATTERNS[part]}/"
        if part in self._id_by_mark:
            return f"<[{self._id_by_mark[part]}]>"
        return spelt(part)


_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$/&~#]")
LENGTHS = ("minLength", "maxLength")
PYTHON_KEYS = frozenset({"type", "enum", "const", "anyOf", "items", "properties", "required", "additionalProperties"})
NUMBER_KEYS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
BARE_KEYS = {
    "anyOf": {"anyOf"},
    "enum": {"enum", "type"},
    "const": {"const", "type"},
    "type": {"type", "properties", "required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems"}
    | {"format", "pattern", *LENGTHS, *NUMBER_KEYS},
}  # each with the keywords that may be next to it
NOTES = frozenset({"title", "description", "default", "examples", "$schema", "deprecated"})
NOT_HELD = NOTES | {"$defs", "definitions"}
OBJECT_KEYS = NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_IDS = frozenset({"$id", "id", "$anchor", "$dynamicAnchor"})
_KNOWN = frozenset(
    {
        *(ASSERTIONS | NOT_HELD | _IDS),
        *("then", "else", "minContains", "maxContains"),
        *("extends", "disallow", "divisibleBy"),  # of draft 3
    }
)
_XML_NAME = re.compile(r"[\w$@.:/-]+")
_BARE_SIGNS = re.compile(r"[{}\[\],:]|^$")


class Spot(NamedTuple):
    """A schema inside a tool's parameters: the name of the argument, and the JSON pointer."""

    name: str
    pointer: str

    def inner(self, *steps: str | int) -> "Spot":
        return Spot(self.name, self.pointer + "".join(f"/{step}" for step in steps))

    def member(self, name: str) -> "Spot":
        """Return the place of a property. Messages name it by the property's name."""
        return Spot(name, f"{self.pointer}/properties/{escaped(name)}")


ROOT = Spot("the parameters", "")


@final
class PartsLeftOut:
    """The parts of a tool's schema that are not enforced, with the reasons. A strict tool has none."""

    def __init__(self, *, is_strict: bool) -> None:
        self.problems: dict[str, str] = {}  # by JSON pointer
        self._is_strict = is_strict

    def note(self, spot: Spot, problem: str, word: str = "") -> None:
        """Leave out a schema, or a keyword of it. Raises SchemaError for a strict tool."""
        if self._is_strict:
            raise SchemaError(problem, spot.pointer)
        self.problems.setdefault(f"{spot.pointer}/{word}" if word else spot.pointer, problem)

    def rest(self, spot: Spot, schema: Any) -> Any:
        """Return a schema without the keywords that are left out, and without those that assert nothing.

        A `oneOf` that is left out stays, because its branches are still enforced as those of `anyOf`.
        """
        if self._is_strict or isinstance(schema, bool):
            return schema
        if spot.pointer in self.problems or not isinstance(schema, Mapping):
            kind = schema.get("type") if isinstance(schema, Mapping) else None
            return {"type": kind} if kind in TYPES else {}
        gone = {word for word in schema if f"{spot.pointer}/{escaped(word)}" in self.problems}
        gone |= {COMPANIONS[word] for word in gone & COMPANIONS.keys()}
        gone -= {"oneOf"} if isinstance(schema.get("oneOf"), list) and schema["oneOf"] else set()
        gone |= _IDS if spot == ROOT else set()
        return {word: value for word, value in schema.items() if word in _KNOWN and word not in gone}

    def allowed(self, spot: Spot, schema: Mapping[str, Any], words: Set[str], kind: str = "") -> dict[str, Any]:
        """Return the schema with these keywords only. The others are left out."""
        for word in sorted(set(schema) - words):
            self.note(spot, f"{word} of {kind}{spot.name} cannot be enforced in this tool format: leave it out", word)
        return {word: value for word, value in schema.items() if word in words}

    def can_name(self, spot: Spot, form: ToolCallFormat) -> bool:
        """Return True if the format can write the name of an argument or a member. Otherwise leave it out."""
        if form.syntax == "bare":
            is_name = not (_BARE_SIGNS.search(spot.name) or form.quote in spot.name)
        else:
            is_name = bool(_XML_NAME.fullmatch(spot.name)) if form.syntax == "xml" else spot.name.isidentifier()
        if not is_name:
            self.note(spot, f"the tool format {form.name} cannot name {spot.name!r:.80}: rename it")
        return is_name


def as_pattern(text: str) -> str:
    """Return the text as a pattern."""
    return _SPECIAL.sub(r"\\\g<0>", text).replace("\n", "\\n")


def of_texts(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that constrain texts."""
    return {key: schema[key] for key in ("pattern", *LENGTHS) if key in schema}


def required_of(schema: Mapping[str, Any]) -> list[str]:
    """Return the required names. Draft 3 has a boolean in each property instead."""
    found = schema.get("required")
    inside = [name for name, each in properties_of(schema).items() if is_required(each)]
    return [*(found if isinstance(found, list) else ()), *inside]


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    found: list[Any] | None = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return found


def one_of(rules: Iterable[str]) -> str:
    return f"({' | '.join(rules)})"


def may_differ(schema: Any) -> bool:
    """Return True if Python and JSON may write a value differently: a word, or a text, which may have single quotes."""
    if not isinstance(schema, Mapping):
        return False
    if (values := values_of(schema)) is not None:
        return any(in_single_quotes(value) or type(value) not in (str, int, float) for value in values)
    if schema.get("type") == "array":
        return may_differ(schema.get("items"))
    return schema.get("type") not in ("integer", "number")


def in_single_quotes(value: Any) -> list[str]:
    """Return the text in single quotes, or [] if it is not a text or needs an escape there."""
    is_simple = isinstance(value, str) and spelt(value) == f'"{value}"' and "'" not in value
    return [f"'{value}'"] if is_simple else []
