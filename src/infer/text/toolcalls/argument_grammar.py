"""The grammar of a call's arguments in llguidance's Lark, from the schema of a tool and the syntax of its format."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, final

from infer.errors import InvalidRequestError, problem_of
from infer.system.child_process import LateError, processor_seconds
from infer.system.sized_cache import SizedCache
from infer.text.grammar.grammar import Grammar, GrammarKind, Source
from infer.text.grammar.json_schema import rewrite_schema
from infer.text.grammar.libraries import Read, Try, read_within
from infer.text.grammar.patterns import check_pattern, translated, without_anchors
from infer.text.grammar.schema_rewriter import Omissions
from infer.text.toolcalls.answer_format import is_plain_text, written_value
from infer.text.toolcalls.formats import ToolCallFormat, spelt
from infer.text.toolcalls.lark_rules import (
    ANY_TEXT,
    BARE_KEYS,
    LENGTHS,
    NOT_HELD,
    NOTES,
    NUMBER_KEYS,
    OBJECT_KEYS,
    PYTHON_KEYS,
    ROOT,
    LarkRules,
    PartsLeftOut,
    Spot,
    as_pattern,
    in_single_quotes,
    may_differ,
    of_texts,
    one_of,
    required_of,
    values_of,
)
from infer.text.toolcalls.tools import Tool

MAX_RULE_BYTES = 16 << 20
SEARCH_SECONDS = 1.0  # processor seconds for the searches in one tool
ALL_SEARCH_SECONDS = 4.0  # processor seconds for the searches in all tools of a request
_LIBRARY = "llguidance"
_SINGLE_QUOTED = r"""/'([^'\\\x00-\x1f]|\\['"\\nrt])*'/"""
_SEPARATORS = {"python": '", "', "xml": '""', "bare": '","'}


@final
class ToolRules:
    """Reader of tools' schemas as rules of Lark, for this process. Results are cached, up to a size in bytes."""

    def __init__(self, library: Any, try_: Try, read_seconds: float) -> None:
        """Begin. `read_seconds` limits one schema. `try_` compiles a source and returns the problem, or ""."""
        self._library, self._try, self._read_seconds = library, try_, read_seconds
        self._parts = SizedCache[Read](MAX_RULE_BYTES)
        self._ends_at = 0.0
        self._tool_seconds = self._all_seconds = 0.0  # that are left for searches
        self._left_out: dict[str, Mapping[str, str]] = {}  # of the request's schemas, by their text
        self.warnings: dict[str, None] = {}  # warnings of all grammars

    def begin(self, seconds: float) -> None:
        """From now on, let the first trial after `seconds` of processor time (with forks) raise LateError."""
        self._ends_at = processor_seconds() + seconds
        self._tool_seconds = self._all_seconds = ALL_SEARCH_SECONDS
        self._left_out.clear()

    def begin_tool(self) -> bool:
        """Begin with the next tool. Return False if searches in the tools of the request have used up their time."""
        self._tool_seconds = min(SEARCH_SECONDS, self._all_seconds)
        return self._all_seconds > 0

    def part(self, grammar: Grammar) -> dict[str, Any]:
        """Return a checked and tried grammar, one of several grammars of llguidance. Raises InvalidRequestError."""
        return _part_of(self._read(grammar))

    def json_rule(self, schema: Any) -> str:
        """Return the rule of a schema that is enforced whole. Raises InvalidRequestError."""
        return self.loose_rule(schema, "json_schema")[0]

    def loose_rule(self, schema: Any, kind: GrammarKind) -> tuple[str, Sequence[tuple[str, str]]]:
        """Return the rule of a schema of this kind, and the parts that are left out. Raises InvalidRequestError."""
        read = self._read(Grammar(kind, json.dumps(schema)))
        return f"%json {json.dumps(_part_of(read)['json_schema'])}", read.left_out

    def left_out_of(self, schema: Any) -> Mapping[str, str]:
        """Return the reasons of the parts of a schema that no grammar can enforce, by pointer."""
        text = json.dumps(schema)
        if text not in self._left_out:
            omissions = Omissions(is_of_tool=True)
            rewrite_schema(text, "json_schema", omissions)
            self._left_out[text] = omissions.noted
        return self._left_out[text]

    def text_pattern(self, pattern: str) -> str:
        """Return a schema's pattern for a whole text, in the form that Lark has between slashes.

        An anchor at an end applies to all alternatives. Raises InvalidRequestError.
        """
        self.json_rule({"type": "string", "pattern": pattern})
        body = without_anchors(pattern)
        check_pattern(body, "pattern", allows_anchors=False)
        found = re.sub(r"(\\.)|/", lambda match: match[1] or "\\/", translated(body), flags=re.DOTALL)
        before = "" if pattern.startswith("^") else "(.|\\n)*"
        after = "" if pattern.removeprefix("^") != body else "(.|\\n)*"
        return f"{before}({found})".replace("\n", "\\n") + after

    def _read(self, grammar: Grammar) -> Read:
        if (read := self._parts.get(grammar)) is None:
            if processor_seconds() > self._ends_at:
                raise LateError
            read = read_within(self._library, _LIBRARY, self._tried, grammar, self._read_seconds, self._tool_seconds)
            texts = [grammar.text, read.source.text, *read.warnings, *(text for each in read.left_out for text in each)]
            self._parts.put(grammar, read, sum(map(len, texts)))
        self.warnings |= dict.fromkeys(read.warnings)
        return read

    def _tried(self, source: Source) -> str:
        """Try a source, and count the time if it has a problem."""
        begin = processor_seconds()
        problem = self._try(source)
        if problem:
            spent = processor_seconds() - begin
            self._tool_seconds, self._all_seconds = self._tool_seconds - spent, self._all_seconds - spent
        return problem


def _part_of(read: Read) -> dict[str, Any]:
    text = read.source.text
    part: dict[str, Any] = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
    return part


@final
class ArgumentGrammar:
    """Rules of the arguments of one tool in one format, which are added to `lark`. `schemas` compiles the schemas.

    If the tool is not strict, parts that cannot be enforced are left out. `left_out` has the reasons by pointer.
    """

    def __init__(self, form: ToolCallFormat, lark: LarkRules, schemas: ToolRules, tool: Tool) -> None:
        self._form, self._lark, self._schemas, self._tool = form, lark, schemas, tool
        self._literal = lark.literal
        self._parts = PartsLeftOut(is_strict=tool.is_strict)
        self.left_out = self._parts.problems

    def rule(self, name: str) -> str:
        """Return the rule of the tool's arguments. `name` begins the names of its parts.

        Raises InvalidRequestError if the schema cannot be enforced.
        """
        parameters = self._of_object()
        if self._form.syntax == "json":
            closed = {} if set(parameters) - OBJECT_KEYS else {"additionalProperties": False}
            first = {} if self._tool.is_strict else parameters  # keywords are named in their own order
            return self._json_rule(ROOT, {**first, **closed, **parameters})
        if self._form.syntax == "bare":
            self._json_rule(ROOT, parameters)  # it refuses values that are not schemas
        elif not self._tool.is_strict:
            self.left_out.update(self._schemas.left_out_of(parameters))
        parameters = self._parts.rest(ROOT, parameters)
        for word in sorted(set(parameters) - OBJECT_KEYS):
            problem = f"{word} cannot be enforced in the tool format {self._form.name}: leave it out"
            self._parts.note(ROOT, problem, word)
        required, each = required_of(parameters), list[tuple[str, bool]]()
        shared = {word: parameters[word] for word in ("$defs", "definitions") if word in parameters}
        for key, schema in parameters.get("properties", {}).items():
            spot = ROOT.member(key)
            if self._parts.can_name(spot, self._form):
                schema = self._parts.rest(spot, schema)
                schema = {**shared, **schema} if shared and isinstance(schema, Mapping) else schema
                each.append((self._argument(spot, schema), key in required))
        return self._lark.in_order(name, each, _SEPARATORS[self._form.syntax])

    def _of_object(self) -> Mapping[str, Any]:
        """Return the parameters as the schema of an object."""
        parameters = self._tool.parameters
        kind = parameters.get("type")
        if self._tool.is_strict or kind == "object":
            return parameters
        self._parts.note(ROOT, f"arguments must be an object, got {kind!r:.40}", "type")
        anything = {} if parameters.get("properties") else {"additionalProperties": True}
        return {**parameters, "type": "object", **anything}

    def _json_rule(self, spot: Spot, schema: Any) -> str:
        """Return the rule of a schema's values as JSON."""
        if self._tool.is_strict:
            return self._schemas.json_rule(schema)
        try:
            kind: GrammarKind = "tool_schema" if self._form.syntax == "json" else "argument_schema"
            rule, parts = self._schemas.loose_rule(schema, kind)
        except InvalidRequestError as error:
            if spot == ROOT:
                raise
            self._parts.note(spot, problem_of(error))
            return self._schemas.json_rule({})
        if spot == ROOT and (whole := dict(parts).get("")) is not None:
            raise InvalidRequestError(whole)
        for pointer, problem in parts:  # a definition next to an argument's schema is one of the tool
            is_shared = pointer.startswith(("/$defs/", "/definitions/"))
            self._parts.note(ROOT if is_shared else spot, problem, pointer[1:])
        return rule

    def _argument(self, spot: Spot, schema: Any) -> str:
        match self._form.syntax:
            case "python":
                return f"{json.dumps(spot.name + '=')} {self._python(spot, schema)}"
            case "bare":
                return f"{json.dumps(spot.name + ':')} {self._bare(spot, schema)}"
        return self._parameter(spot, schema)

    def _parameter(self, spot: Spot, schema: Any) -> str:
        before_key, after_key, after_value = self._form.around_argument
        opened, closed = self._literal(before_key + spot.name + after_key), self._literal(after_value)
        if not is_plain_text(self._tool.properties.get(spot.name)):
            return f"{opened} {self._json_rule(spot, schema)} {closed}"
        if (values := values_of(schema)) is not None:
            return f"{opened} {one_of(spelt(value) for value in values)} {closed}"
        return f"{opened} {self._plain_text(spot, schema, after_value)}"

    def _plain_text(self, spot: Spot, schema: Mapping[str, Any], closed: str) -> str:
        """Return a rule for any text that the schema allows, up to and including the first such literal."""
        schema = self._parts.allowed(spot, schema, NOT_HELD | {"type", "format", "pattern", *LENGTHS}, "the text ")
        number, end = self._lark.next_number(), "" if self._lark.is_control(closed) else as_pattern(closed)
        bounds = f"{schema.get('minLength', 0)},{schema.get('maxLength', '')}"
        held = [] if bounds == "0," else [f"(.|\\n){{{bounds}}}"]
        if pattern := self._text_pattern(spot, schema):
            held.append(pattern)
        limits = [f"/{each}{end}/" for each in held]
        if not end:
            self._lark.rules[f"TEXT_{number}"] = " & ".join([f"/{ANY_TEXT}/", *limits])
            may_be_empty = not schema.get("minLength") and not pattern
            return f"TEXT_{number}{'?' * may_be_empty} {self._literal(closed)}"
        limits += [f"~/{ANY_TEXT}{end}(.|\\n)+/"] * bool(held)  # the end appears only once
        self._lark.rules[f"text_{number}[lazy]"] = " & ".join([f"/{ANY_TEXT}{end}/", *limits])
        return f"text_{number}"

    def _text_pattern(self, spot: Spot, schema: Mapping[str, Any]) -> str:
        """Return the schema's pattern, or "" if it has none or if it is left out."""
        try:
            return self._schemas.text_pattern(schema["pattern"]) if "pattern" in schema else ""
        except InvalidRequestError as error:
            if self._tool.is_strict:
                raise
            self._parts.note(spot, problem_of(error), "pattern")
            return ""

    def _bare(self, spot: Spot, schema: Any) -> str:
        """Return the rule of a schema's values in the bare syntax."""
        schema = self._parts.rest(spot, schema)
        if schema is False:
            self._parts.note(spot, f"no value fulfils {spot.name}: leave it out")
        held = {key: schema[key] for key in schema if key not in NOT_HELD} if isinstance(schema, Mapping) else {}
        if not held:
            return self._any_bare()
        word = next((each for each in ("anyOf", "oneOf", "enum", "const") if each in held), "type")
        if word == "oneOf":
            self._parts.note(spot, f"oneOf of {spot.name} cannot be enforced in this tool format: leave it out", word)
        held = self._parts.allowed(spot, held, BARE_KEYS.get(word, {word}))
        if (values := values_of(held)) is not None:
            return one_of(self._literal(written_value(value, self._form.quote)) for value in values)
        if word in ("anyOf", "oneOf"):
            return one_of(self._bare(spot.inner(word, index), each) for index, each in enumerate(schema[word]))
        match held.get("type"):
            case list(kinds):
                return one_of(self._bare_of(kind, spot, held) for kind in kinds)
            case None:
                if held:
                    only = next(iter(held)) if len(held) == 1 else ""
                    self._parts.note(spot, f"{spot.name} needs a type in this tool format", only)
                return self._any_bare()
            case kind:
                return self._bare_of(kind, spot, held)

    def _bare_of(self, kind: str, spot: Spot, schema: Mapping[str, Any]) -> str:
        """Return the rule of a schema's values of one type."""
        match kind:
            case "string":
                return f"{self._literal(self._form.quote)} {self._plain_text(spot, of_texts(schema), self._form.quote)}"
            case "array":
                return self._bare_array(spot, schema)
            case "object":
                return self._bare_object(spot, schema)
        return self._json_rule(spot, {"type": kind} | {key: schema[key] for key in schema if key in NUMBER_KEYS})

    def _bare_array(self, spot: Spot, schema: Mapping[str, Any]) -> str:
        least, most, items = schema.get("minItems", 0), schema.get("maxItems"), schema.get("items", {})
        if parts := schema.get("prefixItems"):
            if items is False and least == len(parts):
                inner = enumerate(parts)
                each = ' "," '.join(self._bare(spot.inner("prefixItems", index), part) for index, part in inner)
                return f'"[" {each} "]"'
            problem = f"prefixItems of {spot.name} need items: false and minItems: {len(parts)} here"
            self._parts.note(spot, problem, "prefixItems")
            items = {}
        return '"[]"' if most == 0 else self._list(self._bare(spot.inner("items"), items), least, most)

    def _list(self, item: str, least: int = 0, most: int | None = None) -> str:
        """Return the rule of a list of at least one possible item."""
        rule = f"item_{self._lark.next_number()}"
        self._lark.rules[rule] = item
        bounds = f"{max(least - 1, 0)},{'' if most is None else most - 1}"
        others = "" if most == 1 else f"({_SEPARATORS[self._form.syntax]} {rule}){{{bounds}}}"
        return f'"[" ({rule} {others}){"" if least else "?"} "]"'

    def _object(self, each: Sequence[tuple[str, bool]]) -> str:
        """Return the rule of an object. The second of a member is True if it is required."""
        members = self._lark.in_order(f"object_{self._lark.next_number()}", each, _SEPARATORS[self._form.syntax])
        return f'"{{" {members} "}}"'

    def _bare_object(self, spot: Spot, schema: Mapping[str, Any]) -> str:
        """Return the rule of an object. If members are named, no others are allowed; otherwise any member is."""
        members, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        required, each = required_of(schema), list[tuple[str, bool]]()
        if absent := sorted(set(required) - set(members)):
            self._parts.note(spot, f"{absent[0]} of {spot.name} is required: add it to the properties", "required")
        if not members and more is not False:
            return self._bare_members(self._bare(spot.inner("additionalProperties"), more))
        for key, inner in members.items():
            at = spot.member(key)
            if self._parts.can_name(at, self._form):
                each.append((f"{spelt(key + ':')} {self._bare(at, inner)}", key in required))
        return self._object(each)

    def _bare_members(self, value: str) -> str:
        """Return the rule of an object with any members of this value."""
        rule = f"member_{self._lark.next_number()}"
        self._lark.rules[rule] = f'/[A-Za-z_][A-Za-z_0-9]*/ ":" {value}'
        return f'"{{" ({rule} ("," {rule})*)? "}}"'

    def _any_bare(self) -> str:
        if "any_value" not in self._lark.rules:
            self._lark.rules["any_value"] = ""
            text = f"{self._literal(self._form.quote)} {self._plain_text(ROOT, {}, self._form.quote)}"
            plain = self._schemas.json_rule({"type": ["number", "boolean", "null"]})
            items = '"[" (any_value ("," any_value)*)? "]"'
            self._lark.rules["any_value"] = f"{text} | {plain} | {items} | {self._bare_members('any_value')}"
        return "any_value"

    def _python(self, spot: Spot, schema: Any) -> str:
        """Return the rule of a schema's values as Python writes them.

        They are written as JSON if nothing differs, or if the schema has keywords that are not supported here. Texts
        may also have single quotes.
        """
        schema = self._parts.rest(spot, schema)
        if not may_differ(schema) or set(schema) - NOTES - PYTHON_KEYS:
            return self._json_rule(spot, schema)
        if (values := values_of(schema)) is not None:
            written = [text for value in values for text in (written_value(value), *in_single_quotes(value))]
            return one_of(spelt(text) for text in written)
        if "anyOf" in schema:
            return one_of(self._python(spot.inner("anyOf", index), each) for index, each in enumerate(schema["anyOf"]))
        match schema.get("type"):
            case list(kinds):
                return one_of(self._python(spot, {**schema, "type": kind}) for kind in kinds)
            case "string":
                self._lark.rules["QUOTED"] = _SINGLE_QUOTED
                return f"({self._json_rule(spot, schema)} | QUOTED)"
            case "boolean":
                return '("True" | "False")'
            case "null":
                return '"None"'
            case "array" if "items" in schema:
                return self._list(self._python(spot.inner("items"), schema["items"]))
            case "object" if schema.get("properties") and not schema.get("additionalProperties"):
                required, members = required_of(schema), schema["properties"].items()
                rules = {key: self._python(spot.member(key), inner) for key, inner in members}
                named = ((key, f"{self._literal(f'{written_value(key)}: ')} {rule}") for key, rule in rules.items())
                return self._object([(rule, key in required) for key, rule in named])
        return self._json_rule(spot, schema)
