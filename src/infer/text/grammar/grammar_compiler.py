"""Compile a request's grammar to a constraint: a separate process reads and tries it, then it is compiled and cached.

Every grammar is either compiled within its budget, or refused with one InvalidRequestError that points into it.
"""

import importlib.util
import threading
from collections.abc import Callable, Hashable
from hashlib import blake2b
from typing import Any, NamedTuple, final

from infer.errors import InvalidRequestError
from infer.system.sized_cache import SizedCache
from infer.text.grammar.constraint import Constraint, StepwiseConstraint
from infer.text.grammar.grammar import Grammar, Source
from infer.text.grammar.grammar_backends import GrammarBackend, LlguidanceBackend, Vocabulary, XgrammarBackend
from infer.text.grammar.json_schema import pointed
from infer.text.grammar.libraries import try_grammar
from infer.text.tokenizer import Tokenizer

MAX_COMPILED_BYTES = 256 << 20  # of all cached grammars
_LEAST_BYTES = 20_000

BACKENDS: dict[str, type[GrammarBackend]] = {"llguidance": LlguidanceBackend, "xgrammar": XgrammarBackend}


class _Compiled(NamedTuple):
    """A grammar compiled by a library, its size in bytes, and warnings about keywords that are not enforced."""

    grammar: Any
    num_bytes: int
    warnings: tuple[str, ...] = ()


@final
class Compiler:
    """Compiler of grammars for one tokenizer and model. It loads nothing before the first grammar.

    It is safe to share between threads. Other threads run during a compilation. If the model has more ids than the
    tokenizer, `vocab_size` is the model's. The additional ids are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None = None, *, backend: str = "llguidance") -> None:
        if backend not in BACKENDS:
            raise InvalidRequestError(f"the grammar backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        self.backend = backend
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.RLock()  # guards the attributes below
        self._loaded: tuple[GrammarBackend, Vocabulary] | None = None
        self._compiled = SizedCache[_Compiled](MAX_COMPILED_BYTES)

    def compile(self, grammar: Grammar) -> Constraint:
        """Return a new constraint, as `maker` does."""
        return self.maker(grammar)()

    def maker(self, grammar: Grammar) -> Callable[[], Constraint]:
        """Return a function that makes constraints and keeps the compiled grammar, so it never compiles.

        The first mask of a constraint allows at least one token. Raises InvalidRequestError if the grammar is not
        well-formed, unsupported, unsatisfiable, or over the budget.
        """

        def compile_(backend: GrammarBackend) -> _Compiled:
            read = try_grammar(self.backend, grammar)  # first compiled in another process
            return _compiled(backend, read.source, read.warnings)

        return self._maker(grammar, compile_)

    def warnings_of(self, grammar: Grammar) -> tuple[str, ...]:
        """Return a line for each part of a compiled schema that is not enforced."""
        with self._lock:
            found = self._compiled.get(_key(grammar))
        return () if found is None else found.warnings

    def spell(self, text: str) -> list[int]:
        """Return the tokenizer's own ids for a text."""
        with self._lock:
            return self._load()[1].spell(text)

    def answer_maker(self, source: str) -> Callable[[], Constraint]:
        """Return a function that makes constraints of a grammar that `prepare` wrote and tried.

        No text of a request may be passed here, because the grammar may name control tokens by their ids.
        """

        def compile_(backend: GrammarBackend) -> _Compiled:
            compiled = _compiled(backend, Source("", source))
            if problem := compiled.grammar.get_error():
                raise InvalidRequestError(f"the grammar of the answer cannot be compiled: {pointed(problem, 'tools')}")
            return compiled

        return self._maker(source, compile_)

    def check_answers(self) -> None:
        """Raise InvalidRequestError if the backend cannot compile grammars of answers with tools or reasoning."""
        if self.backend != "llguidance":
            raise InvalidRequestError(f"tools and reasoning need grammar_backend 'llguidance', got {self.backend!r}")

    def _maker(self, asked: Hashable, compile_: Callable[[GrammarBackend], _Compiled]) -> Callable[[], Constraint]:
        if self._tokenizer.rewrites_text:
            raise InvalidRequestError(
                "a grammar needs a tokenizer whose decoder changes each token by itself, but this model's decoder "
                "replaces text across tokens: ask without a grammar"
            )
        key = _key(asked)
        with self._lock:
            backend, vocabulary = self._load()
            compiled = self._compiled.get(key)
        if compiled is None:  # without the lock, so that a slow grammar does not delay cached ones
            compiled = compile_(backend)
        with self._lock:
            self._compiled.put(key, compiled, compiled.num_bytes)

        def make() -> Constraint:
            with self._lock:
                matcher = backend.make_matcher(compiled.grammar)
            return StepwiseConstraint(matcher, vocabulary.end_ids)

        return make

    def _load(self) -> tuple[GrammarBackend, Vocabulary]:
        if self._loaded is None:
            if importlib.util.find_spec(self.backend) is None:
                raise InvalidRequestError(f"{self.backend} is not installed: pip install {self.backend}")
            vocabulary = Vocabulary(self._tokenizer, self._vocab_size)
            self._loaded = BACKENDS[self.backend](vocabulary), vocabulary
        return self._loaded


def _key(asked: Hashable) -> bytes:
    """Return a key of a grammar. A schema may be longer than its source."""
    return blake2b(repr(asked).encode(), digest_size=32).digest()


def _compiled(backend: GrammarBackend, source: Source, warnings: tuple[str, ...] = ()) -> _Compiled:
    compiled, num_bytes = backend.compile(source)
    return _Compiled(compiled, _LEAST_BYTES + num_bytes + sum(map(len, warnings)), warnings)
