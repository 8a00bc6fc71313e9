"""Requests are prepared in few steps of the server, beside long texts, and by a helper process that may die."""

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import llguidance
import pytest

import infer
from byte_tokenizer import write_byte_tokenizer
from extent import IS_WHOLE, usual_or_all
from infer import LLM
from infer.engine.requests.request_maker import FormatPreparer
from infer.system.child_process import Child, ChildError
from infer.text.grammar.grammar import Grammar
from infer.text.grammar.grammar_compiler import Compiler
from infer.text.grammar.libraries import trial_lane
from infer.text.templates.template_child import MAX_COMPILED_CHARACTERS, Renderer
from infer.text.tokenizer import Tokenizer
from infer.text.toolcalls.answer_format import AnswerFormat, Calls
from infer.text.toolcalls.answer_grammar import enforceable
from infer.text.toolcalls.argument_grammar import ToolRules
from infer.text.toolcalls.formats import FORMATS
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
    """Return a schema whose properties refer to one of many definitions."""
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
    return Compiler(Tokenizer.from_folder(folder))


@pytest.fixture(scope="module", autouse=True)
def short_of_time() -> Iterator[None]:
    """Set one second as the limit for compiling all tools of a request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infer.text.grammar.libraries.ANSWER_SECONDS", 1.0)
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
        _, source = FormatPreparer(compiler).prepare(form, None)
        compiler.answer_maker(source)()
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
    slow = {"properties": {name: {"maximum": int(name[1:])} for name in names(999)}, "required": names(999)}
    form, _ = FormatPreparer(compiler).prepare(format_of(slow, {"properties": {"a": TEXT}}, name="qwen3-coder"), None)
    assert [tool.parameters.get("additionalProperties") for tool in form.calls.tools] == [True, True]
    (said,) = form.warnings
    assert re.search("tools f0, f1: their schemas are left out.*take more than 1 s to compile: give fewer or sm", said)
    strict = format_of(slow, name="qwen3-coder", is_strict=True)
    check_refused(lambda: FormatPreparer(compiler).prepare(strict, None), "take more than 1 s to compile: give fewer")


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


def test_equal_preparations_are_asked_once_up_to_a_limit(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Mock(return_value={"source": "x" * 10_000, "tools": [], "warnings": [], "ignored": []})
    monkeypatch.setattr("infer.engine.requests.request_maker.ask_trial", asked)
    monkeypatch.setattr("infer.engine.requests.request_maker.MAX_PREPARED_BYTES", 100_000)
    grammars = FormatPreparer(compiler)
    forms = [format_of({"properties": {name: TEXT}}) for name in names(30)]
    for form in [*forms, forms[-1], forms[-9], forms[0]]:
        grammars.prepare(form, None)
    assert asked.call_count == 31
    assert grammars._kept._num_bytes <= 100_000


def test_no_cache_keeps_the_text_of_a_schema_as_its_key(compiler: Compiler) -> None:
    """Keywords that assert nothing are not in the source, whose length is the size of a compiled grammar."""
    long = {"type": "integer", "description": "x" * 500_000}
    compiler.compile(Grammar("json_schema", json.dumps(long)))
    grammars = FormatPreparer(compiler)
    compiler.answer_maker(grammars.prepare(format_of({"properties": {"a": long}}), None)[1])()
    keys = {*compiler._compiled._kept, *grammars._kept._kept}
    assert {(type(key), len(key)) for key in keys} == {(bytes, 32)}


def test_the_cache_of_the_preparing_process_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.text.toolcalls.argument_grammar.MAX_RULE_BYTES", 200_000)
    rules = ToolRules(llguidance, lambda source: "", 4.0)
    rules.begin(60.0)
    for name in names(30):
        enforceable(format_of({"properties": {name: {**TEXT, "description": "x" * 3_000}}}), rules)
    assert 1 <= len(rules._parts._kept) <= 6
    assert rules._parts._num_bytes <= 200_000


def test_templates_are_cached_up_to_a_number_of_characters() -> None:
    renderer = Renderer()
    for index in range(6):
        source = "{# " + "x" * (MAX_COMPILED_CHARACTERS // 3) + f" #}}{index}"
        assert renderer.answer(source, {}, 10) == {"text": str(index)}
    assert len(renderer._compiled) == 2


@pytest.mark.slow
def test_a_tokenizer_forgets_the_templates_used_longest_ago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.engine.requests.prompt_encoding.MAX_TEMPLATE_BYTES", 20_000)
    with LLM(make_model(tmp_path)) as llm:
        for index in range(6):
            template = "{# " + "x" * 2_000 + f" #}}{index}" + "{{ messages[-1].content }}"
            asked: dict[str, Any] = {"tools": [{"name": "f"}], "chat_template": template}
            llm.chat([{"role": "user", "content": "a"}], max_new_tokens=1, **asked)
        assert 1 <= len(llm._host.requests._probes._formats._kept) <= 2


# The helper process


PROGRAM = """
import json, os, signal, sys
print('""', flush=True)
for line in sys.stdin:
    question = json.loads(line)
    if isinstance(question, dict):
        if not os.path.exists(question["unless"]):
            open(question["unless"], "w").close()
            os.kill(os.getpid(), question["signal"])
        question = "again"
    print(json.dumps(question), flush=True)
    while question == "deaf":
        signal.pause()
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    (tmp_path / "program.py").write_text(PROGRAM)
    child = Child(tmp_path / "program.py")
    yield child
    child.close()


