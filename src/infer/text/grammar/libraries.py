"""Read a request's grammar for a library: checked, reduced to keywords that the library enforces, and tried.

A trial compiles a source and asks for the tokens that it allows, in a process that may hang, crash or run out of memory
(`trial_lane`). The work for a schema can explode. llguidance 1.9 overflows its stack on a chain of 5,000 rules, and
never returns from a product of large `multipleOf`. xgrammar 0.2 crashes on deep patterns. No check of the text covers
every such case. This module loads no library itself, so that the process starts quickly.
"""

import json
import os
import random
import signal
from collections.abc import Callable, Set
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import infer
from infer.errors import InvalidRequestError, SchemaError
from infer.system.child_process import MEMORY_BYTES, ChildError, Lane, OverLimitError, limited
from infer.text.grammar.grammar import Grammar, Source
from infer.text.grammar.json_schema import ESCAPES, SEARCH_SECONDS, BuiltSchema, SchemaSearch, build_schema, pointed
from infer.text.grammar.lark import check_grammar
from infer.text.grammar.patterns import check_pattern, encoded, without_anchors

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
    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    schema = json.loads(text)
    if not isinstance(schema, dict):  # true: any JSON; false was refused before
        schema = {}
    if ESCAPES in schema:
        options[ESCAPES] = schema.pop(ESCAPES)
    return Source("", library.LLMatcher.grammar_from_json_schema(schema, overrides=options))


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


MAX_CHOICES = 10_000
MAX_CHOICE_BYTES = 65_536


class Read(NamedTuple):
    """The source of a grammar that a library compiled once. `warnings` name keywords that are not enforced."""

    source: Source
    warnings: tuple[str, ...]
    schema: BuiltSchema | None = None


def read_grammar(
    grammar: Grammar,
    keywords: Set[str] | None,
    source_of: Callable[[Grammar], Source],
    try_: Callable[[Source], str],
    search_seconds: float = SEARCH_SECONDS,
) -> Read:
    """Return a grammar's source, after `try_` has compiled it. `try_(source)` returns the problem, or "".

    Parts of a schema are searched for the problem for at most `search_seconds`. Raises InvalidRequestError that points
    into the grammar.
    """

    def problem_of(text: str) -> str:
        try:
            return try_(source_of(Grammar(grammar.kind, text)))
        except ValueError as error:  # the library's error about the text, before it compiles
            return str(error)

    if grammar.is_schema:
        schema = SchemaSearch(grammar, keywords, problem_of, search_seconds).run()
        return Read(source_of(Grammar(grammar.kind, schema.text)), schema.warnings, schema)
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


Try = Callable[[Source], str]

COMPILE_SECONDS = 2.0  # processor seconds of the library
_NUM_WALKS, _WALK_BYTES = 2, 8  # short random texts, which find grammars that cannot be followed


def llguidance_try(library: Any, tokenizer: Any = None) -> Try:
    """Return a trial that runs in a fork of this process, which may hang or overflow its stack."""
    follow = llguidance_follow(library, tokenizer)
    return lambda source: _in_a_fork(follow, source)


def llguidance_follow(library: Any, tokenizer: Any = None) -> Try:
    """Return a trial that compiles a source and follows it for a few bytes.

    The first 256 ids of the tokenizer must be the bytes. None is a tokenizer with only these ids.
    """
    tokenizer = tokenizer or library.LLTokenizer("byte")

    def follow(source: Source) -> str:
        limits = llguidance_limits(library, source.text)
        compiled = library.LLMatcher(tokenizer, source.text, log_level=0, limits=limits)
        for seed in range(_NUM_WALKS):
            matcher, rng = compiled.deep_copy(), random.Random(seed)
            for _ in range(_WALK_BYTES):
                mask = matcher.compute_bitmask()
                if matcher.is_error():
                    return str(matcher.get_error())
                allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
                if not allowed:
                    break
                matcher.consume_token(rng.choice(allowed))
        return ""

    return follow


