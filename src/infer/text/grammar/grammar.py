"""A grammar as a request gives it, and as a library's compiler reads it."""

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, cast

from infer.sampling_params import CONSTRAINTS, SamplingParams

STRICT = "x-strict"  # a keyword at the top of a schema; by default true: parts that cannot be enforced are refused
GrammarKind = Literal["json_schema", "tool_schema", "argument_schema", "regex", "grammar", "choice"]


class Grammar(NamedTuple):
    """The rule that a text must follow. The text of a choice is a JSON list of its strings.

    The schema of a tool, or of one of its arguments, is never refused: any part that cannot be enforced is left out.
    """

    kind: GrammarKind
    text: str

    @property
    def where(self) -> str:
        """The name of the grammar in messages."""
        return "json_schema" if self.is_schema else str(self.kind)

    @property
    def is_schema(self) -> bool:
        return self.kind.endswith("schema")

    @property
    def is_of_tool(self) -> bool:
        return self.kind in ("tool_schema", "argument_schema")


class Source(NamedTuple):
    """A grammar in the notation of a library's compiler. `kind` chooses the compiler."""

    kind: str
    text: str


def not_strict(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with a mark that parts that cannot be enforced are left out with a warning."""
    return {STRICT: False, **schema}


def grammar_of(params: SamplingParams) -> Grammar | None:
    """Return the grammar of `json_schema`, `regex`, `grammar` or `choice`, or None if none of them is given."""
    for kind in CONSTRAINTS:
        if (given := getattr(params, kind)) is not None:
            text = given if isinstance(given, str) else json.dumps(list(given), ensure_ascii=False)
            return Grammar(cast(GrammarKind, kind), text)
    return None
