"""`infer generate` over SmolLM2: constraints hold, paths give the same text, and mistakes are told in one line."""

import json
from pathlib import Path

import jsonschema
import pytest

from infer.cli import main, subcommands
from infer.llm import LLM

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return LLM(smollm2_path, max_seq_len=1024)


@pytest.fixture(autouse=True)
def loaded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subcommands, "load_model", lambda options: llm)


def answer(capsys: Capture, *options: str) -> str:
    assert main(["generate", "-q", "--temperature", "0", "-n", "60", *options]) == 0
    return capsys.readouterr().out.removesuffix("\n")


def test_a_schema_holds(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    options = ["--chat", "--prompt", "Ada is 36 years old. Answer as JSON.", "--json-schema", str(path)]
    text = answer(capsys, *options)
    jsonschema.validate(json.loads(text), SCHEMA)
    assert answer(capsys, *options, "--speculation", "ngram", "--prefill-chunk", "5") == text
    assert main(["generate", "-q", "--json", "--stats", "-n", "60", "--temperature", "0.2", *options]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["grammar_complete"] is True
    assert "path          sampled, json_schema" in captured.err
    assert "tokens not sampled" in captured.err


def test_a_choice_and_a_pattern_hold(capsys: Capture, tmp_path: Path) -> None:
    grammar = tmp_path / "count.lark"
    grammar.write_text('start: number (", " number)~2\nnumber: /[1-9]/')
    assert answer(capsys, "--prompt", "Is water wet?", "--choice", "yes", "no") in ("yes", "no")
    assert answer(capsys, "--prompt", "The year is ", "--regex", "(19|20)[0-9]{2}").isdecimal()
    assert len(answer(capsys, "--prompt", "Count: ", "--grammar", str(grammar))) == len("1, 2, 3")


def test_speculation_gives_the_same_text(capsys: Capture) -> None:
    for options in (["--temperature", "0"], ["--temperature", "0.8", "--seed", "5"]):
        asked = ["--prompt", "one two three one two three one two", *options]
        assert answer(capsys, *asked, "--speculation", "ngram") == answer(capsys, *asked)


def test_many_prompts_get_the_answers_that_each_gets_alone(capsys: Capture, tmp_path: Path) -> None:
    prompts = ["The sky is", "Once upon a time", "1, 2, 3,"]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "seed": 3}) + "\n" for prompt in prompts))
    options = ["generate", "-q", "--json", "--temperature", "0.8", "-n", "12"]
    assert main([*options, "--prompts-file", str(path)]) == 0
    together = [json.loads(line)["token_ids"] for line in capsys.readouterr().out.splitlines()]
    alone = []
    for prompt in prompts:
        assert main([*options, "--seed", "3", "--prompt", prompt]) == 0
        alone.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert together == alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--regex", "a[b"], "regex, column 2: "),
        (["--speculation", "ngram", "--draft-tokens", "0"], "0 is not in the range 1<=x<=32"),
        (["--prefill-chunk", "0"], "0 is not in the range 1<=x<=512"),
    ],
)
def test_what_the_model_refuses_is_one_line_and_status_2(capsys: Capture, options: list[str], message: str) -> None:
    assert main(["generate", "-q", "-p", "x", *options]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
