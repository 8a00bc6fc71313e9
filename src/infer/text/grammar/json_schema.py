"""Read a JSON schema and write the schema that a grammar library compiles. Messages give places as JSON pointers.

The reader leaves out what it knows that no library enforces, if the schema is not strict. A library refuses more: a
schema that no value fulfils, or one that is too slow. Then `SchemaSearch` leaves out the keywords at the place of the
problem one by one, and then the schemas around it. The number of trials and their time are limited.
"""

import difflib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, final

from infer.errors import InvalidRequestError, SchemaError
from infer.system.child_process import processor_seconds
from infer.system.json_limits import is_deeper, refuse_constant, unique_keys
from infer.text.grammar.grammar import STRICT, Grammar
from infer.text.grammar.patterns import check_size, pattern_without
from infer.text.grammar.schema_logic import TYPES, SchemaPart, errors_at, false_part, refuse
from infer.text.grammar.schema_rewriter import ASSERTIONS, LeftOut, Omissions, Rewriter
from infer.text.grammar.schema_values import escaped, properties_of
from infer.text.grammar.shortest import empty_definitions, nodes_of

MAX_BYTES = 1 << 20
MAX_DEPTH = 64
MAX_OPTIONAL = 256
MAX_ASKED = 40
ASKING_SECONDS = 1.0
_MAX_WARNINGS = 10
ESCAPES = "json_allowed_escapes"  # an option of llguidance, in a built schema
_SHORT_ESCAPES = 'nrbtf\\"'  # of JSON, without `\\u`


@dataclass(frozen=True)
class BuiltSchema:
    """A schema in the compiler's form.

    `warnings` name the keywords that assert nothing, and the parts that were left out of a schema that is not strict.
    The latter are only in `omissions` if the schema is of a tool.
    """

    root: SchemaPart
    definitions: Mapping[str, SchemaPart]
    where: str
    is_strict: bool
    ignored: tuple[str, ...]
    omissions: Omissions
    is_for_llguidance: bool

    @property
    def warnings(self) -> tuple[str, ...]:
        noted = {} if self.omissions.is_of_tool else self.omissions.noted
        lines = [f"{self.where} at {pointer}: left out: {problem}" for pointer, problem in noted.items()]
        return (*_ignored(self.ignored, self.where), *_shortened(lines, self.where))

    @property
    def text(self) -> str:
        """Text for the compiler."""
        return self.text_of(self.root)

    def text_of(self, part: SchemaPart) -> str:
        """Return the text of a part, with the definitions that it needs.

        For llguidance no text has an escape `\\u` that could spell a described name as one of the other names.
        """
        nodes = nodes_of([part], self.definitions)
        words, names = {word for node in nodes for word in node}, {node.get("$ref") for node in nodes}
        spell = partial(_with_other_names, words) if self.is_for_llguidance else _as_it_is
        found = part.written(spell)
        if defined := {name: each for name, each in self.definitions.items() if name in names}:
            found = {"allOf": [found]} if isinstance(found, bool) else found
            found["$defs"] = {name.rpartition("/")[2]: each.written(spell) for name, each in defined.items()}
        is_open = self.is_for_llguidance and any(_has_open_names(spell(node)) for node in nodes)
        if is_open and not isinstance(found, bool):
            found[ESCAPES] = _SHORT_ESCAPES
        return json.dumps(found)

    def place_of(self, problem: str, problem_of: Callable[[str], str]) -> tuple[str, str]:
        """Return the pointer of the deepest part whose text has a problem, and the problem.

        Calls `problem_of` at most `MAX_ASKED` times, and only for `ASKING_SECONDS`, because a part may use its whole
        budget before it fails.
        """
        found, seen, num_asked = self.root, {id(self.root)}, 0
        end = time.monotonic() + ASKING_SECONDS
        while True:
            inner = found.children() + ([self.definitions[found["$ref"]]] if "$ref" in found else [])
            for part in inner:
                if id(part) in seen or part.is_false or num_asked >= MAX_ASKED or time.monotonic() >= end:
                    continue
                seen.add(id(part))
                num_asked += 1
                if inner_problem := problem_of(self.text_of(part)):
                    found, problem = part, inner_problem
                    break
            else:
                return found.pointer, problem


