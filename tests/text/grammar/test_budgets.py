"""The cost of a request's grammar has a budget, and no other request waits for it."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from byte_tokenizer import VOCAB_SIZE
from infer import LLM, InvalidRequestError
from infer.errors import ConstraintError
from infer.system.child_process import MOST_PROCESSES, Lane, asking_for
from infer.system.sized_cache import SizedCache
from infer.text.grammar.grammar import Grammar
from infer.text.grammar.grammar_compiler import Compiler
from infer.text.grammar.libraries import trial_lane, try_grammar
from looping import beside, in_threads
from programs import Programs
from served import Served, serving

ECHO = """
import json, os, sys, time
print('""', flush=True)
for line in sys.stdin:
    question = json.loads(line)
    while question != "quick" and not os.path.exists(question):
        time.sleep(0.01)
    print(json.dumps(os.getpid()), flush=True)
"""
MEET = """
import json, os, pathlib, sys, time
print('""', flush=True)
for line in sys.stdin:
    folder, number = json.loads(line)
    (pathlib.Path(folder) / f"asked-{number}").touch()
    while len(found := list(pathlib.Path(folder).glob("asked-*"))) < 3:
        time.sleep(0.01)
    print(json.dumps(len(found)), flush=True)
"""


@pytest.fixture(scope="module")
def served(llm: LLM) -> Iterator[Served]:
    with serving(llm, api_keys={"sk-loud": "loud", "sk-quiet": "quiet"}) as served:
        yield served


@pytest.fixture
def compiler(llm: LLM) -> Compiler:
    return Compiler(llm.tokenizer, VOCAB_SIZE)


@pytest.fixture
def short_of_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set half a second as the time in which a schema must be read."""
    monkeypatch.setattr("infer.text.grammar.libraries.READ_SECONDS", 0.5)
    trial_lane.cache_clear()
    yield
    trial_lane.cache_clear()


def long_schema(count: int) -> dict[str, Any]:
    """Return a schema with `count` subschemas. Each excludes some long constants, so it takes many times the limit."""
    words = [first + "abcdefghij" * 3 for first in "bcdef"]
    items = [{"not": {"enum": [index, *words]}} for index in range(count)]
    return {"type": "array", "prefixItems": items, "minItems": count, "items": False}


# Schemas


def test_a_schema_that_expands_too_much_is_refused_in_another_process(compiler: Compiler, short_of_time: None) -> None:
    before = time.process_time()
    with pytest.raises(InvalidRequestError, match=r"json_schema: takes .* make it smaller"):
        compiler.compile(Grammar("json_schema", json.dumps(long_schema(4_500))))
    assert time.process_time() - before < 2  # in this process; it once took over ten


def test_plain_requests_are_answered_while_schemas_are_read(served: Served, short_of_time: None) -> None:
    """The schemas would otherwise take all threads that prepare plain requests, and Python's lock."""
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": long_schema(4_500)}}
    statuses, messages = list[int](), [{"role": "user", "content": "a"}]

    def ask(route: str, key: str, **body: Any) -> int:
        headers = {"Authorization": f"Bearer sk-{key}"}
        return served.client.post(f"/v1/{route}", json={"max_tokens": 1} | body, headers=headers).status_code

    def ask_for_much() -> None:
        statuses.append(ask("chat/completions", "loud", messages=messages, response_format=schema))

    with beside([ask_for_much] * 5):
        time.sleep(0.3)
        assert [ask("completions", "quiet", prompt="ab", max_tokens=3) for _ in range(5)] == [200] * 5
        assert len(statuses) < 5, "the schemas were read before anybody asked"
    assert statuses == [400] * 5


def test_without_keys_all_processes_are_asked(tmp_path: Path) -> None:
    """Each question waits until all are being answered, so a lane that answers fewer at a time would not end."""
    program = tmp_path / "meet.py"
    program.write_text(MEET)
    lane, answers = Lane(program), list[int]()
    in_threads([lambda number=number: answers.append(lane.ask([str(tmp_path), number], 30.0)) for number in range(3)])
    assert answers == [3] * 3


