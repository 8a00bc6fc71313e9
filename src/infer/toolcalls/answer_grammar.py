"""The grammar of an answer, in llguidance's Lark: the format that the parser reads, with the tools' schemas.

Free text is a lexeme, so that it costs a few microseconds per token. It ends lazily, at a call's trigger. The grammar
names control tokens by their ids. Only this grammar can do so, never a request's.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Protocol, final, runtime_checkable

from infer.errors import InvalidRequestError, SchemaError
from infer.toolcalls.answer_format import AnswerFormat, Calls, gemma_value, is_plain_text, written_value
from infer.toolcalls.formats import ID, ID_PATTERN, ReasoningFormat, ToolCallFormat
from infer.toolcalls.schema_words import (
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
from infer.toolcalls.tools import Tool

_ANY = "(.|\\n)*"
_SPACES = "[ \\t\\r\\n]*"
_PARTS = re.compile("([\ud800-\udfff]|" + re.escape(ID) + ")")
_SINGLE_QUOTED = r"""/'([^'\\\x00-\x1f]|\\['"\\nrt])*'/"""
_SEPARATORS = {"python": '", "', "xml": '""', "gemma": '","'}


@runtime_checkable
class Rules(Protocol):
    """Compiler of a tool's schema to Lark. Raises InvalidRequestError."""

    def json_rule(self, schema: Mapping[str, Any]) -> str: ...

    def text_pattern(self, pattern: str) -> str: ...

    def unreadable_parts(self, schema: Mapping[str, Any]) -> list[tuple[str, str]]: ...


def answer_lark(form: AnswerFormat, rules: Rules, *, is_held: bool) -> str | None:
    """Return the grammar of an answer, or None if nothing constrains the answer.

    With `is_held` the answer's text is `@answer`, a grammar of the request's. Raises InvalidRequestError for a tool
    whose schema cannot be enforced.
    """
    if form.calls is None and not (form.reasoning and (is_held or form.budget is not None)):
        return None
    return _Builder(form, rules, is_held=is_held).lark()


def check_tool(form: AnswerFormat, tool: Tool, rules: Rules) -> None:
    """Raise InvalidRequestError, a SchemaError if the place is known, if calls of this tool cannot be constrained."""
    assert form.calls is not None
    _Builder(form, rules, is_held=False).check(form.calls, tool)


@final
class _Builder:
    def __init__(self, form: AnswerFormat, rules: Rules, *, is_held: bool) -> None:
        self._form, self._rules_of, self._is_held = form, rules, is_held
        self._json_rule = rules.json_rule
        self._id_by_mark = {mark: token_id for token_id, mark in form.marks.items()}
        self._rules: dict[str, str] = {}
        self._numbers = count()  # of rules that are made while another one is

    def lark(self) -> str:
        reasoning = self._form.reasoning
        self._rules = {"start": ""}
        if reasoning is not None and reasoning.body:
            self._rules["start"] = self._messages(reasoning)
        else:
            thought = self._thought(reasoning) if reasoning is not None else ""
            self._rules["start"] = " | ".join([f"{thought} ({self._answer()})", *self._calls_in_thought()])
        self._rules["SPACES"] = "/[ \\t\\r\\n]+/"
        self._rules["ANY"] = f"/{_ANY}/"
        return "\n".join(f"{name}: {rule}" for name, rule in self._rules.items()) + "\n"

    def check(self, calls: Calls, tool: Tool) -> None:
        self._arguments(calls, tool, "arguments")

    def _thought(self, form: ReasoningFormat) -> str:
        thought = self._until("thought", form.closing)
        return thought if self._form.is_open else f"({self._opening(form)} {thought})?"

    def _opening(self, form: ReasoningFormat) -> str:
        is_control = self._is_control(form.opening)
        return self._literal(form.opening) if is_control else f"/{_SPACES}{as_pattern(form.opening)}/"

    def _calls_in_thought(self) -> Iterator[str]:
        """Yield a rule for each tool: reasoning that is not closed, a call of the tool, and others after it."""
        calls, reasoning, beginnings = self._form.calls, self._form.reasoning, self._form.calls_in_reasoning
        if calls is None or reasoning is None or not beginnings:
            return
        opening = "" if self._form.is_open else self._opening(reasoning)
        others = self._calls(calls).removeprefix("call ")
        for index, beginning in enumerate(beginnings):
            yield f"{opening} {self._until(f'cut_{index}', beginning)} {self._end(calls, index)} {others}"

    def _messages(self, form: ReasoningFormat) -> str:
        """Return the rule of messages with headers: reasoning and texts beside calls, then the text or a call."""
        calls, following = self._form.calls, self._literal(form.start + form.role)
        thought, aside = self._until("thought", form.closing), self._until("aside", form.closing)
        self._rules["rest"] = f"{thought} {following}"
        self._rules["reasoned"] = f"{self._literal(form.opening)} rest"
        self._rules["said"] = f"{self._literal(form.channel + form.aside_channel + form.body)} {aside} {following}"
        is_required = calls is not None and calls.kind == "required"
        said = "" if self._is_held or is_required else "said"
        if self._form.budget is not None:  # of one message
            before = f"{'rest' if self._form.is_open else 'reasoned?'} {said and 'said*'}"
        else:
            before = f"{'rest' if self._form.is_open else ''} ({' | '.join(filter(None, ['reasoned', said]))})*"
        self._rules["typed"] = f'" "? {self._literal(form.constrain)} "json" | " json"'
        text = f"{self._literal(form.channel + form.text_channel)} typed? {self._literal(form.body)}"
        text += " @answer" if self._is_held else " ANY?"
        if calls is None or calls.kind == "none":
            return f"{before} {text}"
        call = self._headed_call(form, calls)
        return f"{before} {call}" if is_required else f"{before} ({text} | {call})"

    def _headed_call(self, form: ReasoningFormat, calls: Calls) -> str:
        """Return the rule of a call with its header, in which the tool's name may precede or follow the channel."""
        self._rules["channel"] = one_of(
            self._literal(form.channel + name) for name in (form.aside_channel, form.own_channel)
        )
        body, after, before = self._literal(form.body), list[str](), list[str]()
        for index, tool in enumerate(calls.tools):
            name, end = self._literal(calls.form.before_name + tool.name), self._end(calls, index)
            after.append(f"{name} typed? {body} {end}")
            before.append(f"{name} channel typed? {body} {end}")
        return f'(channel " " {one_of(after)} | " "? {one_of(before)})'

    def _answer(self) -> str:
        calls = self._form.calls
        text = "SPACES? @answer" if self._is_held else self._text()
        if calls is None or calls.kind == "none":
            return text
        rest = self._calls(calls)
        if calls.kind == "required":
            spaces = "SPACES?" if self._form.reasoning is not None else ""
            return f"{spaces} {self._literal(calls.form.start)} {rest}"
        if self._is_held:
            return f"{text} | SPACES? {self._literal(calls.form.start)} {rest}"
        if calls.form.trigger:
            begun = self._until("begun", calls.form.trigger, self._not_text())
            return f"{text} | {begun} {self._literal(calls.form.start[len(calls.form.trigger) :])} {rest}"
        if len(calls.form.start) > 1:
            return f"{text} | /{_SPACES}{as_pattern(calls.form.start)}/ {rest}"
        return f"{text} | {self._calls_at_once(calls)}"

    def _text(self) -> str:
        calls, excluded = self._form.calls, self._not_text()
        trigger = calls.form.trigger if calls is not None and calls.kind == "none" else ""
        if trigger and not self._is_control(trigger):
            excluded = " & ".join(filter(None, [excluded, f"~/{_ANY}{as_pattern(trigger)}{_ANY}/"]))
        if not excluded:
            return "ANY"
        self._rules["TEXT"] = f"/{_ANY}/ & {excluded}"
        return "TEXT"

    def _not_text(self) -> str:
        """Return a rule that excludes beginnings of an answer that are not text."""
        calls, beginnings = self._form.calls, list[str]()
        if self._form.reasoning is not None and not self._form.is_open:
            beginnings.append(self._form.reasoning.opening)
        if calls is not None and not calls.form.trigger:
            beginnings += calls.beginnings
        plain = [as_pattern(each) for each in beginnings if not self._is_control(each)]
        return f"~/{_SPACES}({'|'.join(plain)}){_ANY}/" if plain else ""

    def _until(self, name: str, literal: str, excluded: str = "") -> str:
        """Return a rule for any text up to and including the first occurrence of this literal."""
        if self._is_control(literal):
            return f"{'TEXT' if excluded else 'ANY'}? {self._literal(literal)}"
        self._rules[f"{name}[lazy]"] = f"/{_ANY}{as_pattern(literal)}/{' & ' + excluded if excluded else ''}"
        return name

    def _calls(self, calls: Calls) -> str:
        """Return the rule of the calls from the first name on."""
        self._rules["call"] = " | ".join(self._call(calls, index) for index in range(len(calls.tools)))
        following = self._literal(calls.form.separator + calls.form.before_name)
        more = f"({following} call)*" if calls.is_parallel and calls.form.is_parallel else ""
        return f"call {more} {self._literal(calls.form.closing)}"

    def _calls_at_once(self, calls: Calls) -> str:
        """Return the rule of calls that only a tool's name distinguishes from text.

        They begin with one lexeme per tool.
        """
        rest = self._calls(calls).removeprefix("call ")
        firsts = [
            f"/{_SPACES}{as_pattern(beginning)}/ {self._end(calls, index)}"
            for index, beginning in enumerate(calls.beginnings)
        ]
        self._rules["first"] = " | ".join(firsts)
        return f"first {rest}"

    def _call(self, calls: Calls, index: int) -> str:
        return f"{self._literal(calls.tools[index].name + calls.form.before_arguments)} {self._end(calls, index)}"

    def _end(self, calls: Calls, index: int) -> str:
        """Return the rule of a tool's arguments and the literal after them."""
        name, tool = f"arguments_{index}", calls.tools[index]
        if name not in self._rules:
            try:
                self._rules[name] = self._arguments(calls, tool, name)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"tools[{index}] ({tool.name}): {error}") from error
        return f"{name} {self._literal(calls.form.after_arguments)}"

    def _arguments(self, calls: Calls, tool: Tool, name: str) -> str:
        if calls.form.syntax == "json":
            is_simple = not set(tool.parameters) - OBJECT_KEYS
            return self._json_rule({"additionalProperties": False, **tool.parameters} if is_simple else tool.parameters)
        if calls.form.syntax == "gemma":
            self._json_rule(tool.parameters)  # refuses what is no schema
        required = required_of(tool.parameters)
        for key in tool.properties:
            check_name(ROOT.member(key), calls.form)
        each = [
            (self._argument(calls.form, ROOT.member(key), schema), key in required)
            for key, schema in properties_of(tool, calls.form.name).items()
        ]
        return self._in_order(name, each, _SEPARATORS[calls.form.syntax])

    def _argument(self, form: ToolCallFormat, spot: Spot, schema: Any) -> str:
        try:
            match form.syntax:
                case "python":
                    return f"{json.dumps(spot.name + '=')} {self._python(schema)}"
                case "gemma":
                    return f"{json.dumps(spot.name + ':')} {self._gemma(form, spot, schema)}"
            return self._parameter(form, spot, schema)
        except SchemaError as error:
            if error.pointer is not None and error.pointer.startswith(spot.pointer):
                raise
            inside = error.pointer or ""  # of the argument's own schema, beside which the definitions lie
            pointer = inside if inside.startswith(("/$defs/", "/definitions/")) else spot.pointer + inside
            raise SchemaError(str(error), pointer, error.problem) from error

    def _parameter(self, form: ToolCallFormat, spot: Spot, schema: Any) -> str:
        opened, closed = self._literal(form.before_key + spot.name + form.after_key), self._literal(form.after_value)
        if not is_plain_text(schema):
            return f"{opened} {self._json_rule(schema)} {closed}"
        if (values := values_of(schema)) is not None:
            return f"{opened} {one_of(json.dumps(value, ensure_ascii=False) for value in values)} {closed}"
        return f"{opened} {self._plain_text(spot, schema, form.after_value)}"

    def _plain_text(self, spot: Spot, schema: Mapping[str, Any], closed: str) -> str:
        """Return a rule for any text that the schema allows, up to and including the first occurrence of this literal.

        Raises SchemaError for words that cannot be enforced.
        """
        spot.allow(schema, NOT_HELD | {"type", "format", "pattern", *LENGTHS}, "the text ")
        number, end = next(self._numbers), "" if self._is_control(closed) else as_pattern(closed)
        bounds = f"{schema.get('minLength', 0)},{schema.get('maxLength', '')}"
        held = [] if bounds == "0," else [f"(.|\\n){{{bounds}}}"]
        if "pattern" in schema:
            held.append(self._rules_of.text_pattern(schema["pattern"]))
        limits = [f"/{each}{end}/" for each in held]
        if not end:
            self._rules[f"TEXT_{number}"] = " & ".join([f"/{_ANY}/", *limits])
            may_be_empty = not schema.get("minLength") and "pattern" not in schema
            return f"TEXT_{number}{'?' * may_be_empty} {self._literal(closed)}"
        limits += [f"~/{_ANY}{end}(.|\\n)+/"] * bool(held)  # it ends once
        self._rules[f"text_{number}[lazy]"] = " & ".join([f"/{_ANY}{end}/", *limits])
        return f"text_{number}"

    def _gemma(self, form: ToolCallFormat, spot: Spot, schema: Any) -> str:
        """Return the rule of a schema's values with Gemma's quotes. Raises SchemaError."""
        if schema is False:
            spot.refuse(f"{spot.name} may have no value: leave it out")
        held = {} if schema is True else {key: schema[key] for key in schema if key not in NOT_HELD}
        if not held:
            return self._any_gemma(form)
        word = next((each for each in ("anyOf", "enum", "const") if each in held), "type")
        spot.allow(held, GEMMA_KEYS[word])
        if (values := values_of(held)) is not None:
            return one_of(self._literal(gemma_value(value, form.quote)) for value in values)
        if "anyOf" in held:
            return one_of(
                self._gemma(form, spot.inner("anyOf", index), each) for index, each in enumerate(held["anyOf"])
            )
        match schema.get("type"):
            case list(kinds):
                return one_of(self._gemma(form, spot, {**schema, "type": kind}) for kind in kinds)
            case "string":
                return f"{self._literal(form.quote)} {self._plain_text(spot, of_texts(schema), form.quote)}"
            case "array":
                return self._gemma_array(form, spot, schema)
            case "object":
                return self._gemma_object(form, spot, schema)
            case None:
                spot.refuse(f"{spot.name} needs a type in this tool format")
        return self._json_rule({key: held[key] for key in held if key == "type" or key in NUMBER_KEYS})

    def _gemma_array(self, form: ToolCallFormat, spot: Spot, schema: Mapping[str, Any]) -> str:
        least, most, rule = schema.get("minItems", 0), schema.get("maxItems"), f"item_{next(self._numbers)}"
        if parts := schema.get("prefixItems"):
            if schema.get("items") is not False or least != len(parts):
                spot.refuse(f"prefixItems of {spot.name} need items: false and minItems: {len(parts)} here")
            inner = enumerate(parts)
            each = ' "," '.join(self._gemma(form, spot.inner("prefixItems", index), part) for index, part in inner)
            return f'"[" {each} "]"'
        if most == 0:
            return '"[]"'
        self._rules[rule] = self._gemma(form, spot.inner("items"), schema.get("items", {}))
        bounds = f"{max(least - 1, 0)},{'' if most is None else most - 1}"
        others = "" if most == 1 else f'("," {rule}){{{bounds}}}'
        return f'"[" ({rule} {others}){"" if least else "?"} "]"'

    def _gemma_object(self, form: ToolCallFormat, spot: Spot, schema: Mapping[str, Any]) -> str:
        """Return the rule of an object. If members are named, no others are allowed; otherwise any member is."""
        members, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        rule, required, each = f"object_{next(self._numbers)}", required_of(schema), list[tuple[str, bool]]()
        if absent := sorted(set(required) - set(members)):
            spot.refuse(f"{absent[0]} of {spot.name} is required: give it among the properties")
        if not members and more is not False:
            return self._gemma_members(self._gemma(form, spot.inner("additionalProperties"), more))
        for key, inner in members.items():
            at = spot.member(key)
            check_member_name(at, form)
            each.append(
                (f"{json.dumps(key + ':', ensure_ascii=False)} {self._gemma(form, at, inner)}", key in required)
            )
        return f'"{{" {self._in_order(rule, each, _SEPARATORS["gemma"])} "}}"'

    def _gemma_members(self, value: str) -> str:
        """Return the rule of an object with any members of this value."""
        rule = f"member_{next(self._numbers)}"
        self._rules[rule] = f'/[A-Za-z_][A-Za-z_0-9]*/ ":" {value}'
        return f'"{{" ({rule} ("," {rule})*)? "}}"'

    def _any_gemma(self, form: ToolCallFormat) -> str:
        if "any_value" not in self._rules:
            self._rules["any_value"] = ""
            text = f"{self._literal(form.quote)} {self._plain_text(ROOT, {}, form.quote)}"
            plain = self._json_rule({"type": ["number", "boolean", "null"]})
            items = '"[" (any_value ("," any_value)*)? "]"'
            self._rules["any_value"] = f"{text} | {plain} | {items} | {self._gemma_members('any_value')}"
        return "any_value"

    def _python(self, schema: Any) -> str:
        """Return the rule of a schema's values as Python writes them.

        They are written as JSON if nothing differs, or if the schema has words that are not supported here. Texts may
        have single quotes, too.
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
                self._rules["QUOTED"] = _SINGLE_QUOTED
                return f"({self._json_rule(schema)} | QUOTED)"
            case "boolean":
                return '("True" | "False")'
            case "null":
                return '"None"'
            case "array" if "items" in schema:
                item = self._python(schema["items"])
                return f'"[" ({item} (", " {item})*)? "]"'
            case "object" if schema.get("properties") and not schema.get("additionalProperties"):
                name, required = f"object_{next(self._numbers)}", required_of(schema)
                each = [
                    (f"{json.dumps(json.dumps(key) + ': ')} {self._python(inner)}", key in required)
                    for key, inner in schema["properties"].items()
                ]
                return f'"{{" {self._in_order(name, each, json.dumps(", "))} "}}"'
        return self._json_rule(schema)

    def _in_order(self, name: str, each: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return the rule of all required items and any of the others, in this order."""
        self._rules[f"{name}_first_{len(each)}"] = self._rules[f"{name}_more_{len(each)}"] = '""'
        for index in range(len(each) - 1, -1, -1):
            rule, is_required = each[index]
            first, more = f"{name}_first_{index + 1}", f"{name}_more_{index + 1}"
            self._rules[f"{name}_first_{index}"] = f"{rule} {more}" + ("" if is_required else f" | {first}")
            self._rules[f"{name}_more_{index}"] = f"({separator} {rule}){'' if is_required else '?'} {more}"
        return f"{name}_first_0"

    def _is_control(self, literal: str) -> bool:
        return literal[:1] in self._id_by_mark

    def _literal(self, text: str) -> str:
        return " ".join(self._part(part) for part in _PARTS.split(text) if part)

    def _part(self, part: str) -> str:
        if part == ID:
            return f"/{ID_PATTERN}/"
        if part in self._id_by_mark:
            return f"<[{self._id_by_mark[part]}]>"
        return json.dumps(part, ensure_ascii=False)
