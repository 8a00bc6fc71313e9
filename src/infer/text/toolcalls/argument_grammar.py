"""The grammar of a call's arguments in llguidance's Lark, from the schema of a tool and the syntax of its format."""

import json
import re
from collections.abc import Callable, Mapping, Set
from typing import Any, final

from infer.errors import InvalidRequestError, SchemaError, problem_of
from infer.system.child_process import LateError, processor_seconds
from infer.system.sized_cache import SizedCache
from infer.text.grammar.grammar import Grammar, GrammarKind, Source
from infer.text.grammar.json_schema import BuiltSchema, pointed
from infer.text.grammar.libraries import Read, Try, read_within, schema_source
from infer.text.grammar.patterns import check_pattern, without_anchors
from infer.text.grammar.schema_logic import SchemaPart
from infer.text.grammar.schema_rewriter import ASSERTIONS
from infer.text.toolcalls.answer_format import is_plain_text, written_value
from infer.text.toolcalls.formats import ToolCallFormat, spelt
from infer.text.toolcalls.lark_rules import ANY_TEXT, LarkRules, as_pattern, one_of
from infer.text.toolcalls.tools import Tool

MAX_RULE_BYTES = 16 << 20
SEARCH_SECONDS = 1.0  # processor seconds for the searches in one tool
ALL_SEARCH_SECONDS = 4.0  # processor seconds for the searches in all tools of a request
_BYTES_PER_CHARACTER = 20  # memory of a schema that was read
_LIBRARY = "llguidance"
_SINGLE_QUOTED = r"""/'([^'\\\x00-\x1f]|\\['"\\nrt])*'/"""
_SEPARATORS = {"python": '", "', "xml": '""', "bare": '","'}
_LENGTHS = frozenset({"minLength", "maxLength"})
_NUMBER_KEYS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_OBJECT_KEYS = frozenset({"type", "properties", "required", "additionalProperties"})
_PYTHON_KEYS = _OBJECT_KEYS | {"enum", "const", "anyOf", "items"}
_TEXT_KEYS = _LENGTHS | {"type", "enum", "const", "format", "pattern"}
_BARE_KEYS = {  # each with the keywords that may be next to it
    "anyOf": {"anyOf"},
    "oneOf": set(),
    "enum": {"enum", "type"},
    "const": {"const", "type"},
    "type": _OBJECT_KEYS
    | _LENGTHS
    | _NUMBER_KEYS
    | {"items", "prefixItems", "minItems", "maxItems", "format", "pattern"},
}
_ANYTHING = SchemaPart("/", {})  # no place in a schema
_XML_NAME = re.compile(r"[\w$@.:/-]+")
_BARE_SIGNS = re.compile(r"[{}\[\],:]|^$")


