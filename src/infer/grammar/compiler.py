"""From what a request asks to a constraint: check the text, try it in a process of its own, compile it, keep it.

Whatever a grammar is, it is compiled within its budget or refused with one InvalidRequestError that points into it.
"""

import importlib.util
import json
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

from infer.errors import AnswerGrammarError, InvalidRequestError, SchemaError, SchemaWarning
from infer.grammar.backend import Backend, Source
from infer.grammar.base import Constraint, Grammar
from infer.grammar.lark import check_grammar
from infer.grammar.llguidance import LlguidanceBackend
from infer.grammar.matcher import StepwiseConstraint
from infer.grammar.pattern import check_pattern, encoded, without_anchors
from infer.grammar.sandbox import trial_of
from infer.grammar.schema import BuiltSchema, build_schema, unreadable_parts
from infer.grammar.schema_pattern import translated
from infer.grammar.vocabulary import Vocabulary
from infer.grammar.xgrammar import XgrammarBackend
from infer.system.locks import long_lock
from infer.tokenizer import Tokenizer

MAX_CACHED = 64  # compiled grammars per compiler
MAX_RULES = 512  # schemas of tools
MAX_CHOICES = 10_000
MAX_CHOICE_BYTES = 65_536

BACKENDS: dict[str, type[LlguidanceBackend] | type[XgrammarBackend]] = {
    "llguidance": LlguidanceBackend,
    "xgrammar": XgrammarBackend,
}

_LARK_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_SOURCE_PLACE = re.compile(r"\A\[[\d:]+\] \S+:\d+: ")  # of a library's own code
_COLUMN = re.compile(r"regex parse error:\n {4}.*\n {4}( *)\^.*\nerror: ([^\n]*)")


class Checked(NamedTuple):
    """A grammar as its compiler is to see it; which of its words are ignored, in one line or ""."""

    grammar: Grammar
    ignored: str = ""
    schema: BuiltSchema | None = None