def build_schema(
    text: str, keywords: Set[str] | None = None, where: str = "json_schema", omissions: Omissions | None = None
) -> BuiltSchema:
    """Return the built schema. `keywords` are the keywords that the backend enforces; None means all.

    Raises InvalidRequestError if the schema is malformed, unsupported or too large, or no value fulfils it. If it is
    not strict, unsupported parts are left out and noted in `omissions`. So are malformed parts of a tool's schema.
    """
    omissions = omissions or Omissions()
    with errors_at(where):
        rewriter, root = rewrite_schema(text, where, omissions)
        is_strict, definitions = rewriter.is_strict, rewriter.definitions
        nodes = nodes_of([root, *definitions.values()])
        for node in nodes if keywords is not None else ():
            for word in node.keys() - (keywords or ()):
                refuse(node.pointer, f"the keyword {word!r} is not supported by this grammar backend")
        for node in nodes:
            optional = len(node.get("properties", {}).keys() - set(node.get("required", ())))
            if optional > MAX_OPTIONAL:
                problem = f"at most {MAX_OPTIONAL} properties may be optional, got {optional}"
                if is_strict:
                    refuse(node.pointer, problem)
                omissions.noted.setdefault(f"{node.pointer}/properties", problem)
                for word in node.keys() & {"properties", "additionalProperties"}:
                    del node[word]
        empty = empty_definitions(root, nodes, definitions)
    for node in nodes:
        if node.get("$ref") in empty:
            node.clear()
            node["enum"] = []
    definitions = {name: part for name, part in definitions.items() if name not in empty}
    return BuiltSchema(root, definitions, where, is_strict, tuple(rewriter.ignored), omissions, keywords is None)


def rewrite_schema(text: str, where: str, omissions: Omissions) -> tuple[Rewriter, SchemaPart]:
    """Return the first form of a schema, which may have too many names or no value. Raises InvalidRequestError."""
    check_size(text, where, "schema", MAX_BYTES)
    raw = _read_of_tool(text, where, omissions) if omissions.is_of_tool else _read(text, where)
    is_strict = not omissions.is_of_tool and _is_strict(raw)
    try:
        rewriter = Rewriter(raw, omissions, is_strict=is_strict)
        return rewriter, rewriter.rewrite()
    except RecursionError:
        raise InvalidRequestError(f"{where} at /: nested too deeply when its choices are written out") from None


def _as_it_is(node: SchemaPart) -> SchemaPart:
    return node


def _with_other_names(words: Set[str], node: SchemaPart) -> SchemaPart:
    """Return a node whose other names match a pattern, because llguidance lets escapes spell its own names again.

    A pattern beside a value's schema excludes the own names. No two patterns may meet in one object. `words` are the
    keywords of all nodes.
    """
    other = node.get("additionalProperties", SchemaPart("", {}))
    meets = "patternProperties" in words or (other and not other.is_false and words & {"allOf", "anyOf", "$ref"})
    if "properties" not in node or other.is_false or meets:
        return node
    pattern = pattern_without([*node["properties"]] if other else [])
    if pattern is None:
        return node
    closed = {"patternProperties": {pattern: other}, "additionalProperties": false_part("")}
    return SchemaPart(node.pointer, {**node, **closed})


def _has_open_names(node: SchemaPart) -> bool:
    """Return True for an object that describes some names, and lets escapes spell them again as other names."""
    other = node.get("additionalProperties")
    return bool(node.keys() & {"properties", "patternProperties"}) and not (other is not None and other.is_false)


def _read_of_tool(text: str, where: str, omissions: Omissions) -> Any:
    """Return the schema of a tool. Properties that are nested too deeply are left out."""
    raw = json.loads(text)
    if isinstance(raw, dict):
        raw.pop(STRICT, None)
    problem = f"brackets must be nested at most {MAX_DEPTH} deep"
    if is_deeper(raw, MAX_DEPTH):
        named = properties_of(raw)
        deep = {name for name, each in named.items() if is_deeper(each, MAX_DEPTH - 2)}
        rest = {**raw, "properties": {name: named[name] for name in named.keys() - deep}} if deep else raw
        if is_deeper(rest, MAX_DEPTH):
            raise InvalidRequestError(f"{where}: {problem}")
        omissions.wanted.update({f"/properties/{escaped(name)}": LeftOut(problem, keeps_type=True) for name in deep})
    return raw


