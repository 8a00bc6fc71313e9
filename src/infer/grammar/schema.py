"""Convert a JSON schema of any draft to one that a grammar's compiler enforces exactly.

The schema is read, its choices are written out, and it is checked. Each message names the place as a JSON pointer.
"""

import difflib
import json
import re
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any

from infer.errors import InvalidRequestError
from infer.grammar.pattern import encoded
from infer.grammar.schema_builder import Builder, rendered, written_name
from infer.grammar.schema_choices import TAKES_ANY
from infer.grammar.schema_node import NOTHING, Node, refuse
from infer.grammar.schema_reader import ASSERTIONS, Reader
from infer.grammar.schema_sharing import shared
from infer.grammar.schema_shortest import children_of, empty_definitions, nodes_of

MAX_BYTES = 1 << 20
MAX_DEPTH = 64
MAX_ASKED = 40
ASKING_SECONDS = 1.0

_BRACKETS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{\]}]', re.DOTALL)  # strings are passed over


@dataclass(frozen=True)
class BuiltSchema:
    """A schema in the compiler's form. `ignored` names in one line the words that assert nothing, or is ""."""

    root: Node
    definitions: Mapping[str, Node]
    empty: frozenset[str]
    ignored: str

    @property
    def text(self) -> str:
        """Text for the compiler."""
        return self.text_of(self.root)

    @property
    def short_text(self) -> str:
        """The same text with equal parts as one definition. Compilers that support few words may not accept it."""
        return json.dumps(shared(rendered(self.root, self.definitions, self.empty)))

    def text_of(self, node: Node) -> str:
        return json.dumps(rendered(node, self.definitions, self.empty))

    def place_of(self, problem: str, problem_of: Callable[[str], str]) -> tuple[str, str]:
        """Return the pointer of the deepest part whose text has a problem, and the problem.

        Calls `problem_of` at most `MAX_ASKED` times, and not after `ASKING_SECONDS`, because a part may need its whole
        budget to fail.
        """
        node, seen, num_asked = self.root, {id(self.root)}, 0
        end = time.monotonic() + ASKING_SECONDS
        while True:
            inner = children_of(node) + ([self.definitions[node["$ref"]]] if "$ref" in node else [])
            for part in inner:
                if id(part) in seen or part.is_false or num_asked >= MAX_ASKED or time.monotonic() >= end:
                    continue
                seen.add(id(part))
                num_asked += 1
                if found := problem_of(self.text_of(part)):
                    node, problem = part, found
                    break
            else:
                return node.pointer, problem


def unreadable_parts(schema: Any, where: str = "json_schema") -> list[tuple[str, str]]:
    """Return the pointers of words and schemas that `build_schema` cannot read, each with the reason.

    A schema that is too deep to be read has none.
    """
    found = list[tuple[str, str]]()
    if not _is_too_deep(schema):
        Reader(schema, where, on_problem=lambda pointer, problem: found.append((pointer, problem))).read()
    return found


def build_schema(text: str, keywords: Set[str] | None = None, where: str = "json_schema") -> BuiltSchema:
    """Return the built schema. `keywords` are the words that the backend enforces, None for all.

    Raises InvalidRequestError if the schema is malformed, unsupported or too large, or no value fulfils it.
    """
    size = len(encoded(text, where))
    if size > MAX_BYTES:
        raise InvalidRequestError(f"{where}: a schema may have {MAX_BYTES} bytes, got {size}")
    raw = _read(text, where)
    if not isinstance(raw, dict | bool):
        refuse(where, "", f"a schema must be an object, true or false, got {json.dumps(raw):.40}")
    takes_any = _takes_any(raw, where)
    try:
        reader = Reader(raw, where)
        root = reader.read()
        builder = Builder(reader.definitions, where, takes_any=takes_any)
        built = builder.build(root)
    except RecursionError:
        raise InvalidRequestError(f"{where} at /: nested too deep when its choices are written out") from None
    nodes = nodes_of([built, *builder.built.values()])
    for node in nodes if keywords is not None else ():
        for word in map(written_name, node):
            if keywords is not None and word not in keywords and word != NOTHING:
                refuse(where, node.pointer, f"the keyword {word!r} is not supported by this grammar backend")
    empty = empty_definitions(built, nodes, builder.built, where)
    return BuiltSchema(built, builder.built, empty, _ignored(reader.ignored, where))


def _takes_any(raw: Any, where: str) -> bool:
    """Remove the word TAKES_ANY from the schema, and return True if it was there."""
    asked = raw.pop(TAKES_ANY, None) if isinstance(raw, dict) else None
    if asked not in (None, "anyOf"):
        refuse(where, f"/{TAKES_ANY}", f"must be 'anyOf', got {asked!r:.40}")
    return asked is not None


def _ignored(words: Mapping[str, str], where: str) -> str:
    if not words:
        return ""
    named = []
    for word in list(words)[:10]:
        near = difflib.get_close_matches(word, ASSERTIONS, n=1, cutoff=0.8) if len(word) <= 40 else []
        named.append(f"{word:.40}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    more = f" and {len(words) - 10} more" if len(words) > 10 else ""
    return f"{where}: ignored, as they assert nothing: {', '.join(named)}{more}"


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
        raw = json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
    except ValueError as error:
        raise InvalidRequestError(f"{where} is not JSON: {error}") from None
    except RecursionError:
        raw = None
    if raw is None or _is_too_deep(raw):
        _refuse_depth(text, where)
    return raw


def _is_too_deep(raw: Any) -> bool:
    level = [raw]
    for _ in range(MAX_DEPTH + 1):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        if not inner:
            return False
        level = list(chain.from_iterable(inner))
    return True


def _refuse_depth(text: str, where: str) -> None:
    """Raise InvalidRequestError that names the first bracket that is too deep."""
    depth = 0
    for found in _BRACKETS.finditer(text):
        if found[0] in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                at = found.end()
                raise InvalidRequestError(f"{where}: brackets may be nested {MAX_DEPTH} deep, not so at {at}")
        elif found[0] in "]}":
            depth -= 1
