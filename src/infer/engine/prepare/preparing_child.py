"""Read grammars and tools in a process where hangs, crashes and lack of memory do no harm. `trial` runs this program.

It reads lines of JSON: [kind, text] is a grammar, {"format": …, "answer": …} the format of an answer with tools. It
answers each with a line of JSON: {"source": …} with its facts, or {"error": …, "pointer": …, "problem": …}. It imports
neither numpy nor a tokenizer, so that it starts quickly.

Schemas and patterns of tools become expressions of Lark. Each is read and tried within a limit of processor time, and
loosened if necessary. Then the whole grammar of the answer is tried.
"""

import importlib
import json
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple, final

from infer.errors import AnswerGrammarError, InvalidRequestError, SchemaError, about
from infer.system.processor_limit import LateError, OverLimitError, limited, processor_seconds, watch_limits
from infer.system.sized_cache import SizedCache
from infer.text.grammar.grammar import Grammar, Source
from infer.text.grammar.json_schema import pointed, rewrite_schema
from infer.text.grammar.libraries import TRIES, Try, llguidance_try, read_within
from infer.text.grammar.patterns import check_pattern, translated, without_anchors
from infer.text.grammar.schema_rewriter import Omissions
from infer.text.toolcalls.answer_format import AnswerFormat, Calls
from infer.text.toolcalls.answer_grammar import answer_lark, enforceable, loosest
from infer.text.toolcalls.formats import ReasoningFormat, ToolCallFormat
from infer.text.toolcalls.tools import Tool

_STACK_BYTES = 4 << 20  # half of a thread's stack, so that a grammar that passes here also passes there
_NICENESS = 10
LOOSEST_SECONDS = 2.0  # processor seconds, for tools without their schemas
MAX_RULE_BYTES = 16 << 20
SEARCH_SECONDS = 1.0  # processor seconds for the searches in one tool
ALL_SEARCH_SECONDS = 4.0  # processor seconds for the searches in all tools of a request
_NUM_BYTES, _NUM_MARKS = 256, 64
_LIBRARY = "llguidance"


def format_to_json(form: AnswerFormat) -> dict[str, Any]:
    """Return the part of a format on which its grammar depends. The descriptions of tools are left out."""
    calls = None
    if form.calls is not None:
        calls = {
            "form": asdict(form.calls.form),
            "tools": [[tool.name, tool.parameters, tool.is_strict, tool.warnings] for tool in form.calls.tools],
            "kind": form.calls.kind,
            "is_parallel": form.calls.is_parallel,
        }
    return {
        "calls": calls,
        "reasoning": None if form.reasoning is None else asdict(form.reasoning),
        "is_open": form.is_open,
        "budget": form.budget,
        "marks": list(form.marks.items()),
    }


def format_of_json(given: Mapping[str, Any]) -> AnswerFormat:
    """Return the format that `format_to_json` wrote."""
    calls, reasoning = given["calls"], given["reasoning"]
    if calls is not None:
        tools = (
            Tool(name, "", parameters, is_strict, tuple(warnings))
            for name, parameters, is_strict, warnings in calls["tools"]
        )
        calls = Calls(ToolCallFormat(**calls["form"]), tuple(tools), calls["kind"], calls["is_parallel"])
    return AnswerFormat(
        calls,
        None if reasoning is None else ReasoningFormat(**reasoning),
        is_open=given["is_open"],
        budget=given["budget"],
        marks=dict(given["marks"]),
    )


class _Part(NamedTuple):
    """One of several grammars of llguidance, and what of its schema is not enforced."""

    grammar: Mapping[str, Any]
    warnings: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]


