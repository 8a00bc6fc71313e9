"""Read a JSON schema and write the schema that a grammar library compiles. Messages give places as JSON pointers."""

import difflib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from infer.errors import InvalidRequestError
from infer.system.json_limits import is_deeper, refuse_constant, unique_keys
from infer.text.grammar.grammar import STRICT
from infer.text.grammar.pattern import encoded
from infer.text.grammar.schema_part import SchemaPart, false_part, refuse
from infer.text.grammar.schema_pattern import pattern_without
from infer.text.grammar.schema_references import escaped
from infer.text.grammar.schema_rewriter import ASSERTIONS, LeftOut, Omissions, Rewriter
from infer.text.grammar.schema_shortest import empty_definitions, nodes_of

MAX_BYTES = 1 << 20
MAX_DEPTH = 64
MAX_OPTIONAL = 256
MAX_ASKED = 40
ASKING_SECONDS = 1.0
_MAX_WARNINGS = 10


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
        found = part.written()
        if self.definitions:
            found = {"allOf": [found]} if isinstance(found, bool) else found
            found["$defs"] = {name.rpartition("/")[2]: each.written() for name, each in self.definitions.items()}
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
    rewriter, root = rewrite_schema(text, where, omissions)
    is_strict = rewriter.is_strict
    nodes = nodes_of([root, *rewriter.definitions.values()])
    for node in nodes if keywords is not None else ():
        for word in node.keys() - (keywords or ()):
            refuse(where, node.pointer, f"the keyword {word!r} is not supported by this grammar backend")
    for node in nodes:
        optional = len(node.get("properties", {}).keys() - set(node.get("required", ())))
        if optional > MAX_OPTIONAL:
            problem = f"at most {MAX_OPTIONAL} properties may be optional, got {optional}"
            if is_strict:
                refuse(where, node.pointer, problem)
            omissions.noted.setdefault(f"{node.pointer}/properties", problem)
            for word in node.keys() & {"properties", "additionalProperties"}:
                del node[word]
    definitions = rewriter.definitions
    empty = empty_definitions(root, nodes, definitions, where)
    for node in nodes:
        if node.get("$ref") in empty:
            node.clear()
            node["enum"] = []
    definitions = {name: part for name, part in definitions.items() if name not in empty}
    if keywords is None:
        _spell_other_names(nodes)
    return BuiltSchema(root, definitions, where, is_strict, tuple(rewriter.ignored), omissions)


def rewrite_schema(text: str, where: str, omissions: Omissions) -> tuple[Rewriter, SchemaPart]:
    """Return the first form of a schema, which may have too many names or no value. Raises InvalidRequestError."""
    size = len(encoded(text, where))
    if size > MAX_BYTES:
        raise InvalidRequestError(f"{where}: a schema must have at most {MAX_BYTES} bytes, got {size}")
    raw = _read_of_tool(text, where, omissions) if omissions.is_of_tool else _read(text, where)
    is_strict = not omissions.is_of_tool and _is_strict(raw, where)
    try:
        rewriter = Rewriter(raw, where, None if is_strict else omissions)
        return rewriter, rewriter.rewrite()
    except RecursionError:
        raise InvalidRequestError(f"{where} at /: nested too deeply when its choices are written out") from None


def _spell_other_names(nodes: Iterable[SchemaPart]) -> None:
    """Let each object's other names match a pattern, because llguidance lets escapes spell its own names a second time.

    A pattern beside a value's schema excludes the own names. No two patterns may meet in one object.
    """
    words = {word for node in nodes for word in node}
    for node in nodes if "patternProperties" not in words else ():
        other = node.get("additionalProperties", SchemaPart("", {}))
        if "properties" in node and not (other.is_false or (other and words & {"allOf", "anyOf", "$ref"})):
            pattern = pattern_without([*node["properties"]] if other else [])
            if pattern is not None:
                node["patternProperties"], node["additionalProperties"] = {pattern: other}, false_part("")


def _read_of_tool(text: str, where: str, omissions: Omissions) -> Any:
    """Return the schema of a tool. Properties that are nested too deeply are left out."""
    raw = json.loads(text)
    if isinstance(raw, dict):
        raw.pop(STRICT, None)
    problem = f"brackets must be nested at most {MAX_DEPTH} deep"
    if is_deeper(raw, MAX_DEPTH):
        properties = raw.get("properties") if isinstance(raw, dict) else None
        named = properties if isinstance(properties, dict) else {}
        deep = {name for name, each in named.items() if is_deeper(each, MAX_DEPTH - 2)}
        rest = {**raw, "properties": {name: named[name] for name in named.keys() - deep}} if deep else raw
        if is_deeper(rest, MAX_DEPTH):
            raise InvalidRequestError(f"{where}: {problem}")
        omissions.wanted.update({f"/properties/{escaped(name)}": LeftOut(problem, keeps_type=True) for name in deep})
    return raw


def _is_strict(raw: Any, where: str) -> bool:
    """Remove the keyword `x-strict` from the schema, and return its value."""
    if not isinstance(raw, dict | bool):
        refuse(where, "", f"a schema must be an object, true or false, got {json.dumps(raw):.40}")
    strict = raw.pop(STRICT, True) if isinstance(raw, dict) else True
    if not isinstance(strict, bool):
        refuse(where, f"/{STRICT}", f"must be true or false, got {strict!r:.40}")
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
