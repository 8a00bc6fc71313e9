"""The server's own process takes the same number of steps for small and large schemas of a request."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import llguidance
import pytest

from byte_tokenizer import write_byte_tokenizer
from extent import IS_WHOLE, usual_or_all
from infer import LLM
from infer.engine.prepare.answer import AnswerGrammars
from infer.engine.prepare.tool_rules import ToolRules
from infer.text.grammar.grammar import Grammar
from infer.text.grammar.grammar_compiler import Compiler, make_compiler
from infer.text.grammar.trial import trial_lane
from infer.text.templates.template_child import MAX_COMPILED_CHARACTERS, Renderer
from infer.text.tokenizer import Tokenizer
from infer.text.toolcalls.answer_format import AnswerFormat, Calls
from infer.text.toolcalls.formats import FORMATS
from infer.text.toolcalls.tool_schemas import ToolSchemas
from infer.text.toolcalls.tools import read_tools
from refusals import check_refused
from test_session import make_model

TEXT = {"type": "string"}
SYNTAXES = ["hermes", "qwen3-coder", "pythonic", "gemma-4"]  # one format of each syntax


def names(count: int) -> list[str]:
    return [f"p{index}" for index in range(count)]


def all_required(count: int) -> dict[str, Any]:
    return {"properties": dict.fromkeys(names(count), TEXT), "required": names(count)}


def much_that_is_shared(count: int) -> dict[str, Any]:
    """Return a schema. Formats without JSON read each of its properties together with all definitions."""
    definitions = {name: {**TEXT, "pattern": "a" * 50} for name in names(count)}
    return {"$defs": definitions, "properties": {name: {"$ref": "#/$defs/p0"} for name in names(count)}}


def many_faults(count: int) -> dict[str, Any]:
    """Return a schema in which each keyword is checked, and some are removed by trial."""
    faults = [{**TEXT, "pattern": "(?=x)"}, {"type": "array", "items": TEXT, "uniqueItems": True}]
    return {"properties": {name: faults[index % 2] for index, name in enumerate(names(count))}}


def nested_choices(count: int) -> dict[str, Any]:
    """Return nested `not` and `oneOf`, in each of which references are searched."""
    found: dict[str, Any] = {"pattern": "(?=x)"}
    for _ in range(9):
        found = {"not": {"oneOf": [found, {"$ref": "#/$defs/a"}, *[{"title": "x" * 50}] * (count // 9)]}}
    return {"$defs": {"a": {"pattern": "(?=y)"}}, "properties": {"a": found}}


HOSTILE = {each.__name__: each for each in (all_required, much_that_is_shared, many_faults, nested_choices)}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return make_compiler(Tokenizer.from_folder(folder))


@pytest.fixture(scope="module", autouse=True)
def short_of_time() -> Iterator[None]:
    """Set one second as the limit for compiling all tools of a request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infer.text.grammar.trial.ANSWER_SECONDS", 1.0)
        trial_lane.cache_clear()
        yield
    trial_lane.cache_clear()


def format_of(*schemas: dict[str, Any], name: str = "hermes", is_strict: bool = False) -> AnswerFormat:
    tools = [{"name": f"f{index}", "parameters": schema, "strict": is_strict} for index, schema in enumerate(schemas)]
    return AnswerFormat(Calls(FORMATS[name], read_tools(tools), "required"))


def counted_calls(compiler: Compiler, form: AnswerFormat) -> int:
    """Return the number of Python's function calls in this thread, to prepare and to compile."""
    num_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        found = AnswerGrammars(compiler).prepare(form, None)
        compiler.compile_answer(found.source)
    finally:
        sys.setprofile(None)
    return num_calls


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("name", SYNTAXES if IS_WHOLE else ["hermes", "qwen3-coder"])
@pytest.mark.parametrize("hostile", HOSTILE)
def test_steps_of_the_server_s_process_do_not_grow_with_a_schema(name: str, hostile: str, compiler: Compiler) -> None:
    small, large = HOSTILE[hostile](9), HOSTILE[hostile](usual_or_all(2_000, 6_000))
    assert len(json.dumps(large)) > 50 * len(json.dumps(small))
    usual = counted_calls(compiler, format_of(small, name=name))
    assert counted_calls(compiler, format_of(large, name=name)) < 2 * usual + 500


