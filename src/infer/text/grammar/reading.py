"""Make a library's source of a request's grammar: checked, reduced to keywords that the library enforces, and tried.

The time depends on the request, so the server does this in separate processes (`trial`).
"""

import json
from collections.abc import Callable, Set
from typing import NamedTuple

from infer.errors import InvalidRequestError
from infer.text.grammar.grammar import Grammar, Source
from infer.text.grammar.json_schema import build_schema
from infer.text.grammar.lark import check_grammar
from infer.text.grammar.pattern import check_pattern, encoded, without_anchors
from infer.text.grammar.schema_search import SEARCH_SECONDS, SchemaSearch, pointed

MAX_CHOICES = 10_000
MAX_CHOICE_BYTES = 65_536


class Read(NamedTuple):
    """The source of a grammar that a library compiled once. `warnings` name keywords that are not enforced.

    `left_out` are the parts of a tool's schema that are not enforced: their pointers, and the reasons.
    """

    source: Source
    warnings: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...] = ()


def read_grammar(
    grammar: Grammar,
    keywords: Set[str] | None,
    source_of: Callable[[Grammar], Source],
    try_: Callable[[Source], str],
    search_seconds: float = SEARCH_SECONDS,
) -> Read:
    """Return the source. `try_` compiles a source and returns the problem, or "".

    After `search_seconds` no smaller parts of a schema are searched. Raises InvalidRequestError that points into the
    grammar.
    """

    def problem_of(text: str) -> str:
        try:
            return try_(source_of(Grammar(grammar.kind, text)))
        except ValueError as error:  # the library's error about the text, before it compiles
            return str(error)

    if grammar.is_schema:
        schema = SchemaSearch(grammar, keywords, problem_of, search_seconds).run()
        noted = schema.omissions.noted if grammar.is_of_tool else {}
        return Read(source_of(Grammar(grammar.kind, schema.text)), schema.warnings, tuple(noted.items()))
    text, warnings = check(grammar, keywords)
    if problem := problem_of(text):
        raise InvalidRequestError(pointed(problem, grammar.where))
    return Read(source_of(Grammar(grammar.kind, text)), warnings)


def check(grammar: Grammar, keywords: Set[str] | None = None) -> tuple[str, tuple[str, ...]]:
    """Return the text for the compiler, and warnings. Raises InvalidRequestError if it is malformed or too large."""
    kind, text = grammar
    if kind == "json_schema":
        built = build_schema(text, keywords)
        return built.text, built.warnings
    if kind == "grammar":
        return check_grammar(text, keywords)
    if kind == "regex":
        check_pattern(text, "regex")  # first, so that columns count in the given text
        check_pattern(without_anchors(text), "regex", allows_anchors=False)
        return without_anchors(text), ()
    _check_choice(json.loads(text))
    return text, ()


def _check_choice(texts: list[str]) -> None:
    if len(texts) > MAX_CHOICES:
        raise InvalidRequestError(f"choice must have at most {MAX_CHOICES} strings, got {len(texts)}")
    size = sum(len(encoded(text, f"choice {index}")) for index, text in enumerate(texts))
    if size > MAX_CHOICE_BYTES:
        raise InvalidRequestError(f"choice must have at most {MAX_CHOICE_BYTES} bytes in total, got {size}")