@final
class ToolRules:
    """Reader of tools' schemas, for this process. Results are cached, up to a size in bytes."""

    def __init__(self, library: Any, try_: Try, read_seconds: float) -> None:
        """Begin. `read_seconds` limits one schema. `try_` compiles a source and returns the problem, or ""."""
        self._library, self._try, self._read_seconds = library, try_, read_seconds
        self._parts = SizedCache[Read](MAX_RULE_BYTES)
        self._problems = SizedCache[str](MAX_RULE_BYTES)
        self._ends_at = 0.0
        self._tool_seconds = self._all_seconds = 0.0  # that are left for searches
        self.warnings: dict[str, None] = {}  # warnings of all grammars

    def begin(self, seconds: float) -> None:
        """From now on, let the first trial after `seconds` of processor time (with forks) raise LateError."""
        self._ends_at = processor_seconds() + seconds
        self._tool_seconds = self._all_seconds = ALL_SEARCH_SECONDS

    def begin_tool(self) -> bool:
        """Begin with the next tool. Return False if searches in the tools of the request have used up their time."""
        self._tool_seconds = min(SEARCH_SECONDS, self._all_seconds)
        return self._all_seconds > 0

    def part(self, grammar: Grammar) -> dict[str, Any]:
        """Return a checked and tried grammar, one of several grammars of llguidance. Raises InvalidRequestError."""
        return _part_of(self._read(grammar).source)

    def schema(self, grammar: Grammar) -> BuiltSchema:
        """Return a schema that llguidance has compiled. Raises InvalidRequestError."""
        schema = self._read(grammar).schema
        assert schema is not None
        return schema

    def json_rule(self, text: str) -> str:
        """Return the rule of the text of a built schema."""
        return f"%json {json.dumps(_part_of(schema_source(self._library, text))['json_schema'])}"

    def problem_of(self, text: str) -> str:
        """Return the problem of the text of a built schema, or ""."""
        if (problem := self._problems.get(text)) is None:
            self._check_time()
            try:
                problem = self._tried(schema_source(self._library, text))
            except ValueError as error:  # the library's error about the text, before it compiles
                problem = str(error)
            self._problems.put(text, problem, len(text))
        return problem

    def _read(self, grammar: Grammar) -> Read:
        if (read := self._parts.get(grammar)) is None:
            self._check_time()
            read = read_within(self._library, _LIBRARY, self._tried, grammar, self._read_seconds, self._tool_seconds)
            self._parts.put(grammar, read, _BYTES_PER_CHARACTER * len(grammar.text) + len(read.source.text))
        self.warnings |= dict.fromkeys(read.warnings)
        return read

    def _check_time(self) -> None:
        if processor_seconds() > self._ends_at:
            raise LateError

    def _tried(self, source: Source) -> str:
        """Try a source, and count the time if it has a problem."""
        begin = processor_seconds()
        problem = self._try(source)
        if problem:
            spent = processor_seconds() - begin
            self._tool_seconds, self._all_seconds = self._tool_seconds - spent, self._all_seconds - spent
        return problem


def _part_of(source: Source) -> dict[str, Any]:
    text = source.text
    part: dict[str, Any] = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
    return part