def pid_of(child: Child) -> int:
    return child._process.pid


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_process_that_died_while_idle_is_started_again_and_asked(child: Child, how: signal.Signals) -> None:
    assert child.ask("a", 60.0) == "a"
    first = pid_of(child)
    os.kill(first, how)
    assert child.ask("b", 60.0) == "b"
    assert pid_of(child) != first


def test_a_process_that_dies_once_over_a_question_is_asked_again(child: Child, tmp_path: Path) -> None:
    assert child.ask({"unless": str(tmp_path / "asked"), "signal": signal.SIGKILL}, 60.0) == "again"


def test_a_question_with_which_a_process_dies_twice_is_blamed(child: Child, tmp_path: Path) -> None:
    with pytest.raises(ChildError) as caught:  # it cannot write, so Python ends without a signal
        child.ask({"unless": str(tmp_path / "no folder" / "asked"), "signal": signal.SIGKILL}, 60.0)
    assert (caught.value.signal, child.ask("next", 60.0)) == (None, "next")


def test_its_own_time_limit_is_blamed_immediately(child: Child, tmp_path: Path) -> None:
    with pytest.raises(ChildError) as caught:
        child.ask({"unless": str(tmp_path / "asked"), "signal": signal.SIGPROF}, 60.0)
    assert caught.value.signal == signal.SIGPROF


def test_a_stopped_process_goes_on_when_it_is_asked(child: Child) -> None:
    assert child.ask("a", 60.0) == "a"
    first = pid_of(child)
    os.kill(first, signal.SIGSTOP)
    assert (child.ask("b" * 10**6, 60.0), pid_of(child)) == ("b" * 10**6, first)


def test_a_process_that_stops_reading_delays_no_other(child: Child) -> None:
    """The question is larger than a pipe's buffer. Writing it has the same time limit as the answer."""
    assert child.ask("deaf", 60.0) == "deaf"
    with pytest.raises(TimeoutError):
        child.ask("b" * 10**6, 0.2)
    assert child.ask("c", 60.0) == "c"


# Long texts


Encode = Callable[[Tokenizer, str], list[int]]
LONG = "The quick brown fox, 12345 jumps over <|im_end|> the lazy dog. " * 12_000
SPELLED = "A <|im_end|> that somebody wrote. " * 200


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return infer.load_tokenizer("smollm2")


def as_control(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text)


def as_text(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, parse_special=False)


@pytest.mark.slow
@pytest.mark.parametrize("encode_short", [as_control, as_text])
@pytest.mark.parametrize("encode_long", [as_control, as_text])
def test_a_short_text_is_tokenised_while_a_long_one_is(
    tokenizer: Tokenizer, encode_long: Encode, encode_short: Encode
) -> None:
    num_short, thread = 0, threading.Thread(target=encode_long, args=[tokenizer, LONG])
    thread.start()
    while thread.is_alive():
        encode_short(tokenizer, "The quick brown fox")
        num_short += 1
    assert num_short > 20, "one takes a ten-thousandth of the time of the long text"


@pytest.mark.parametrize("text", [LONG[:20_000], SPELLED])
def test_a_long_text_has_the_ids_that_the_library_gives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == tokenizer.backend.encode(text).ids


def test_a_long_text_has_the_ids_of_its_short_parts(tokenizer: Tokenizer) -> None:
    end = tokenizer.backend.token_to_id("<|im_end|>")
    part = "A <|im_end|> that somebody wrote.\n"
    assert as_control(tokenizer, part * 200) == as_control(tokenizer, part) * 200
    assert as_text(tokenizer, part * 200) == as_text(tokenizer, part) * 200
    assert end in as_control(tokenizer, part)
    assert end not in as_text(tokenizer, part)