def _is_strict(raw: Any) -> bool:
    """Remove the keyword `x-strict` from the schema, and return its value."""
    if not isinstance(raw, dict | bool):
        refuse("", f"a schema must be an object, true or false, got {json.dumps(raw):.40}")
    strict = raw.pop(STRICT, True) if isinstance(raw, dict) else True
    if not isinstance(strict, bool):
        refuse(f"/{STRICT}", f"must be true or false, got {strict!r:.40}")
    return strict


def _shortened(lines: list[str], where: str) -> list[str]:
    more = [f"{where}: {len(lines) - _MAX_WARNINGS} more parts are left out"] if len(lines) > _MAX_WARNINGS else []
    return [f"{line:.300}" for line in lines[:_MAX_WARNINGS]] + more


def _ignored(words: Iterable[str], where: str) -> list[str]:
    words = list(words)
    if not words:
        return []
    named = []
    for word in words[:10]:
        near = difflib.get_close_matches(word, ASSERTIONS, n=1, cutoff=0.8) if len(word) <= 40 else []
        named.append(f"{word:.40}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    more = f" and {len(words) - 10} more" if len(words) > 10 else ""
    return [f"{where}: ignored, because they assert nothing: {', '.join(named)}{more}"]


def _read(text: str, where: str) -> Any:
    try:
        raw = json.loads(text, parse_constant=refuse_constant, object_pairs_hook=unique_keys)
    except ValueError as error:
        raise InvalidRequestError(f"{where} is not JSON: {error}") from None
    except RecursionError:
        raw = None
    if raw is None or is_deeper(raw, MAX_DEPTH):
        raise InvalidRequestError(f"{where}: brackets must be nested at most {MAX_DEPTH} deep")
    return raw


MAX_TRIALS = 48
SEARCH_SECONDS = 4.0  # processor seconds of all trials
_MAX_WORDS = 8  # most keywords that are tried at one place
_STRUCTURE = frozenset({"type", "properties", "required", "items", "additionalProperties"})
_LARK_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_SOURCE_PLACE = re.compile(r"\A\[[\d:]+\] \S+:\d+: ")  # a place in a library's own code
_IS_EMPTY = re.compile("nsatisfiable|NoExtension")  # no text fulfils it
_COLUMN = re.compile(r"regex parse error:\n {4}.*\n {4}( *)\^.*\nerror: ([^\n]*)")

_Cut = dict[str, LeftOut]  # by pointer


@final
class SchemaSearch:
    """Search for one schema. `problem_of` compiles the text of a schema and returns the problem, or ""."""

    def __init__(
        self, grammar: Grammar, keywords: Set[str] | None, problem_of: Callable[[str], str], seconds: float
    ) -> None:
        self._grammar, self._keywords, self._compile = grammar, keywords, problem_of
        self._seconds = seconds
        self._omissions = Omissions(is_of_tool=grammar.is_of_tool, notes_words=grammar.kind != "argument_schema")
        self._num_trials = 0
        self._problems: dict[bytes, str] = {}  # by digest of a text

    def _problem_of(self, text: str) -> str:
        """Return the problem of a text, which is compiled once. Parts that do not change are asked for repeatedly."""
        key = blake2b(text.encode(), digest_size=16).digest()
        if key not in self._problems:
            self._problems[key] = self._compile(text)
        return self._problems[key]

    def run(self) -> BuiltSchema:
        """Return the schema. Raises InvalidRequestError if it must be refused, or if the limits are reached."""
        self._end = processor_seconds() + self._seconds
        schema = self._tried()
        while isinstance(schema, SchemaError):
            schema = self._without(schema)
        return schema

    def _tried(self) -> BuiltSchema | SchemaError:
        """Return the schema that the library compiles, or the error of the deepest place with a problem.

        Raises the error if the schema must be refused.
        """
        self._num_trials += 1
        where, is_of_tool = self._grammar.where, self._grammar.is_of_tool
        try:
            schema = build_schema(self._grammar.text, self._keywords, where, self._omissions)
        except SchemaError as error:
            if not is_of_tool:
                raise
            return error
        problem = self._problem_of(schema.text)
        if not problem:
            return schema
        pointer, problem = schema.place_of(problem, self._problem_of)
        refusal = SchemaError(pointed(problem, f"{where} at {pointer or '/'}"), pointer, pointed(problem, "")[2:])
        if not is_of_tool and (schema.is_strict or _IS_EMPTY.search(problem)):
            raise refusal
        return refusal

    def _without(self, error: SchemaError) -> BuiltSchema | SchemaError:
        """Leave out the part that this error is about. Raises the error if nothing helps within the limits.

        A cut that is small is undone if it does not help.
        """
        for cut, is_small in self._cuts(error):
            if self._num_trials >= MAX_TRIALS or processor_seconds() >= self._end:
                break
            before = dict(self._omissions.wanted), dict(self._omissions.noted)
            self._omissions.wanted.update(cut)
            schema = self._tried()
            if isinstance(schema, BuiltSchema) or not is_small or _place_of(schema) != _place_of(error):
                return schema
            self._omissions.wanted, self._omissions.noted = before
        return self._without_property(error)

    def _without_property(self, error: SchemaError) -> BuiltSchema:
        """Reduce the property of a tool that the error is about to its type. Raises the error if that does not help."""
        parts = (error.pointer or "").split("/")[:3]
        if self._grammar.is_of_tool and len(parts) == 3 and parts[1] == "properties":
            self._omissions.wanted["/".join(parts)] = LeftOut(error.problem, keeps_type=True)
            schema = self._tried()
            if isinstance(schema, BuiltSchema):
                return schema
        raise error

    def _cuts(self, error: SchemaError) -> Iterator[tuple[_Cut, bool]]:
        """Yield the cuts that may help, smaller ones first, each with True if it is small."""
        places, problem, pointer = self._omissions.places, error.problem, error.pointer or ""
        node = places.get(pointer)
        if isinstance(node, Mapping):
            words = {word: LeftOut(problem) for word in node if word in ASSERTIONS}
            # Named words first. `oneOf` already allows what `anyOf` does, and `properties` are much.
            named = re.findall(r"\$?\w+", problem)
            ranks = {word: (word not in named, word == "oneOf") for word in words if word not in _STRUCTURE}
            ranks |= {word: (word == "properties",) * 2 for word in named if word in words}
            cuts = {
                f"{pointer}/{escaped(word)}": words[word] for word in sorted(ranks, key=ranks.__getitem__)[:_MAX_WORDS]
            }
            yield from (({at: cut}, True) for at, cut in cuts.items())
            if len(cuts) > 1:
                yield cuts, True
        steps = pointer.split("/")
        for number in range(len(steps), 1, -1):
            at, holder = "/".join(steps[:number]), "/".join(steps[: number - 1])
            if isinstance(node := places.get(at), Mapping) and node.get("type") in TYPES:
                yield {at: LeftOut(problem, keeps_type=True)}, False
            if at in places or holder in places:
                yield {at: LeftOut(problem)}, False


def _place_of(error: SchemaError) -> tuple[str | None, str]:
    return error.pointer, error.problem


def pointed(problem: str, where: str) -> str:
    """Return a library's message as one line that begins with the place of the problem."""
    if "lookarounds not supported" in problem:
        problem = "anchors and word boundaries are not supported"
    column = _COLUMN.search(problem)
    if where == "regex" and column is not None:
        return f"regex, column {len(column[1]) + 1}: {column[2]}"
    place = _LARK_PLACE.match(problem)
    if where == "grammar" and place is not None:
        where, problem = f"grammar, line {place[1]}, column {place[2]}", problem[place.end() :]
    if "NoExtension" in problem:
        problem = "no text can fulfil it"
    problem = _SOURCE_PLACE.sub("", problem)
    lines = [line.strip() for line in problem.splitlines() if line.strip() and "while processing json" not in line]
    return f"{where}: {'; '.join(lines)[:300]}"
