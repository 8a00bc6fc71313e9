"""A grammar as a request gives it."""

import json
from typing import Literal, NamedTuple

from infer.sampling_params import SamplingParams

GrammarKind = Literal["json_schema", "regex", "grammar", "choice"]


class Grammar(NamedTuple):
    """The rule that a text must follow. A choice is its strings as a JSON list."""

    kind: GrammarKind
    text: str


def grammar_of(params: SamplingParams) -> Grammar | None:
    """Return the grammar of `json_schema`, `regex`, `grammar` or `choice`, or None if none of them is given."""
    if params.json_schema is not None:
        return Grammar("json_schema", str(params.json_schema))
    if params.regex is not None:
        return Grammar("regex", params.regex)
    if params.grammar is not None:
        return Grammar("grammar", params.grammar)
    if params.choice is not None:
        return Grammar("choice", json.dumps(list(params.choice), ensure_ascii=False))
    return None
