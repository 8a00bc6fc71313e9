"""The grammar of an answer with tools or reasoning, made by a process that reads, loosens and tries the schemas.

The server's own process only writes the question and compiles the source that was tried. Neither runs Python code for
each part of a schema.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any, final

from infer.engine.prepare.preparing_child import format_to_json
from infer.errors import InvalidRequestError
from infer.system.sized_cache import SizedCache
from infer.text.grammar.grammar import Grammar
from infer.text.grammar.grammar_compiler import Compiler
from infer.text.grammar.libraries import ask_trial
from infer.text.toolcalls.answer_format import AnswerFormat
from infer.text.toolcalls.tools import Tool, anything_for

MAX_PREPARED_BYTES = 64 << 20
_LEAST_BYTES = 500
_BYTES_PER_CHARACTER = 12  # memory of Python objects per character of schemas and warnings as JSON


@final
class AnswerGrammars:
    """Prepares answers and caches them, because an agent sends the same tools in every turn. For any thread."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._kept = SizedCache[dict[str, Any]](MAX_PREPARED_BYTES)

    def prepare(self, form: AnswerFormat, answer: Grammar | None) -> tuple[AnswerFormat, str | None]:
        """Return a format whose tools can be enforced, and the source of its grammar, or None if it needs none.

        `answer` is the request's own grammar for the text. Raises InvalidRequestError.
        """
        has_calls = form.calls is not None
        if not has_calls and not (form.reasoning and (answer is not None or form.budget is not None)):
            return form, None
        self._compiler.check_answers()
        form = _as_json(form)
        question = {"format": format_to_json(form), "answer": answer}
        key = blake2b(json.dumps(question).encode(), digest_size=32).digest()
        name, backend = "tools" if has_calls else "the grammar of the answer", self._compiler.backend
        prepared = self._kept.get_or_make(key, lambda: ask_trial(backend, question, name), _num_bytes)
        return _with(form, prepared), prepared["source"]


def _num_bytes(prepared: Mapping[str, Any]) -> int:
    size = len(json.dumps([prepared["tools"], prepared["warnings"]]))
    return _LEAST_BYTES + len(prepared["source"].encode()) + _BYTES_PER_CHARACTER * size


def _with(form: AnswerFormat, prepared: Mapping[str, Any]) -> AnswerFormat:
    """Return the format with the changed tools and the warnings."""
    form = replace(form, warnings=tuple(prepared["warnings"]))
    if form.calls is None:
        return form
    changed = dict(prepared["tools"])  # parameters, by the tools' indices
    tools = (
        replace(tool, parameters=changed.get(index, tool.parameters)) for index, tool in enumerate(form.calls.tools)
    )
    return replace(form, calls=replace(form.calls, tools=tuple(tools)))


def _as_json(form: AnswerFormat) -> AnswerFormat:
    """Return the format without schemas that are not JSON, which Python programs may give.

    Raises InvalidRequestError for such schemas of strict tools.
    """
    if form.calls is None:
        return form
    is_json = form.calls.form.syntax == "json"
    tools = tuple(_tool_as_json(index, tool, is_json) for index, tool in enumerate(form.calls.tools))
    return replace(form, calls=replace(form.calls, tools=tools))


def _tool_as_json(index: int, tool: Tool, is_json: bool) -> Tool:
    try:
        json.dumps(tool.parameters)
    except (TypeError, ValueError, RecursionError) as error:
        problem = f"it is not JSON ({type(error).__name__})"
        if tool.is_strict:
            raise InvalidRequestError(f"tools[{index}] ({tool.name}): its schema cannot be used: {problem}") from None
        said = f"tool {tool.name!r}: its whole schema is left out, so its arguments may be any object: {problem}"
        return replace(tool, parameters=anything_for(tool.parameters, is_json=is_json), warnings=(*tool.warnings, said))
    return tool
