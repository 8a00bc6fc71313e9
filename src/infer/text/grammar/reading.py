"""Make a library's source of a request's grammar: checked, reduced to keywords that the library enforces, and tried.

The time depends on the request, so the server does this in separate processes (`trial`).
"""

import json
import re
from collections.abc import Callable, Set
from typing import NamedTuple

from infer.errors import InvalidRequestError, SchemaError
from infer.text.grammar.grammar import Grammar, Source
from infer.text.grammar.json_schema import BuiltSchema, build_schema
from infer.text.grammar.lark import check_grammar
from infer.text.grammar.pattern import check_pattern, encoded, without_anchors

MAX_CHOICES = 10_000
MAX_CHOICE_BYTES = 65_536
MAX_LEFT_OUT = 8  # parts of a schema that may be left out because the library refuses them

_LARK_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_SOURCE_PLACE = re.compile(r"\A\[[\d:]+\] \S+:\d+: ")  # a place in a library's own code
_IS_EMPTY = re.compile("nsatisfiable|NoExtension")  # no text fulfils it, so nothing can be left out
_COLUMN = re.compile(r"regex parse error:\n {4}.*\n {4}( *)\^.*\nerror: ([^\n]*)")


class Checked(NamedTuple):
    """A grammar in its compiler's form. `warnings` name the keywords of schemas that are not enforced."""

    grammar: Grammar
    warnings: tuple[str, ...] = ()
    schema: BuiltSchema | None = None


class Read(NamedTuple):
    """The source of a grammar that a library compiled once. `warnings` name keywords that are not enforced."""

    source: Source
    warnings: tuple[str, ...]


def read_grammar(
    grammar: Grammar,
    keywords: Set[str] | None,
    source_of: Callable[[Grammar], Source],
    try_: Callable[[Source], str],
) -> Read:
    """Return the source. `try_` compiles a source and returns the problem, or "".

    Raises InvalidRequestError that points into the grammar.
    """
    checked = check(grammar, keywords)
    kind, where = grammar.kind, str(grammar.kind)

    def problem_of(text: str) -> str:
        try:
            return try_(source_of(Grammar(kind, text)))
        except ValueError as error:  # the library's error about the text, before it compiles
            return str(error)

    text, warnings, schema = checked.grammar.text, checked.warnings, checked.schema
    problem = problem_of(text)
    num_left_out = 0
    while problem and schema is not None:
        part, problem = schema.place_of(problem, problem_of)
        said = pointed(problem, "")[2:]
        if schema.is_strict or num_left_out == MAX_LEFT_OUT or _IS_EMPTY.search(problem):
            raise SchemaError(pointed(problem, f"{where} at {part.pointer or '/'}"), part.pointer, said)
        schema = schema.without(part, said)
        num_left_out += 1
        text, warnings = schema.text, schema.warnings
        problem = problem_of(text)
    if problem:
        raise InvalidRequestError(pointed(problem, where))
    return Read(source_of(Grammar(kind, text)), warnings)


def check(grammar: Grammar, keywords: Set[str] | None = None) -> Checked:
    """Return the checked grammar. Raises InvalidRequestError if it is not well-formed or too large."""
    kind, text = grammar
    if kind == "json_schema":
        built = build_schema(text, keywords)
        return Checked(Grammar(kind, built.text), built.warnings, built)
    if kind == "grammar":
        found = check_grammar(text, keywords)
        return Checked(Grammar(kind, found.text), found.warnings)
    if kind == "regex":
        check_pattern(text, "regex")  # first, so that columns count in the given text
        check_pattern(without_anchors(text), "regex", allows_anchors=False)
        return Checked(Grammar(kind, without_anchors(text)))
    _check_choice(json.loads(text))
    return Checked(grammar)


def _check_choice(texts: list[str]) -> None:
    if len(texts) > MAX_CHOICES:
        raise InvalidRequestError(f"choice must have at most {MAX_CHOICES} strings, got {len(texts)}")
    size = sum(len(encoded(text, f"choice {index}")) for index, text in enumerate(texts))
    if size > MAX_CHOICE_BYTES:
        raise InvalidRequestError(f"choice must have at most {MAX_CHOICE_BYTES} bytes in total, got {size}")


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
