"""The format of an answer as plain JSON, for the process that prepares its grammar, and the reverse."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from infer.text.toolcalls.answer_format import AnswerFormat, Calls
from infer.text.toolcalls.formats import ReasoningFormat, ToolCallFormat
from infer.text.toolcalls.tools import Tool


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