def xgrammar_try(library: Any) -> Try:
    """Return a trial that runs in this process, because the library may have threads.

    SIGPROF ends the process if the trial takes too long.
    """
    tokens = [bytes([byte]) for byte in range(256)]
    info = library.TokenizerInfo([*tokens, b"</s>"], library.VocabType.RAW, stop_token_ids=[256])
    compiler = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def follow(source: Source) -> str:
        before = signal.signal(signal.SIGPROF, signal.SIG_DFL)
        left = signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)[0]
        try:
            matcher = library.GrammarMatcher(compile_with_xgrammar(compiler, library, source.kind, source.text))
        except Exception as error:  # tvm_ffi raises any exception of C++
            return str(error) or type(error).__name__
        finally:
            signal.setitimer(signal.ITIMER_PROF, left)
            signal.signal(signal.SIGPROF, before)
        mask = library.allocate_token_bitmask(1, info.vocab_size)
        matcher.fill_next_token_bitmask(mask)
        return "" if mask.any() else "no text fulfils it"

    return follow


TRIES: dict[str, Callable[[Any], Try]] = {"llguidance": llguidance_try, "xgrammar": xgrammar_try}


def _in_a_fork(follow: Try, source: Source) -> str:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a program that ignores it, such as a worker of Ray, passes this on
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)
            os.close(reading)
            with open(writing, "w", encoding="utf-8", errors="replace") as file:
                file.write(follow(source))
        except BaseException:  # no library should raise it: reported as a crash
            os._exit(1)
        os._exit(0)
    os.close(writing)
    try:
        with open(reading, encoding="utf-8") as file:
            found = file.read()
    finally:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGPROF:
        return f"takes more than {COMPILE_SECONDS:g} s to compile: make it smaller or less ambiguous"
    return "too large or too deep to compile" if status else found


def read_within(
    library: Any, name: str, try_: Try, grammar: Grammar, seconds: float, search_seconds: float = SEARCH_SECONDS
) -> Read:
    """Read and try a grammar within a limit of processor seconds. The time of forks counts only in a search.

    Raises InvalidRequestError if the grammar is refused or takes too much time or memory.
    """
    try:
        with limited(seconds):
            source = partial(source_of, name, library)
            return read_grammar(grammar, ENFORCED[name], source, try_, search_seconds)
    except OverLimitError:
        raise InvalidRequestError(f"{grammar.where}: takes more than {seconds:g} s to read: make it smaller") from None
    except MemoryError:
        raise InvalidRequestError(f"{grammar.where}: takes too much memory: make it smaller") from None


READ_SECONDS = 4.0  # processor seconds for one grammar
ANSWER_SECONDS = 10.0  # processor seconds for all tools of a request and the text around them
_WAIT_SECONDS = 120.0  # for a process that waits for a free processor


@cache
def trial_lane(backend: str) -> Lane:
    """Return the processes that try grammars for a library.

    Their program, in a package above this one, also prepares tools.
    """
    program = Path(infer.__file__).parent / "engine/requests/preparing_child.py"
    return Lane(program, backend, str(MEMORY_BYTES), str(READ_SECONDS), str(ANSWER_SECONDS))


def ask_trial(backend: str, question: Any, name: str) -> dict[str, Any]:
    """Return the answer of a trial process. Messages use `name` for the question.

    Raises InvalidRequestError, or SchemaError if the place in a schema is known.
    """
    try:
        answer: dict[str, Any] = trial_lane(backend).ask(question, _WAIT_SECONDS)
    except TimeoutError:
        raise InvalidRequestError(f"{name}: not compiled within {_WAIT_SECONDS:g} s: try again later") from None
    except ChildError as error:
        is_slow = error.signal == signal.SIGPROF
        problem = "takes too long to compile: make it smaller" if is_slow else "too large or too deep to compile"
        raise InvalidRequestError(f"{name}: {problem}") from None
    if "problem" in answer:
        raise SchemaError(answer["error"], answer["pointer"], answer["problem"], param=answer["param"])
    if "error" in answer:
        raise InvalidRequestError(answer["error"], param=answer.get("param"))
    return answer


def try_grammar(backend: str, grammar: Grammar) -> Read:
    """Return the source that the library compiled. Raises InvalidRequestError that points into the grammar."""
    answer = ask_trial(backend, [grammar.kind, grammar.text], grammar.kind)
    return Read(Source(*answer["source"]), tuple(answer["warnings"]))
