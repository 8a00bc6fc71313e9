"""From what a request asks to a constraint: read and tried in a process of its own, compiled here, and kept.

Whatever a grammar is, it is compiled within its budget or refused with one InvalidRequestError that points into it.
"""

import importlib.util
import json
import re
import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, final

from infer.errors import AnswerGrammarError, InvalidRequestError, SchemaWarning
from infer.grammar.backend import Backend
from infer.grammar.base import Constraint
from infer.grammar.grammar import Grammar
from infer.grammar.libraries import Source
from infer.grammar.llguidance import LlguidanceBackend
from infer.grammar.matcher import StepwiseConstraint
from infer.grammar.pattern import check_pattern, without_anchors
from infer.grammar.reading import pointed
from infer.grammar.schema import unreadable_parts
from infer.grammar.schema_pattern import translated
from infer.grammar.sized_cache import SizedCache
from infer.grammar.trial import try_grammar
from infer.grammar.vocabulary import Vocabulary
from infer.grammar.xgrammar import XgrammarBackend
from infer.system.locks import long_lock
from infer.tokenizer import Tokenizer

MAX_COMPILED_BYTES = 256 << 20  # of what is kept
MAX_RULE_BYTES = 32 << 20  # of schemas of tools
_BYTES_PER_SOURCE_BYTE = 80  # of a compiled grammar: 25 to 39 MB for 442 KiB
_LEAST_BYTES = 20_000

BACKENDS: dict[str, type[LlguidanceBackend] | type[XgrammarBackend]] = {
    "llguidance": LlguidanceBackend,
    "xgrammar": XgrammarBackend,
}


class _Compiled(NamedTuple):
    """A grammar as a library has it, and the bytes that it takes, by estimate."""

    grammar: Any
    num_bytes: int


@final
class Compiler:
    """Grammars for one tokenizer and model. Safe to share between threads; compiling lets other threads run."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None, backend: str) -> None:
        self.backend = backend
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = long_lock()  # guards what is below
        self._loaded: tuple[Backend, Vocabulary] | None = None
        self._compiled = SizedCache[_Compiled](MAX_COMPILED_BYTES)
        self._rules = SizedCache[str](MAX_RULE_BYTES)

    def compile(self, grammar: Grammar) -> Constraint:
        """A constraint at its beginning, whose first mask is known to allow something.

        Raises InvalidRequestError: not well-formed, unsupported, unsatisfiable, or over the budget.
        """
        return self._constraint(grammar, lambda backend: _compiled(backend, _read(backend, grammar)))

    def spell(self, text: str) -> list[int]:
        """The tokenizer's own ids for a text."""
        with self._lock:
            return self._load()[1].spell(text)

    def json_rule(self, schema: Mapping[str, Any]) -> str:
        """A schema, checked and tried, as an expression of Lark for `compile_around`. Raises InvalidRequestError."""
        grammar = Grammar("json_schema", json.dumps(schema))
        with self._lock:
            backend, _ = self._load()
            found = self._rules.get(grammar)
        if found is None:
            found = f"%json {json.dumps(_part(backend, grammar)['json_schema'])}"
            with self._lock:
                self._rules.put(grammar, found, len(grammar.text) + len(found))
        return found

    def unreadable_parts(self, schema: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return the pointers of words of a schema that cannot be read, each with the reason."""
        return unreadable_parts(schema)

    def text_pattern(self, pattern: str) -> str:
        """A schema's pattern, for a whole text, between the slashes of a pattern of Lark. Raises InvalidRequestError.

        With an anchor it holds each of its alternatives.
        """
        self.json_rule({"type": "string", "pattern": pattern})
        body = without_anchors(pattern)
        check_pattern(body, "pattern", allows_anchors=False)
        found = re.sub(r"(\\.)|/", lambda match: match[1] or "\\/", translated(body), flags=re.DOTALL)
        before = "" if pattern.startswith("^") else "(.|\\n)*"
        after = "" if pattern.removeprefix("^") != body else "(.|\\n)*"
        return f"{before}({found})".replace("\n", "\\n") + after

    def compile_around(self, lark: str, answer: Grammar | None) -> Constraint:
        """A grammar of infer's own, in which `@answer` is the request's. It may name control tokens by their ids, so
        nothing of a request may be in it but what `json_rule` and `text_pattern` give.
        """

        def compile_(backend: Backend) -> _Compiled:
            parts: list[dict[str, Any]] = [{"lark_grammar": lark}]
            if answer is not None:
                parts.append({**_part(backend, answer), "name": "answer"})
            compiled = _compiled(backend, Source("", json.dumps({"grammars": parts})))
            if problem := compiled.grammar.get_error():
                raise AnswerGrammarError(f"the grammar of the answer cannot be compiled: {pointed(problem, 'tools')}")
            return compiled

        return self._constraint((lark, answer), compile_)

    def _constraint(self, key: Hashable, compile_: Callable[[Backend], _Compiled]) -> Constraint:
        with self._lock:
            backend, vocabulary = self._load()
            compiled = self._compiled.get(key)
        if compiled is None:  # with the lock given back: one slow grammar holds up no other that is known
            compiled = compile_(backend)
        with self._lock:
            self._compiled.put(key, compiled, compiled.num_bytes)
            matcher = backend.make_matcher(compiled.grammar)
        return StepwiseConstraint(matcher, vocabulary)

    def _load(self) -> tuple[Backend, Vocabulary]:
        if self._loaded is None:
            if importlib.util.find_spec(self.backend) is None:
                raise InvalidRequestError(f"{self.backend} is not installed: pip install {self.backend}")
            vocabulary = Vocabulary(self._tokenizer, self._vocab_size)
            self._loaded = BACKENDS[self.backend](vocabulary), vocabulary
        return self._loaded


def make_compiler(tokenizer: Tokenizer, vocab_size: int | None = None, *, backend: str = "llguidance") -> Compiler:
    """`vocab_size` is the model's, where it has more ids than the tokenizer: those are never allowed.

    Loads nothing before the first grammar.
    """
    if backend not in BACKENDS:
        raise InvalidRequestError(f"the grammar backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return Compiler(tokenizer, vocab_size, backend)


def _compiled(backend: Backend, source: Source) -> _Compiled:
    return _Compiled(backend.compile(source), _LEAST_BYTES + _BYTES_PER_SOURCE_BYTE * len(source.text))


def _read(backend: Backend, grammar: Grammar) -> Source:
    """Return the source, which was compiled in another process. Raises InvalidRequestError."""
    read = try_grammar(backend.name, grammar)
    if read.ignored:
        warnings.warn(read.ignored, SchemaWarning, stacklevel=2)
    return read.source


def _part(backend: Backend, grammar: Grammar) -> dict[str, Any]:
    """Return one part of a grammar of several, as llguidance has them."""
    if backend.name != "llguidance":
        raise InvalidRequestError(f"tools and reasoning need grammar_backend 'llguidance', got {backend.name!r}")
    text = _read(backend, grammar).text
    found: dict[str, Any] = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
    return found
