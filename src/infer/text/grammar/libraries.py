"""Calls of the grammar libraries, shared by the process that tries a grammar and the one that compiles it.

This module loads no library itself, so that the process that tries grammars starts quickly.
"""

import json
from collections.abc import Set
from typing import Any

from infer.text.grammar.grammar import Grammar, Source

ENFORCED: dict[str, Set[str] | None] = {
    "llguidance": None,
    "xgrammar": frozenset(
        {
            *("type", "const", "enum", "anyOf", "$ref", "properties", "required", "additionalProperties"),
            *("items", "prefixItems", "minItems", "maxItems"),
        }
    ),
}
"""The keywords of JSON schemas that a library enforces; None means all known keywords."""


def source_of(name: str, library: Any, grammar: Grammar) -> Source:
    """Return the source of a checked grammar. Raises ValueError if the library cannot read it."""
    return llguidance_source(library, grammar) if name == "llguidance" else xgrammar_source(grammar)


def llguidance_source(library: Any, grammar: Grammar) -> Source:
    make = library.LLMatcher
    if grammar.kind == "regex":
        return Source("", make.grammar_from_regex(grammar.text))
    if grammar.kind == "grammar":
        return Source("", make.grammar_from_lark(grammar.text))
    if grammar.kind == "choice":
        options = " | ".join(json.dumps(text) for text in json.loads(grammar.text))
        return Source("", make.grammar_from_lark(f"start: CHOICE\nCHOICE: {options}"))  # one item of the parser
    return schema_source(library, grammar.text)


def schema_source(library: Any, text: str) -> Source:
    """Return the source of a built schema, with the spaces of Python's `json.dumps`."""
    separators = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    schema = json.loads(text)
    if not isinstance(schema, dict):  # true: any JSON; false was refused before
        schema = {}
    return Source("", library.LLMatcher.grammar_from_json_schema(schema, overrides=separators))


def llguidance_limits(library: Any, text: str) -> Any:
    """Return the limits for a grammar.

    The library's own limit is 2,000 items at one place, but 64 KiB of Lark may have 13,000 alternatives there.

    The fuel for texts that are read without a mask (drafts, forced text) is twenty times the library's own: 0.4 s. With
    less fuel, words of `(\\S+\\s+){0,49}` in at most 500 characters end after 55. The fuel of a mask is unchanged.

    A grammar with few alternatives gets few items, because an ambiguous grammar could otherwise take a second per
    token. Schemas and patterns, which begin with a brace here, are not ambiguous in this way.
    """
    num_items = 20_000 if text.startswith("{") else min(max(4_000, 2 * text.count("|")), 20_000)
    return library.LLParserLimits(
        verbose_errors=False,
        max_items_in_row=num_items,
        step_max_items=10 * num_items,
        initial_lexer_fuel=20_000_000,
    )


def xgrammar_source(grammar: Grammar) -> Source:
    if grammar.kind == "choice":
        options = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.text))
        return Source("ebnf", f"root ::= {options}")
    return Source(grammar.kind, grammar.text)


def compile_with_xgrammar(compiler: Any, library: Any, kind: str, text: str) -> Any:
    if kind == "json_schema":
        return compiler.compile_json_schema(text, any_whitespace=False, separators=(", ", ": "), strict_mode=False)
    if kind == "regex":
        return compiler.compile_regex(text)
    if kind == "ebnf":
        return compiler.compile_grammar(library.Grammar.from_ebnf(text))
    return compiler.compile_lark(text)
