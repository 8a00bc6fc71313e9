"""A `structural_tag` of xgrammar and vLLM, as a grammar in Lark's notation: free text, with constrained parts in it.

A tag is a literal `begin`, a content and a literal `end`. In `triggered_tags`, and in the older form with `structures`,
text is free until a trigger occurs. Then one of the tags that begin with this trigger follows.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, final

from infer.serving.protocols.fields import Parameters, refuse
from infer.text.grammar.grammar import not_strict
from infer.text.grammar.lark import MAX_BYTES

_ANY = "(.|\\n)*"
_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}/&~]")
_REPEATED = {"optional": "?", "star": "*", "plus": "+"}
_KINDS = (
    *("const_string", "json_schema", "regex", "any_text", "sequence", "or", "tag", "triggered_tags"),
    *("tags_with_separator", *_REPEATED),
)


@final
class StructuralTagFormat(Parameters, tag_field="type", tag="structural_tag"):
    """Free text with constrained parts, as vLLM reads it. `structures` and `triggers` are the older form."""

    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


def lark_of(asked: StructuralTagFormat) -> str:
    """Return the grammar of a format.

    Raises BodyError that names a part that is missing, has another type, or cannot be enforced.
    """
    lark, where = _Lark(), "response_format"
    if asked.format is not None:
        start = lark.expression(asked.format, f"{where}.format")
    else:
        tags = [
            {**each, "content": {"type": "json_schema", "json_schema": each.get("schema", {})}}
            for each, _ in _objects({"structures": asked.structures}, "structures", where)
        ]
        start = lark.triggered({"triggers": asked.triggers, "tags": tags}, where)
    return "\n".join([f"start: {start}", *lark.rules])


@final
class _Lark:
    """The rules of a grammar, except the first. A rule with the option [lazy] ends at its first match.

    A lexeme of free text has to know which literal ends it. So an expression takes the literal `end` that follows it,
    and `begun`, the beginning that the lexeme before it contains.
    """

    def __init__(self) -> None:
        self.rules = list[str]()
        self._num_characters = 0

    def expression(self, form: Any, where: str, end: str = "", begun: str = "") -> str:
        if not isinstance(form, Mapping):
            raise refuse(f"{where} must be an object, got {form!r:.40}", where)
        match kind := form.get("type"):
            case "const_string":
                return _literal(_text(form, "value", where)[len(begun) :] + end)
            case "json_schema":
                return f"{self._rule(f'%json {json.dumps(_schema(form, where))}')} {_literal(end)}"
            case "regex":
                pattern = re.sub(r"(\\.)|/", lambda part: part[1] or "\\/", _text(form, "pattern", where))
                return self._lexeme(f"({pattern})", end)
            case "any_text":
                if limit := {"max_tokens", "max_chars"} & form.keys():
                    raise refuse(f"{where}.{min(limit)} cannot be enforced: leave it out", f"{where}.{min(limit)}")
                return self._free(end, _texts(form, "excludes", where))
            case "sequence":
                return self._sequence(form, where, end, begun)
            case "or":
                return _one_of(self.expression(each, place, end) for each, place in _objects(form, "elements", where))
            case "tag":
                return self._tag(form, where, end, begun)
            case "triggered_tags":
                return self.triggered(form, where, end)
            case "tags_with_separator":
                return self._separated(form, where, end)
            case "optional" | "plus" | "star":
                content = self.expression(form.get("content"), f"{where}.content")
                return f"({content}){_REPEATED[kind]} {_literal(end)}"
        raise refuse(f"{where}.type {kind!r:.40} is not supported: use one of {', '.join(_KINDS)}", f"{where}.type")

    def triggered(self, form: Mapping[str, Any], where: str, end: str = "") -> str:
        triggers, excluded = _texts(form, "triggers", where, least=1), _texts(form, "excludes", where)
        tags, begun = list[str](), list[str]()
        for tag, place in _objects(form, "tags", where):
            begin = _text(tag, "begin", place)
            trigger = next((each for each in triggers if begin.startswith(each)), None)
            if trigger is None:
                raise refuse(f"{place}.begin must begin with one of the triggers, got {begin!r:.40}", f"{place}.begin")
            others = [each for each in [*triggers, end, *excluded] if each not in ("", trigger)]
            content = self._content(tag, place)
            tags.append(f"{_literal(begin)} {content}")
            begun.append(f"{self._lexeme(_ANY, trigger, others)} {_literal(begin[len(trigger) :])} {content}")
        first, following = _one_of(tags), _one_of(begun)
        free = self._free(end, [*triggers, *excluded])
        if form.get("stop_after_first"):
            return f"{first} {_literal(end)}" if form.get("at_least_one") else f"({free} | {following} {_literal(end)})"
        return f"{first if form.get('at_least_one') else ''} {following}* {free}"

    def _tag(self, form: Mapping[str, Any], where: str, end: str = "", begun: str = "") -> str:
        begin = _literal(_text(form, "begin", where)[len(begun) :])
        return f"{begin} {self._content(form, where)} {_literal(end)}"

    def _content(self, form: Mapping[str, Any], where: str) -> str:
        """Return the name of a rule for what follows the beginning of a tag."""
        ends = [form["end"]] if isinstance(form.get("end"), str) else _texts(form, "end", where, least=1)
        return self._rule(_one_of(self.expression(form.get("content"), f"{where}.content", each) for each in ends))

    def _separated(self, form: Mapping[str, Any], where: str, end: str) -> str:
        tags = _one_of(self._tag(tag, place) for tag, place in _objects(form, "tags", where))
        more = "" if form.get("stop_after_first") else f"({_literal(_text(form, 'separator', where))} {tags})*"
        return f"({tags} {more}){'' if form.get('at_least_one') else '?'} {_literal(end)}"

    def _sequence(self, form: Mapping[str, Any], where: str, end: str, begun: str) -> str:
        elements, parts = _objects(form, "elements", where), list[str]()
        for (element, place), following in zip_longest(elements, elements[1:]):
            closing = ""
            if element.get("type") in ("any_text", "regex", "triggered_tags"):
                closing = end if following is None else _beginning_of(following[0])
                if not closing and following is not None and element["type"] != "regex":
                    raise refuse(f"{place} must be the last element, or a const_string or a tag must follow", place)
            parts.append(self.expression(element, place, closing, begun))
            begun = closing
        return " ".join([*parts, _literal(end[len(begun) :])])

    def _free(self, end: str, excluded: Sequence[str]) -> str:
        """Return the expression of free text up to and including the literal `end`, or up to the end of all."""
        return self._lexeme(_ANY, end, excluded) if end else f"{self._lexeme(_ANY, end, excluded)}?"

    def _lexeme(self, pattern: str, end: str, excluded: Iterable[str] = ()) -> str:
        without = "".join(f" & ~/{_ANY}{_pattern(each)}{_ANY}{_pattern(end)}/" for each in excluded)
        kind, option = ("text", "[lazy]") if end else ("TEXT", "")  # as llguidance wants names of lexemes
        return self._rule(f"/{pattern}{_pattern(end)}/{without}", kind, option)

    def _rule(self, body: str, kind: str = "part", option: str = "") -> str:
        name = f"{kind}_{len(self.rules)}"
        self.rules.append(f"{name}{option}: {body}")
        self._num_characters += len(body)
        if self._num_characters > MAX_BYTES:  # a content is repeated per end, so nested ones may grow without limit
            raise refuse(f"response_format must be a grammar of at most {MAX_BYTES} bytes", "response_format")
        return name


def _beginning_of(form: Mapping[str, Any]) -> str:
    """Return the literal with which a format begins, or "" if it begins with something else."""
    literal = form.get({"const_string": "value", "tag": "begin"}.get(str(form.get("type")), ""))
    return literal if isinstance(literal, str) else ""


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _pattern(text: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", text).replace("\n", "\\n")


def _one_of(expressions: Iterable[str]) -> str:
    return f"({' | '.join(expressions)})"


def _text(form: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(value := form.get(name), str):
        raise refuse(f"{where}.{name} must be a text, got {value!r:.40}", f"{where}.{name}")
    return value


def _texts(form: Mapping[str, Any], name: str, where: str, least: int = 0) -> list[str]:
    value = form.get(name, [] if not least else None)
    if not isinstance(value, list) or len(value) < least or not all(isinstance(each, str) and each for each in value):
        raise refuse(f"{where}.{name} must be a list of texts, got {value!r:.40}", f"{where}.{name}")
    return value


def _objects(form: Mapping[str, Any], name: str, where: str) -> list[tuple[Mapping[str, Any], str]]:
    """Return the objects of a list that is not empty, each with its place."""
    value = form.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(each, Mapping) for each in value):
        raise refuse(f"{where}.{name} must be a list of objects, got {value!r:.40}", f"{where}.{name}")
    return [(each, f"{where}.{name}[{index}]") for index, each in enumerate(value)]


def _schema(form: Mapping[str, Any], where: str) -> Any:
    if form.get("style", "json") != "json":
        raise refuse(f"{where}.style {form['style']!r:.40} is not supported: leave it out", f"{where}.style")
    schema = form.get("json_schema", {})
    return not_strict(schema) if isinstance(schema, Mapping) else schema
