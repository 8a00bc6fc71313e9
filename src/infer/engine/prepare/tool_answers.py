"""The grammar of an answer with tools, or reasoning: schemas are loosened if necessary, and the whole is tried."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

from infer.engine.prepare.answer_text import format_of_json
from infer.engine.prepare.tool_rules import ToolRules
from infer.errors import AnswerGrammarError, InvalidRequestError, about
from infer.system.processes.processor_limit import OverLimitError, limited
from infer.text.grammar.grammar import Grammar, Source
from infer.text.grammar.library_trials import Try, llguidance_try
from infer.text.grammar.reading import pointed
from infer.text.toolcalls.answer_format import AnswerFormat
from infer.text.toolcalls.answer_grammar import answer_lark
from infer.text.toolcalls.tool_schemas import ToolSchemas

LOOSEST_SECONDS = 2.0  # processor seconds, for tools without their schemas
_NUM_BYTES, _NUM_MARKS = 256, 64


@final
class ToolAnswers:
    def __init__(self, library: Any, try_: Try, read_seconds: float) -> None:
        """Begin. `try_` tries grammars that must not name control tokens."""
        self._rules = ToolRules(library, try_, read_seconds)
        self._schemas = ToolSchemas(self._rules)
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
                found = self._schemas.enforceable(form)
                return self._prepared(form, found, answer)
        except (AnswerGrammarError, OverLimitError) as late:
            problem = f"they take more than {seconds:g} s to compile: give fewer or smaller ones"
            error = late if isinstance(late, AnswerGrammarError) else InvalidRequestError(f"tools: {problem}")
            looser = self._schemas.loosest(found, error)
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
                parts.append({**self._rules.part(answer), "name": "answer"})
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