@pytest.mark.slow
def test_tools_that_take_too_long_together_lose_their_schemas(compiler: Compiler) -> None:
    slow = much_that_is_shared(2_000)
    found = AnswerGrammars(compiler).prepare(format_of(slow, {"properties": {"a": TEXT}}, name="qwen3-coder"), None)
    assert [tool.parameters.get("additionalProperties") for tool in found.form.calls.tools] == [True, True]
    (said,) = found.form.warnings
    assert re.search("tools f0, f1: their schemas are left out.*take more than 1 s to compile: give fewer or sm", said)
    strict = format_of(slow, name="qwen3-coder", is_strict=True)
    message = "take more than 1 s to compile: give fewer or smaller ones"
    check_refused(lambda: AnswerGrammars(compiler).prepare(strict, None), message)


def test_tools_of_one_name_are_written_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, a long schema was written again for each further tool of the same name."""
    written, write = list[str](), json.dumps

    def noted(*given: Any, **options: Any) -> str:
        written.append(write(*given, **options))
        return written[-1]

    monkeypatch.setattr("infer.text.toolcalls.tools.json.dumps", noted)
    long = {"type": "object", "properties": {"a": {**TEXT, "description": "x" * 100_000}}}
    assert len(read_tools([{"name": "f", "parameters": long}] * 100)) == 1
    assert sum(map(len, written)) < 102 * len(write(long))


# Caches


def test_repeated_preparations_are_asked_for_once_up_to_a_limit(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Mock(return_value={"source": "x" * 10_000, "tools": [], "warnings": [], "ignored": []})
    monkeypatch.setattr("infer.engine.prepare.answer.ask_trial", asked)
    monkeypatch.setattr("infer.engine.prepare.answer.MAX_PREPARED_BYTES", 100_000)
    grammars = AnswerGrammars(compiler)
    forms = [format_of({"properties": {name: TEXT}}) for name in names(30)]
    for form in [*forms, forms[-1], forms[-9], forms[0]]:
        grammars.prepare(form, None)
    assert asked.call_count == 31
    assert grammars._kept._num_bytes <= 100_000


def test_no_cache_keeps_the_text_of_a_schema_as_its_key(compiler: Compiler) -> None:
    """Keywords that assert nothing are not in the source, whose length is the size of a compiled grammar."""
    long = {"type": "integer", "description": "x" * 500_000}
    compiler.compile(Grammar("json_schema", json.dumps(long)))
    grammars = AnswerGrammars(compiler)
    found = grammars.prepare(format_of({"properties": {"a": long}}), None)
    compiler.compile_answer(found.source)
    keys = {*compiler._compiled._kept, *grammars._kept._kept}
    assert {(type(key), len(key)) for key in keys} == {(bytes, 32)}


def test_the_caches_of_the_preparing_process_are_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.engine.prepare.tool_rules.MAX_RULE_BYTES", 20_000)
    monkeypatch.setattr("infer.text.toolcalls.tool_schemas.MAX_KNOWN_BYTES", 200_000)
    rules = ToolRules(llguidance, lambda source: "", 4.0)
    rules.begin(60.0)
    schemas = ToolSchemas(rules)
    for name in names(30):
        schemas.enforceable(format_of({"properties": {name: {**TEXT, "description": "x" * 3_000}}}))
    for kept, most, num_bytes in ((schemas._known, 5, 200_000), (rules._parts, 6, 20_000)):
        assert 1 <= len(kept._kept) <= most
        assert kept._num_bytes <= num_bytes


def test_templates_are_cached_up_to_a_number_of_characters() -> None:
    renderer = Renderer()
    for index in range(6):
        source = "{# " + "x" * (MAX_COMPILED_CHARACTERS // 3) + f" #}}{index}"
        assert renderer.answer(source, {}, 10) == {"text": str(index)}
    assert len(renderer._compiled) == 2


@pytest.mark.slow
def test_a_tokenizer_forgets_the_templates_used_longest_ago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.engine.requests.conversation.MAX_TEMPLATE_BYTES", 20_000)
    with LLM(make_model(tmp_path)) as llm:
        for index in range(6):
            template = "{# " + "x" * 2_000 + f" #}}{index}" + "{{ messages[-1].content }}"
            asked: dict[str, Any] = {"tools": [{"name": "f"}], "chat_template": template}
            llm.chat([{"role": "user", "content": "a"}], max_new_tokens=1, **asked)
        assert 1 <= len(llm._host.requests._probes._found._kept) <= 2
