"""Calls that a model writes as fenced or bare JSON become calls, and any other text arrives whole."""

import json
from typing import Any

import pytest

from cases import cases
from infer.outputs import ToolCallDelta
from infer.text.toolcalls.answer_format import AnswerFormat, Calls
from infer.text.toolcalls.formats import FORMATS
from infer.text.toolcalls.parser import make_parser
from infer.text.toolcalls.tools import Kind, Tool

TOOLS = tuple(Tool(name, "", {"type": "object"}) for name in ("get_weather", "add"))
OSLO = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
ADD = '{"name": "add", "parameters": {"a": [1, {"b": null}]}}'
OSLO_CALL, ADD_CALL = ("get_weather", {"city": "Oslo"}), ("add", {"a": [1, {"b": None}]})
OWN = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


def read(text: str, size: int, *, name: str = "hermes", kind: Kind = "auto", **options: Any) -> Any:
    """Return the text and the calls of an answer that arrives in pieces of this size."""
    is_held = options.pop("is_held", False)
    form = AnswerFormat(Calls(FORMATS[name], TOOLS, kind, **options))
    parser = make_parser(form, str, is_held=is_held)
    parts = [parser.push(text[at : at + size]) for at in range(0, len(text), size)] + [parser.flush()]
    calls = dict[int, tuple[str, str]]()
    for delta in (each for part in parts for each in part.deltas):
        assert isinstance(delta, ToolCallDelta)
        name, arguments = calls.get(delta.index, ("", ""))
        calls[delta.index] = (name + (delta.name or ""), arguments + delta.arguments)
        assert delta.id in (None, str(delta.index))
    assert list(calls) == list(range(len(calls)))
    return "".join(part.text for part in parts), [(name, json.loads(text)) for name, text in calls.values()]


@pytest.mark.parametrize("size", [1, 3, 1000])
@cases(
    "answer text calls",
    (OSLO, "", [OSLO_CALL]),
    (f"```json\n{OSLO}\n```", "", [OSLO_CALL]),
    (f"```\n{OSLO}", "", [OSLO_CALL]),
    (f"I look.\n\n```json\n{OSLO}\n```", "I look.", [OSLO_CALL]),
    (f"I look.\n{OSLO}", "I look.", [OSLO_CALL]),
    (f"```json\n{OSLO}\n{ADD}\n```", "", [OSLO_CALL, ADD_CALL]),
    (f"[{OSLO}, {ADD}]", "", [OSLO_CALL, ADD_CALL]),
    (f"{OSLO}\n{ADD}", "", [OSLO_CALL, ADD_CALL]),
    (f"```json\n{OSLO}\n```\n```json\n{ADD}\n```", "", [OSLO_CALL, ADD_CALL]),
    (f"{OSLO}\nDone.", "\nDone.", [OSLO_CALL]),
    (f"{OSLO}\n{OWN}", "", [OSLO_CALL, ("add", {})]),
    (OWN, "", [("add", {})]),
    ('{"name": "add", "arguments": {"a": -1.5e-3, "b": 2.25}}', "", [("add", {"a": -1.5e-3, "b": 2.25})]),
)
def test_fenced_and_bare_calls_of_known_tools_arrive(answer: str, text: str, calls: Any, size: int) -> None:
    assert read(answer, size) == (text, calls)


TEXTS = [
    '{"name": "unknown", "arguments": {}}',
    '{"name": "get_weather", "arguments": "Oslo"}',
    '{"name": "get_weather", "arguments": {}, "more": 1}',
    '{"name": "get_weather", "arguments": {"city": "Os',
    '{"name": "get_weather", oops}',
    '{"arguments": {}, "name": []}',
    '{"name": "add", "arguments": {"a": "\\ud800"}}',
    '{"name": "add", "arguments": {"a": 1e999}}',
    *('{"city": "Oslo"}', f"See {OSLO}", "``", "  two\n\n lines  \n", "```python\nprint(1)\n```\nIt prints 1.\n"),
    f"```json\n{OSLO}\nand more\n```",
    '```json\n{"name": "unknown", "arguments": {}}\n```',
    '{"name": "add", "arguments": ' + "[" * 5000,
]


@pytest.mark.parametrize("size", [1, 5, 10_000])
@pytest.mark.parametrize("answer", TEXTS)
def test_text_that_is_no_call_arrives_whole(answer: str, size: int) -> None:
    assert read(answer, size) == (answer, [])


@pytest.mark.parametrize("options", [{"kind": "none"}, {"is_held": True}])
def test_json_is_text_if_calls_are_off_or_the_request_asks_for_json(options: Any) -> None:
    assert read(f"```json\n{OSLO}\n```", 4, **options) == (f"```json\n{OSLO}\n```", [])


def test_one_call_is_read_if_calls_are_not_parallel() -> None:
    text, calls = read(f"{OSLO}\n{ADD}", 2, is_parallel=False)
    assert (text.strip(), calls) == (ADD, [OSLO_CALL])