@final
class ArgumentGrammar:
    """Rules of the arguments of one tool in one format, which are added to `lark`. `schemas` reads the schema.

    If the tool is not strict, parts that cannot be enforced are left out. `left_out` has the reasons by pointer.
    """

    def __init__(self, form: ToolCallFormat, lark: LarkRules, schemas: ToolRules, tool: Tool) -> None:
        self._form, self._lark, self._schemas, self._tool = form, lark, schemas, tool
        self._literal = lark.literal
        self.left_out: dict[str, str] = {}

    def rule(self, name: str) -> str:
        """Return the rule of the tool's arguments. `name` begins the names of its parts.

        Raises InvalidRequestError if the schema cannot be enforced.
        """
        is_json = self._form.syntax == "json"
        parameters = self._of_object()
        if is_json and not (ASSERTIONS & parameters.keys()) - _OBJECT_KEYS:
            parameters = {**parameters, "additionalProperties": parameters.get("additionalProperties", False)}
        kind: GrammarKind = "json_schema" if self._tool.is_strict else "tool_schema" if is_json else "argument_schema"
        self._schema = self._schemas.schema(Grammar(kind, json.dumps(parameters)))
        self.left_out |= self._schema.omissions.noted
        if "" in self.left_out:
            raise InvalidRequestError(self.left_out[""])
        if is_json:
            return self._schemas.json_rule(self._schema.text)
        self._allow(self._schema.root, _OBJECT_KEYS)
        return self._members(name, self._schema.root, self._argument)

    def _of_object(self) -> Mapping[str, Any]:
        """Return the parameters as the schema of an object."""
        parameters = self._tool.parameters
        kind = parameters.get("type")
        if self._tool.is_strict or kind == "object":
            return parameters
        self.left_out["/type"] = f"arguments must be an object, got {kind!r:.40}"
        anything = {} if parameters.get("properties") else {"additionalProperties": True}
        return {**parameters, "type": "object", **anything}

    def _leave_out(self, part: SchemaPart, problem: str, word: str = "") -> None:
        """Leave out a part, or a keyword of it. Raises SchemaError for a strict tool."""
        if self._tool.is_strict:
            raise SchemaError(problem, part.pointer)
        self.left_out.setdefault(f"{part.pointer}/{word}" if word else part.pointer, problem)

    def _given(self, part: SchemaPart) -> dict[str, Any]:
        """Return the keywords of a part as they were given, without those that assert nothing or are left out.

        A `oneOf` that is left out stays, because its branches are still enforced as those of `anyOf`.
        """
        raw = self._schema.omissions.places.get(part.pointer)
        if part.pointer in self.left_out or not isinstance(raw, Mapping):
            return {}
        gone = {word for word in raw if f"{part.pointer}/{word}" in self.left_out} - {"oneOf"}
        return {word: value for word, value in raw.items() if word in ASSERTIONS - gone}

    def _allow(self, part: SchemaPart, allowed: Set[str], kind: str = "") -> None:
        """Leave out the other keywords of a part."""
        problem = f"cannot be enforced in the tool format {self._form.name}: leave it out"
        if part.pointer:
            problem = f"of {kind}{_name_of(part)} cannot be enforced in this tool format: leave it out"
        for word in sorted(self._given(part).keys() - allowed):
            self._leave_out(part, f"{word} {problem}", word)

    def _members(self, name: str, part: SchemaPart, rule_of: Callable[[str, SchemaPart], str]) -> str:
        """Return the rule of an object's members in their order, without those that the format cannot name."""
        required, is_argument = part.get("required", ()), not part.pointer
        members = [
            (rule_of(key, inner), key in required)
            for key, inner in part.get("properties", {}).items()
            if (self._form.syntax == "python" and not is_argument) or self._can_name(key, inner)
        ]
        return self._lark.in_order(name, members, _SEPARATORS[self._form.syntax])

    def _can_name(self, name: str, part: SchemaPart) -> bool:
        """Return True if the format can write the name of an argument or a member. Otherwise leave it out."""
        if self._form.syntax == "bare":
            is_name = not (_BARE_SIGNS.search(name) or self._form.quote in name)
        else:
            is_name = bool(_XML_NAME.fullmatch(name)) if self._form.syntax == "xml" else name.isidentifier()
        if not is_name:
            self._leave_out(part, f"the tool format {self._form.name} cannot name {name!r:.80}: rename it")
        return is_name

    def _argument(self, name: str, part: SchemaPart) -> str:
        match self._form.syntax:
            case "python":
                return f"{json.dumps(name + '=')} {self._python(part)}"
            case "bare":
                return f"{spelt(name + ':')} {self._bare(part)}"
        before_key, after_key, after_value = self._form.around_argument
        opened, closed = self._literal(before_key + name + after_key), self._literal(after_value)
        if not is_plain_text(self._tool.properties.get(name)):
            return f"{opened} {self._json(part)} {closed}"
        if part.constants is not None:
            return f"{opened} {one_of(map(spelt, part.constants))} {closed}"
        self._allow(part, _TEXT_KEYS, "the text ")
        return f"{opened} {self._plain_text(part, after_value)}"

    def _json(self, part: SchemaPart) -> str:
        """Return the rule of a part's values as JSON. If no value fulfils it, only its type is left."""
        text = self._schema.text_of(part)
        problem = "no value can fulfil it" if part.is_false else self._schemas.problem_of(text)
        if problem:
            self._leave_out(part, pointed(problem, "")[2:])
            text = json.dumps({"type": part.types})
        return self._schemas.json_rule(text)

    def _plain_text(self, part: SchemaPart, closed: str) -> str:
        """Return a rule for any text that the schema allows, up to and including the first such literal."""
        number, end = self._lark.next_number(), "" if self._lark.is_control(closed) else as_pattern(closed)
        bounds = f"{part.get('minLength', 0)},{part.get('maxLength', '')}"
        held = [] if bounds == "0," else [f"(.|\\n){{{bounds}}}"]
        if pattern := self._text_pattern(part):
            held.append(pattern)
        limits = [f"/{each}{end}/" for each in held]
        if not end:
            self._lark.rules[f"TEXT_{number}"] = " & ".join([f"/{ANY_TEXT}/", *limits])
            may_be_empty = not part.get("minLength") and not pattern
            return f"TEXT_{number}{'?' * may_be_empty} {self._literal(closed)}"
        limits += [f"~/{ANY_TEXT}{end}(.|\\n)+/"] * bool(held)  # the end appears only once
        self._lark.rules[f"text_{number}[lazy]"] = " & ".join([f"/{ANY_TEXT}{end}/", *limits])
        return f"text_{number}"

    def _text_pattern(self, part: SchemaPart) -> str:
        """Return the pattern of a whole text, in the form that Lark has between slashes, or "" if there is none.

        An anchor at an end applies to all alternatives.
        """
        if "pattern" not in self._given(part):
            return ""
        pattern = part["pattern"]
        body = without_anchors(pattern)
        try:
            check_pattern(body, "pattern", allows_anchors=False)
        except InvalidRequestError as error:
            self._leave_out(part, problem_of(error), "pattern")
            return ""
        slashed = re.sub(r"(\\.)|/", lambda match: match[1] or "\\/", body, flags=re.DOTALL)
        before = "" if pattern.startswith("^") else ANY_TEXT
        after = "" if pattern.removeprefix("^") != body else ANY_TEXT
        return f"{before}({slashed})".replace("\n", "\\n") + after

    def _bare(self, part: SchemaPart) -> str:
        """Return the rule of a part's values in the bare syntax."""
        if part.is_false:
            self._leave_out(part, f"no value fulfils {_name_of(part)}: leave it out")
            return self._any_bare()
        word = next((each for each in _BARE_KEYS if each in self._given(part)), "type")
        self._allow(part, _BARE_KEYS[word])
        if part.constants is not None:
            return one_of(self._literal(written_value(value, self._form.quote)) for value in part.constants)
        if word in ("anyOf", "oneOf") and "anyOf" in part:
            return one_of(map(self._bare, part["anyOf"]))
        if "type" in part:
            return one_of(self._bare_of(kind, part) for kind in part.types)
        if given := self._given(part):
            only = next(iter(given)) if len(given) == 1 else ""
            self._leave_out(part, f"{_name_of(part)} needs a type in this tool format", only)
        return self._any_bare()

    def _bare_of(self, kind: str, part: SchemaPart) -> str:
        """Return the rule of a part's values of one type."""
        match kind:
            case "string":
                return f"{self._literal(self._form.quote)} {self._plain_text(part, self._form.quote)}"
            case "array":
                return self._bare_array(part)
            case "object":
                return self._bare_object(part)
        numbers = {word: part[word] for word in part if word in _NUMBER_KEYS}
        return self._json(SchemaPart(part.pointer, {"type": kind, **numbers}))

    def _bare_array(self, part: SchemaPart) -> str:
        least, most, items = part.get("minItems", 0), part.get("maxItems"), part.get("items", _ANYTHING)
        if first := part.get("prefixItems"):
            if items.is_false and least == len(first):
                each = ' "," '.join(map(self._bare, first))
                return f'"[" {each} "]"'
            problem = f"prefixItems of {_name_of(part)} need items: false and minItems: {len(first)} here"
            self._leave_out(part, problem, "prefixItems")
            items = _ANYTHING
        return '"[]"' if most == 0 else self._list(self._bare(items), least, most)

    def _list(self, item: str, least: int = 0, most: int | None = None) -> str:
        """Return the rule of a list of at least one possible item."""
        rule = f"item_{self._lark.next_number()}"
        self._lark.rules[rule] = item
        bounds = f"{max(least - 1, 0)},{'' if most is None else most - 1}"
        others = "" if most == 1 else f"({_SEPARATORS[self._form.syntax]} {rule}){{{bounds}}}"
        return f'"[" ({rule} {others}){"" if least else "?"} "]"'

    def _object(self, part: SchemaPart, rule_of: Callable[[str, SchemaPart], str]) -> str:
        """Return the rule of an object with named members only."""
        return f'"{{" {self._members(f"object_{self._lark.next_number()}", part, rule_of)} "}}"'

    def _bare_object(self, part: SchemaPart) -> str:
        """Return the rule of an object. If members are named, no others are allowed; otherwise any member is."""
        members, more = part.get("properties", {}), part.get("additionalProperties", _ANYTHING)
        if absent := sorted(set(part.get("required", ())) - set(members)):
            problem = f"{absent[0]} of {_name_of(part)} is required: add it to the properties"
            self._leave_out(part, problem, "required")
        if not members and not more.is_false:
            return self._bare_members(self._bare(more))
        return self._object(part, self._argument)

    def _bare_members(self, value: str) -> str:
        """Return the rule of an object with any members of this value."""
        rule = f"member_{self._lark.next_number()}"
        self._lark.rules[rule] = f'/[A-Za-z_][A-Za-z_0-9]*/ ":" {value}'
        return f'"{{" ({rule} ("," {rule})*)? "}}"'

    def _any_bare(self) -> str:
        if "any_value" not in self._lark.rules:
            self._lark.rules["any_value"] = ""
            text = f"{self._literal(self._form.quote)} {self._plain_text(_ANYTHING, self._form.quote)}"
            plain = self._schemas.json_rule('{"type": ["number", "boolean", "null"]}')
            items = '"[" (any_value ("," any_value)*)? "]"'
            self._lark.rules["any_value"] = f"{text} | {plain} | {items} | {self._bare_members('any_value')}"
        return "any_value"

    def _python(self, part: SchemaPart) -> str:
        """Return the rule of a part's values as Python writes them.

        They are written as JSON if nothing differs, or if the schema has keywords that are not supported here. Texts
        may also have single quotes.
        """
        given = self._given(part)
        if not _may_differ(part) or given.keys() - _PYTHON_KEYS:
            return self._json(part)
        if part.constants is not None:
            written = [text for value in part.constants for text in (written_value(value), *_in_single_quotes(value))]
            return one_of(map(spelt, written))
        if "anyOf" in part:
            return one_of(map(self._python, part["anyOf"]))
        match part.get("type"):
            case list(kinds):
                return one_of(self._python(SchemaPart(part.pointer, {**part, "type": kind})) for kind in kinds)
            case "string":
                self._lark.rules["QUOTED"] = _SINGLE_QUOTED
                return f"({self._json(part)} | QUOTED)"
            case "boolean":
                return '("True" | "False")'
            case "null":
                return '"None"'
            case "array" if "items" in part:
                return self._list(self._python(part["items"]))
            case "object" if part.get("properties") and not given.get("additionalProperties"):
                return self._object(part, self._python_member)
        return self._json(part)

    def _python_member(self, name: str, part: SchemaPart) -> str:
        return f"{self._literal(f'{written_value(name)}: ')} {self._python(part)}"


def _name_of(part: SchemaPart) -> str:
    return part.pointer.rpartition("/properties/")[2].partition("/")[0]


def _may_differ(part: SchemaPart) -> bool:
    """Return True if Python and JSON may write a value differently: a word, or a text, which may have single quotes."""
    if part.constants is not None:
        return any(_in_single_quotes(value) or type(value) not in (str, int, float) for value in part.constants)
    if part.get("type") == "array":
        return "items" in part and _may_differ(part["items"])
    return part.get("type") not in ("integer", "number")


def _in_single_quotes(value: Any) -> list[str]:
    """Return the text in single quotes, or [] if it is not a text or needs an escape there."""
    is_simple = isinstance(value, str) and spelt(value) == f'"{value}"' and "'" not in value
    return [f"'{value}'"] if is_simple else []