def test_another_key_s_schema_does_not_wait_behind_them(tmp_path: Path) -> None:
    """A tenant leaves a process to the others, so their requests do not wait for its own."""
    program, gate = tmp_path / "echo.py", tmp_path / "gate"
    program.write_text(ECHO)
    lane = Lane(program)
    pids = list[int]()

    def ask_slowly() -> None:
        with asking_for("loud"):
            pids.append(lane.ask(str(gate), 60.0))

    with beside([ask_slowly] * 4):
        while len(lane._asking) < MOST_PROCESSES - 1:
            time.sleep(0.001)
        with asking_for("quiet"):
            quiet = {lane.ask("quick", 60.0) for _ in range(3)}
        assert (len(quiet), pids) == (1, [])
        gate.touch()


def test_a_program_may_ignore_the_end_of_its_children(programs: Programs) -> None:
    code = "import signal\nfrom infer.text.grammar import grammar, libraries\n"
    code += "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    code += "libraries.try_grammar('llguidance', grammar.Grammar('regex', 'a'))"
    assert programs.run(code).returncode == 0


def test_a_process_that_gets_no_core_does_not_blame_the_grammar() -> None:
    lane, found = trial_lane("llguidance"), list[str]()
    try_grammar("llguidance", Grammar("regex", "a"))

    def read() -> None:
        try_grammar("llguidance", Grammar("json_schema", json.dumps(long_schema(200))))  # a fifth of the limit
        found.append("read")

    with beside([read]):
        while not lane._asking:
            time.sleep(0.001)
        (process,) = (child._process for child in lane._children if child not in lane._free)
        assert process is not None
        end = time.monotonic() + 5  # longer than a schema may take
        while time.monotonic() < end:
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(0.01)
        assert found == [], "the schema was read before the process could be stopped"
        os.kill(process.pid, signal.SIGCONT)
    assert found == ["read"]


# Masks


def test_ambiguous_grammars_end_by_the_time_of_their_masks(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.text.grammar.grammar_backends.SLOW_SECONDS", 1e-4)
    monkeypatch.setattr("infer.text.grammar.grammar_backends.MOST_EXCESS_SECONDS", 2e-3)
    text = 'start: a\na: a a | a a a | "a" | '
    mask = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)

    def write(compiler: Compiler, text: str, letter: int) -> int:
        constraint = compiler.compile(Grammar("grammar", text))
        for _ in range(300):
            constraint.fill(mask)
            assert constraint.accept([letter]) == 1
        return constraint.num_accepted

    with pytest.raises(ConstraintError, match="the grammar is too ambiguous"):
        write(compiler, text, ord("a"))
    assert write(compiler, 'start: "b"*', ord("b")) == 300


# Cached grammars


def test_the_cache_of_grammars_is_bounded_by_bytes_and_keeps_the_last_used() -> None:
    cache = SizedCache[str](100)
    for name in "abc":
        cache.put(name, name.upper(), 30)
    assert cache.get("a") == "A"
    cache.put("d", "D", 30)
    assert [cache.get(name) for name in "abcd"] == ["A", None, "C", "D"]
    cache.put("a", "a", 90)
    assert [cache.get(name) for name in "abcd"] == ["a", None, None, None]
    cache.put("b", "B", 101)
    assert (cache.get("a"), cache.get("b")) == ("a", None)
    cache.put("a", "A", 10)
    cache.put("c", "C", 90)
    assert (cache.get("a"), cache.get("c")) == ("A", "C")


def test_a_value_is_made_once_and_other_threads_use_the_cache_meanwhile() -> None:
    cache = SizedCache[str](100)

    def make() -> str:
        other = threading.Thread(target=cache.get_or_make, args=("b", lambda: "B", len))
        other.start()
        other.join(60)
        assert not other.is_alive()
        return "A"

    assert (cache.get_or_make("a", make, len), cache.get_or_make("a", lambda: "again", len)) == ("A", "A")
    assert cache.get("b") == "B"


def test_a_compiler_forgets_the_grammar_not_used_for_longest(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[str]()

    def counted(backend: str, grammar: Grammar) -> Any:
        tried.append(grammar.text)
        return try_grammar(backend, grammar)

    monkeypatch.setattr("infer.text.grammar.grammar_compiler.try_grammar", counted)
    monkeypatch.setattr("infer.text.grammar.grammar_compiler.MAX_COMPILED_BYTES", 70_000)
    compiler = Compiler(llm.tokenizer, VOCAB_SIZE)
    for text in ("a", "b", "a", "c", "a", "b"):
        compiler.compile(Grammar("regex", text))
    assert tried == ["a", "b", "c", "b"]
