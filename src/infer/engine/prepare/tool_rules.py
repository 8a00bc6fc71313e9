"""Schemas and patterns of tools as expressions of Lark. Each is read and tried within a limit of processor time."""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, final

from infer.system.memory.sized_cache import SizedCache
from infer.system.processes.processor_limit import LateError, processor_seconds
from infer.text.grammar.grammar import Grammar
from infer.text.grammar.json_schema import unreadable_parts
from infer.text.grammar.library_trials import Try, read_within
from infer.text.grammar.pattern import check_pattern, without_anchors
from infer.text.grammar.schema_pattern import translated

MAX_RULE_BYTES = 16 << 20
_LIBRARY = "llguidance"


class _Part(NamedTuple):
    """One of several grammars of llguidance. `warnings` name the keywords of schemas that are not enforced."""

    grammar: Mapping[str, Any]
    warnings: tuple[str, ...]


@final
class ToolRules:
    """The `Rules` of `argument_grammar`, for one library in this process. Results are cached, up to a size in bytes."""

    def __init__(self, library: Any, try_: Try, read_seconds: float) -> None:
        """Begin. `read_seconds` limits one schema. `try_` compiles a source and returns the problem, or ""."""
        self._library, self._try, self._read_seconds = library, try_, read_seconds
        self._parts = SizedCache[_Part](MAX_RULE_BYTES)
        self._ends_at = 0.0
        self.warnings: dict[str, None] = {}  # warnings of all grammars

    def begin(self, seconds: float) -> None:
        """From now on, let the first trial after `seconds` of processor time (with forks) raise LateError."""
        self._ends_at = processor_seconds() + seconds

    def part(self, grammar: Grammar) -> Mapping[str, Any]:
        """Return a checked and tried grammar. Raises InvalidRequestError."""
        if (found := self._parts.get(grammar)) is None:
            found = self._read(grammar)
            num_bytes = len(grammar.text) + len(json.dumps(found.grammar)) + sum(map(len, found.warnings))
            self._parts.put(grammar, found, num_bytes)
        self.warnings |= dict.fromkeys(found.warnings)
        return found.grammar

    def json_rule(self, schema: Mapping[str, Any]) -> str:
        """Return a checked and tried schema. Raises InvalidRequestError."""
        part = self.part(Grammar("json_schema", json.dumps(schema)))
        return f"%json {json.dumps(part['json_schema'])}"

    def unreadable_parts(self, schema: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return the pointers of keywords of a schema that cannot be read, each with the reason."""
        return unreadable_parts(schema)

    def text_pattern(self, pattern: str) -> str:
        """Return a schema's pattern for a whole text, in the form that Lark has between slashes.

        An anchor at an end applies to all alternatives. Raises InvalidRequestError.
        """
        self.json_rule({"type": "string", "pattern": pattern})
        body = without_anchors(pattern)
        check_pattern(body, "pattern", allows_anchors=False)
        found = re.sub(r"(\\.)|/", lambda match: match[1] or "\\/", translated(body), flags=re.DOTALL)
        before = "" if pattern.startswith("^") else "(.|\\n)*"
        after = "" if pattern.removeprefix("^") != body else "(.|\\n)*"
        return f"{before}({found})".replace("\n", "\\n") + after

    def _read(self, grammar: Grammar) -> _Part:
        if processor_seconds() > self._ends_at:
            raise LateError
        read = read_within(self._library, _LIBRARY, self._try, grammar, self._read_seconds)
        text = read.source.text
        part = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
        return _Part(part, read.warnings)
