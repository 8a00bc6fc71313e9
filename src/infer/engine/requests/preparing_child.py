"""The program of a child process that reads grammars and tools, so that hangs, crashes and lack of memory do no harm.

It reads lines of JSON: [kind, text] is a grammar, {"format": …, "answer": …} the format of an answer with tools. It
answers each with a line of JSON: {"source": …} with its facts, or {"error": …, "pointer": …, "problem": …}. It imports
neither numpy nor a tokenizer, so that it starts quickly. Schemas and patterns of tools become expressions of Lark. Each
is read and tried within a limit of processor time, and loosened if necessary. Then the whole grammar of the answer is
tried.
"""

import importlib
import json
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

from infer.errors import AnswerGrammarError, InvalidRequestError, SchemaError, about
from infer.system.child_process import OverLimitError, limited, watch_limits
from infer.text.grammar.grammar import Grammar, Source
from infer.text.grammar.json_schema import pointed
from infer.text.grammar.libraries import TRIES, llguidance_try, read_within
from infer.text.toolcalls.answer_format import AnswerFormat, Calls
from infer.text.toolcalls.answer_grammar import answer_lark, enforceable, loosest
from infer.text.toolcalls.argument_grammar import ToolRules
from infer.text.toolcalls.formats import ReasoningFormat, ToolCallFormat
from infer.text.toolcalls.tools import Tool

_STACK_BYTES = 4 << 20  # half of a thread's stack, so that a grammar that passes here also passes there
_NICENESS = 10
LOOSEST_SECONDS = 2.0  # processor seconds, for tools without their schemas
_NUM_BYTES, _NUM_MARKS = 256, 64


def format_to_json(form: AnswerFormat) -> dict[str, Any]:
    """Return the part of a format on which its grammar depends. The descriptions of tools are left out."""
    calls, reasoning = form.calls, form.reasoning
    tools = () if calls is None else calls.tools
    shown = [[tool.name, tool.parameters, tool.is_strict, tool.warnings] for tool in tools]
    return {
        "calls": None if calls is None else vars(calls) | {"form": vars(calls.form), "tools": shown},
        "reasoning": None if reasoning is None else vars(reasoning),
        "is_open": form.is_open,
        "budget": form.budget,
        "marks": list(form.marks.items()),
    }


def format_of_json(given: dict[str, Any]) -> AnswerFormat:
    """Return the format that `format_to_json` wrote."""
    calls, reasoning = given["calls"], given["reasoning"]
    if calls is not None:
        tools = tuple(Tool(name, "", schema, strict, tuple(said)) for name, schema, strict, said in calls["tools"])
        calls = Calls(**calls | {"form": ToolCallFormat(**calls["form"]), "tools": tools})
    reasoning = None if reasoning is None else ReasoningFormat(**reasoning)
    return AnswerFormat(**given | {"calls": calls, "reasoning": reasoning, "marks": dict(given["marks"])})


@final
class Program:
    """The program. `name` is the grammar library's.

    One limit of seconds is for a grammar, the other for all tools together.
    """

    def __init__(self, name: str, read_seconds: float, answer_seconds: float) -> None:
        self._name, self._read_seconds, self._answer_seconds = name, read_seconds, answer_seconds
        self._library = library = importlib.import_module(name)
        self._try = self._try_answer = TRIES[name](library)  # the second tries grammars that name control tokens
        self._rules = ToolRules(library, self._try, read_seconds)
        if name == "llguidance":
            self._try_answer = llguidance_try(library, library.LLTokenizer(library.TokenizerWrapper(_Marks())))

    def answer(self, question: Any) -> dict[str, Any]:
        """Return the line of JSON that answers a question, as a dict: the source and its facts, or an error."""
        try:
            return self._prepare(question) if isinstance(question, dict) else self._read(Grammar(*question))
        except SchemaError as error:
            return {"error": error.args[0], "pointer": error.pointer, "problem": error.problem, "param": error.param}
        except InvalidRequestError as error:
            return {"error": error.args[0], "param": error.param}
        except OverLimitError:
            return {"error": "tools: take too long to compile, even without their schemas: give fewer tools"}
        except MemoryError:
            return {"error": "tools: take too much memory: give fewer or smaller tools"}

    def _read(self, grammar: Grammar) -> dict[str, Any]:
        read = read_within(self._library, self._name, self._try, grammar, self._read_seconds)
        return {"source": read.source, "warnings": read.warnings}

    def _prepare(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the source, the changed tools, and warnings. Raises InvalidRequestError.

        After the seconds for an answer, or if the tools are too large only in combination, the schemas of tools that
        are not strict are left out.
        """
        form, seconds = format_of_json(question["format"]), self._answer_seconds
        answer = None if question["answer"] is None else Grammar(*question["answer"])
        enforced = form
        try:
            with self._limited(seconds):
                enforced = enforceable(form, self._rules)
                return self._prepared(form, enforced, answer)
        except (AnswerGrammarError, OverLimitError) as late:
            problem = f"they take more than {seconds:g} s to compile: give fewer or smaller ones"
            error = late if isinstance(late, AnswerGrammarError) else InvalidRequestError(f"tools: {problem}")
            looser = loosest(enforced, error)
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

    def _prepared(self, given: AnswerFormat, enforced: AnswerFormat, answer: Grammar | None) -> dict[str, Any]:
        source, changed = self._source(enforced, answer), list[tuple[int, Mapping[str, Any]]]()
        if given.calls is not None and enforced.calls is not None:
            pairs = zip(given.calls.tools, enforced.calls.tools, strict=True)
            changed = [(index, now.parameters) for index, (then, now) in enumerate(pairs) if now != then]
        return {"source": source, "tools": changed, "warnings": [*enforced.warnings, *self._rules.warnings]}

    def _source(self, form: AnswerFormat, answer: Grammar | None) -> str:
        """Return the source of an answer's grammar, after a trial of it.

        The trial has other ids of control tokens, because the vocabulary is not known here.
        """
        self._rules.warnings.clear()
        marks = {_NUM_BYTES + 1 + index: mark for index, mark in enumerate(form.marks.values())}
        if problem := self._try_answer(Source("", self._text(replace(form, marks=marks), answer))):
            raise AnswerGrammarError(f"the grammar of the answer cannot be compiled: {pointed(problem, 'tools')}")
        return self._text(form, answer)

    def _text(self, form: AnswerFormat, answer: Grammar | None) -> str:
        lark = answer_lark(form, self._rules, is_held=answer is not None)
        parts: list[Mapping[str, Any]] = [{"lark_grammar": lark}]
        if answer is not None:
            with about(answer.kind):
                parts.append({**self._rules.part(answer), "name": "answer"})
        return json.dumps({"grammars": parts})


@final
class _Marks:
    """A vocabulary for trials: each byte is a token, and so are some control tokens."""

    bos_token_id, eos_token_id = None, _NUM_BYTES

    def __init__(self) -> None:
        self.special_token_ids = list(range(_NUM_BYTES, _NUM_BYTES + 1 + _NUM_MARKS))
        controls = [b"[%d]" % token_id for token_id in self.special_token_ids]
        self.tokens = [*(bytes([byte]) for byte in range(_NUM_BYTES)), *controls]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode(errors="replace"))


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
