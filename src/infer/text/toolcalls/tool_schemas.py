"""The tools of an answer with schemas that a grammar can enforce: strict ones are unchanged, others are loosened."""

import json
from dataclasses import replace
from typing import final

from infer.errors import InvalidRequestError
from infer.system.sized_cache import SizedCache
from infer.text.toolcalls.answer_format import AnswerFormat
from infer.text.toolcalls.answer_grammar import check_tool
from infer.text.toolcalls.argument_grammar import Rules
from infer.text.toolcalls.loosening import Allowance, Loosened, Loosening, anything_for
from infer.text.toolcalls.tools import Tool

MAX_KNOWN_BYTES = 16 << 20
_BYTES_PER_CHARACTER = 12  # memory of Python objects per character of a schema as JSON


@final
class ToolSchemas:
    """Cache of loosened schemas, because an agent sends the same tools in every turn."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._known = SizedCache[Loosened](MAX_KNOWN_BYTES)

    def enforceable(self, form: AnswerFormat) -> AnswerFormat:
        """Return the format with tools whose schemas can be enforced, and warnings for each part left out.

        Raises InvalidRequestError if tools cannot be enforced at all.
        """
        calls = form.calls
        if calls is None or calls.kind == "none":
            return form
        allowance, found = Allowance(), dict[int, Loosened]()
        texts = {index: json.dumps(tool.parameters) for index, tool in enumerate(calls.tools) if not tool.is_strict}
        for index in sorted(texts, key=lambda each: len(texts[each])):  # the bad schema is often a large one
            found[index] = self._loosened(form, calls.tools[index], texts[index], allowance)
        tools = tuple(
            replace(tool, parameters=found[index].parameters) if index in found else tool
            for index, tool in enumerate(calls.tools)
        )
        warnings = [
            warning
            for index, tool in enumerate(calls.tools)
            for warning in (*tool.warnings, *(found[index].warnings if index in found else ()))
        ]
        return replace(form, calls=replace(calls, tools=tools), warnings=tuple(warnings))

    def loosest(self, form: AnswerFormat, error: InvalidRequestError) -> AnswerFormat | None:
        """Return the format with tools that may have any arguments, or None if there is nothing to loosen.

        It is for schemas that are too large only in combination.
        """
        calls = form.calls
        if calls is None or calls.kind == "none" or all(tool.is_strict for tool in calls.tools):
            return None
        is_json = calls.form.syntax == "json"
        tools = tuple(
            tool if tool.is_strict else replace(tool, parameters=anything_for(tool.parameters, is_json=is_json))
            for tool in calls.tools
        )
        names = ", ".join(tool.name for tool in calls.tools if not tool.is_strict)
        warning = f"tools {names:.200}: their schemas are left out, their arguments may be any object: {error!s:.200}"
        return replace(form, calls=replace(calls, tools=tools), warnings=(*form.warnings, warning))

    def _loosened(self, form: AnswerFormat, tool: Tool, text: str, allowance: Allowance) -> Loosened:
        assert form.calls is not None
        key = form.calls.form, tool.name, text
        if (found := self._known.get(key)) is not None:
            return found
        is_json = form.calls.form.syntax == "json"
        if allowance.seconds <= 0:  # not cached, because the next request has new time for it
            warning = f"tool {tool.name!r}: its schema is left out, because other tools used up the time to compile it"
            return Loosened(anything_for(tool.parameters, is_json=is_json), (warning,))
        loosening = Loosening(
            lambda schema: check_tool(form, replace(tool, parameters=schema), self._rules),
            self._rules.unreadable_parts,
            allowance,
            is_json=is_json,
        )
        found = loosening.run(tool.name, tool.parameters)
        self._known.put(key, found, _BYTES_PER_CHARACTER * (len(text) + len(json.dumps(found))))
        return found