@final
class ToolRules:
    """The `Rules` of `argument_grammar`, for one library in this process. Results are cached, up to a size in bytes."""

    def __init__(self, library: Any, try_: Try, read_seconds: float) -> None:
        """Begin. `read_seconds` limits one schema. `try_` compiles a source and returns the problem, or ""."""
        self._library, self._try, self._read_seconds = library, try_, read_seconds
        self._parts = SizedCache[_Part](MAX_RULE_BYTES)
        self._ends_at = 0.0
        self._tool_seconds = self._all_seconds = 0.0  # that are left for searches
        self.warnings: dict[str, None] = {}  # warnings of all grammars

    def begin(self, seconds: float) -> None:
        """From now on, let the first trial after `seconds` of processor time (with forks) raise LateError."""
        self._ends_at = processor_seconds() + seconds
        self._tool_seconds = self._all_seconds = ALL_SEARCH_SECONDS

    def begin_tool(self) -> bool:
        """Begin with the next tool. Return False if searches in the tools of the request have used up their time."""
        self._tool_seconds = min(SEARCH_SECONDS, self._all_seconds)
        return self._all_seconds > 0

    def part(self, grammar: Grammar) -> _Part:
        """Return a checked and tried grammar. Raises InvalidRequestError."""
        if (found := self._parts.get(grammar)) is None:
            found = self._read(grammar)
            texts = [*found.warnings, *(text for each in found.left_out for text in each)]
            num_bytes = len(grammar.text) + len(json.dumps(found.grammar)) + sum(map(len, texts))
            self._parts.put(grammar, found, num_bytes)
        self.warnings |= dict.fromkeys(found.warnings)
        return found

    def json_rule(self, schema: Any) -> str:
        """Return the rule of a schema that is enforced whole. Raises InvalidRequestError."""
        return _rule(self.part(Grammar("json_schema", json.dumps(schema))))

    def loose_rule(self, schema: Any, *, is_argument: bool) -> tuple[str, Sequence[tuple[str, str]]]:
        """Return the rule of a schema, and the parts that are left out. Raises InvalidRequestError."""
        part = self.part(Grammar("argument_schema" if is_argument else "tool_schema", json.dumps(schema)))
        return _rule(part), part.left_out

    def left_out_of(self, schema: Any) -> Mapping[str, str]:
        """Return the reasons of the parts of a schema that no grammar can enforce, by pointer."""
        omissions = Omissions(is_of_tool=True)
        rewrite_schema(json.dumps(schema), "json_schema", omissions)
        return omissions.noted

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
        read = read_within(self._library, _LIBRARY, self._tried, grammar, self._read_seconds, self._tool_seconds)
        text = read.source.text
        part = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
        return _Part(part, read.warnings, read.left_out)

    def _tried(self, source: Source) -> str:
        """Try a source, and count the time if it has a problem."""
        begin = processor_seconds()
        problem = self._try(source)
        if problem:
            spent = processor_seconds() - begin
            self._tool_seconds, self._all_seconds = self._tool_seconds - spent, self._all_seconds - spent
        return problem


def _rule(part: _Part) -> str:
    return f"%json {json.dumps(part.grammar['json_schema'])}"


