"""Search by trial for the smallest parts of a schema that must be left out so that a library compiles the rest.

The reader leaves out what it knows that no library enforces. A library refuses more: a schema that no value fulfils, or
one that is too slow. Then the keywords at the place of the problem are left out one by one, and then the schemas
around it. The number of trials and their time are limited.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Set
from hashlib import blake2b
from typing import final

from infer.errors import SchemaError
from infer.system.processor_limit import processor_seconds
from infer.text.grammar.grammar import Grammar
from infer.text.grammar.json_schema import BuiltSchema, build_schema
from infer.text.grammar.schema_part import TYPES
from infer.text.grammar.schema_references import escaped
from infer.text.grammar.schema_rewriter import ASSERTIONS, LeftOut, Omissions

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
        self._depth_of_argument = 0 if grammar.kind == "argument_schema" else 2
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
        """Reduce the argument of a tool that the error is about to its type. Raises the error if that does not help."""
        parts = (error.pointer or "").split("/")[: self._depth_of_argument + 1]
        is_inside = len(parts) > self._depth_of_argument and parts[1:2] in ([], ["properties"])
        if not self._grammar.is_of_tool or not is_inside:
            raise error
        self._omissions.wanted["/".join(parts)] = LeftOut(error.problem, keeps_type=True)
        schema = self._tried()
        if isinstance(schema, SchemaError):
            raise schema
        return schema

    def _cuts(self, error: SchemaError) -> Iterator[tuple[_Cut, bool]]:
        """Yield the cuts that may help, smaller ones first, each with True if it is small."""
        places, problem, pointer = self._omissions.places, error.problem, error.pointer or ""
        node = places.get(pointer)
        if isinstance(node, Mapping):
            words = {word: LeftOut(problem) for word in node if word in ASSERTIONS}
            named = re.findall(r"\$?\w+", problem)
            # Named words first, and `oneOf` last, because it already allows what `anyOf` does.
            ranks = {word: (word not in named, word == "oneOf") for word in words if word not in _STRUCTURE}
            ranks |= {word: (True, True) for word in named if word in words and word in _STRUCTURE}
            cuts = {
                f"{pointer}/{escaped(word)}": words[word] for word in sorted(ranks, key=ranks.__getitem__)[:_MAX_WORDS]
            }
            yield from (({at: cut}, True) for at, cut in cuts.items())
            if len(cuts) > 1:
                yield cuts, True
        steps = pointer.split("/")
        for number in range(len(steps), 0 if self._depth_of_argument == 0 else 1, -1):
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