@final
class Compiler:
    """Grammars for one tokenizer and model. Safe to share between threads; compiling lets other threads run."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None, backend: str) -> None:
        self.backend = backend
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = long_lock()  # guards what is below
        self._loaded: tuple[Backend, Vocabulary] | None = None
        self._compiled: OrderedDict[object, Any] = OrderedDict()
        self._rules: OrderedDict[object, str] = OrderedDict()

    def compile(self, grammar: Grammar) -> Constraint:
        """A constraint at its beginning, whose first mask is known to allow something.

        Raises InvalidRequestError: not well-formed, unsupported, unsatisfiable, or over the budget.
        """
        return self._constraint(grammar, lambda backend: backend.compile(backend.source(self._tried(backend, grammar))))

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
            found = f"%json {json.dumps(self._part(backend, grammar)['json_schema'])}"
        with self._lock:
            _keep(self._rules, grammar, found, MAX_RULES)
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

        def compile_(backend: Backend) -> Any:
            parts: list[dict[str, Any]] = [{"lark_grammar": lark}]
            if answer is not None:
                parts.append({**self._part(backend, answer), "name": "answer"})
            compiled = backend.compile(Source("", json.dumps({"grammars": parts})))
            if problem := compiled.get_error():
                raise AnswerGrammarError(f"the grammar of the answer cannot be compiled: {_pointed(problem, 'tools')}")
            return compiled

        return self._constraint((lark, answer), compile_)

    def _constraint(self, key: object, compile_: Callable[[Backend], Any]) -> Constraint:
        with self._lock:
            backend, vocabulary = self._load()
            compiled = self._compiled.get(key)
        if compiled is None:  # with the lock given back: one slow grammar holds up no other that is known
            compiled = compile_(backend)
        with self._lock:
            _keep(self._compiled, key, compiled, MAX_CACHED)
            matcher = backend.make_matcher(compiled)
        return StepwiseConstraint(matcher, vocabulary)

    def _part(self, backend: Backend, grammar: Grammar) -> dict[str, Any]:
        """Of a grammar of several parts, as llguidance has them."""
        if backend.name != "llguidance":
            raise InvalidRequestError(f"tools and reasoning need grammar_backend 'llguidance', got {backend.name!r}")
        text = backend.source(self._tried(backend, grammar)).text
        found: dict[str, Any] = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
        return found

    def _load(self) -> tuple[Backend, Vocabulary]:
        if self._loaded is None:
            if importlib.util.find_spec(self.backend) is None:
                raise InvalidRequestError(f"{self.backend} is not installed: pip install {self.backend}")
            vocabulary = Vocabulary(self._tokenizer, self._vocab_size)
            self._loaded = BACKENDS[self.backend](vocabulary), vocabulary
        return self._loaded

    def _tried(self, backend: Backend, grammar: Grammar) -> Grammar:
        """The grammar as it is to be compiled: it was, in another process."""
        checked = check(grammar, backend.keywords)
        grammar, where = checked.grammar, str(checked.grammar.kind)
        trial = trial_of(backend.name)

        def problem_of(text: str) -> str:
            try:
                return trial.run(backend.source(Grammar(grammar.kind, text)), where)
            except ValueError as error:  # the library's, of what it reads before it compiles
                return str(error)

        problem = problem_of(grammar.text)
        if problem and checked.schema is not None and checked.schema.text != grammar.text:
            grammar = Grammar(grammar.kind, checked.schema.text)
            problem = problem_of(grammar.text)
        if problem and checked.schema is not None:
            place, problem = checked.schema.place_of(problem, problem_of)
            raise SchemaError(_pointed(problem, f"{where} at {place or '/'}"), place, _pointed(problem, "")[2:])
        if problem:
            raise InvalidRequestError(_pointed(problem, where))
        if checked.ignored:
            warnings.warn(checked.ignored, SchemaWarning, stacklevel=2)
        return grammar


def make_compiler(tokenizer: Tokenizer, vocab_size: int | None = None, *, backend: str = "llguidance") -> Compiler:
    """`vocab_size` is the model's, where it has more ids than the tokenizer: those are never allowed.

    Loads nothing before the first grammar.
    """
    if backend not in BACKENDS:
        raise InvalidRequestError(f"the grammar backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return Compiler(tokenizer, vocab_size, backend)


def _keep(cache: "OrderedDict[object, Any]", key: object, value: Any, most: int) -> None:
    cache[key] = value
    cache.move_to_end(key)
    if len(cache) > most:
        cache.popitem(last=False)


def check(grammar: Grammar, keywords: Any = None) -> Checked:
    """Raises InvalidRequestError."""
    kind, text = grammar
    if kind == "json_schema":
        built = build_schema(text, keywords)
        return Checked(Grammar(kind, built.short_text if keywords is None else built.text), built.ignored, built)
    if kind == "grammar":
        found = check_grammar(text, keywords)
        return Checked(Grammar(kind, found.text), found.ignored)
    if kind == "regex":
        check_pattern(text, "regex")  # first, so that columns are those of the text as given
        check_pattern(without_anchors(text), "regex", allows_anchors=False)
        return Checked(Grammar(kind, without_anchors(text)))
    _check_choice(json.loads(text))
    return Checked(grammar)


def _check_choice(texts: list[str]) -> None:
    if len(texts) > MAX_CHOICES:
        raise InvalidRequestError(f"choice: there may be {MAX_CHOICES} of them, got {len(texts)}")
    size = sum(len(encoded(text, f"choice {index}")) for index, text in enumerate(texts))
    if size > MAX_CHOICE_BYTES:
        raise InvalidRequestError(f"choice: all together may have {MAX_CHOICE_BYTES} bytes, got {size}")


def _pointed(problem: str, where: str) -> str:
    """A library's message as one line that begins with the place."""
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