@final
class ToolAnswers:
    def __init__(self, library: Any, try_: Try, read_seconds: float) -> None:
        """Begin. `try_` tries grammars that must not name control tokens."""
        self._rules = ToolRules(library, try_, read_seconds)
        self._try = llguidance_try(library, library.LLTokenizer(library.TokenizerWrapper(_Marks())))

    def prepare(self, question: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Return the source, the changed tools, and warnings. Raises InvalidRequestError.

        After `seconds` of processor time, or if the tools are too large only in combination, the schemas of tools that
        are not strict are left out.
        """
        form = format_of_json(question["format"])
        answer = None if question["answer"] is None else Grammar(*question["answer"])
        found = form
        try:
            with self._limited(seconds):
                found = enforceable(form, self._rules, self._rules.begin_tool)
                return self._prepared(form, found, answer)
        except (AnswerGrammarError, OverLimitError) as late:
            problem = f"they take more than {seconds:g} s to compile: give fewer or smaller ones"
            error = late if isinstance(late, AnswerGrammarError) else InvalidRequestError(f"tools: {problem}")
            looser = loosest(found, error)
            if looser is None:
                raise error from None
        with self._limited(LOOSEST_SECONDS):
            return self._prepared(form, looser, answer)

    @contextmanager
    def _limited(self, seconds: float) -> Iterator[None]:
        """Raise OverLimitError if the block takes longer, including the forks of its trials."""
        self._rules.begin(seconds)
        with limited(seconds):
            yield

    def _prepared(self, given: AnswerFormat, found: AnswerFormat, answer: Grammar | None) -> dict[str, Any]:
        source, changed = self._source(found, answer), list[tuple[int, Mapping[str, Any]]]()
        if given.calls is not None and found.calls is not None:
            pairs = zip(given.calls.tools, found.calls.tools, strict=True)
            changed = [(index, now.parameters) for index, (then, now) in enumerate(pairs) if now != then]
        return {"source": source, "tools": changed, "warnings": [*found.warnings, *self._rules.warnings]}

    def _source(self, form: AnswerFormat, answer: Grammar | None) -> str:
        """Return the source. It is tried with other ids of control tokens, because the vocabulary is not known here."""
        self._rules.warnings.clear()
        marks = {_NUM_BYTES + 1 + index: mark for index, mark in enumerate(form.marks.values())}
        if problem := self._try(Source("", self._text(replace(form, marks=marks), answer))):
            raise AnswerGrammarError(f"the grammar of the answer cannot be compiled: {pointed(problem, 'tools')}")
        return self._text(form, answer)

    def _text(self, form: AnswerFormat, answer: Grammar | None) -> str:
        lark = answer_lark(form, self._rules, is_held=answer is not None)
        parts: list[Mapping[str, Any]] = [{"lark_grammar": lark}]
        if answer is not None:
            with about(answer.kind):
                parts.append({**self._rules.part(answer).grammar, "name": "answer"})
        return json.dumps({"grammars": parts})


@final
class _Marks:
    """A vocabulary of the bytes and of some control tokens."""

    bos_token_id, eos_token_id = None, _NUM_BYTES

    def __init__(self) -> None:
        self.special_token_ids = list(range(_NUM_BYTES, _NUM_BYTES + 1 + _NUM_MARKS))
        controls = [b"[%d]" % token_id for token_id in self.special_token_ids]
        self.tokens = [*(bytes([byte]) for byte in range(_NUM_BYTES)), *controls]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode(errors="replace"))


def answered(prepare: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `prepare`, or its error."""
    try:
        return prepare()
    except SchemaError as error:
        return {"error": error.args[0], "pointer": error.pointer, "problem": error.problem, "param": error.param}
    except InvalidRequestError as error:
        return {"error": error.args[0], "param": error.param}
    except OverLimitError:
        return {"error": "tools: take too long to compile, even without their schemas: give fewer tools"}
    except MemoryError:
        return {"error": "tools: take too much memory: give fewer or smaller tools"}


@final
class Program:
    """The program. `name` is the library's; the seconds limit one grammar, and all tools of an answer together."""

    def __init__(self, name: str, read_seconds: float, answer_seconds: float) -> None:
        self._name, self._read_seconds, self._answer_seconds = name, read_seconds, answer_seconds
        self._library = importlib.import_module(name)
        self._try = TRIES[name](self._library)
        self._tools = ToolAnswers(self._library, self._try, read_seconds) if name == "llguidance" else None

    def answer(self, question: Any) -> dict[str, Any]:
        if self._tools is not None and isinstance(question, dict):
            return answered(partial(self._tools.prepare, question, self._answer_seconds))
        return answered(partial(self._read, Grammar(*question)))

    def _read(self, grammar: Grammar) -> dict[str, Any]:
        read = read_within(self._library, self._name, self._try, grammar, self._read_seconds)
        return {"source": read.source, "warnings": read.warnings}


def _limit(what: int, count: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (count if hard < 0 else min(count, hard), hard))


def main(name: str, memory_bytes: int, read_seconds: float, answer_seconds: float) -> None:
    _limit(resource.RLIMIT_STACK, _STACK_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    os.nice(_NICENESS)
    program = Program(name, read_seconds, answer_seconds)
    watch_limits()
    _limit(resource.RLIMIT_DATA, memory_bytes)
    print('""', flush=True)
    for line in sys.stdin:
        print(json.dumps(program.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
