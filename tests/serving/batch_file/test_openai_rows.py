"""Fields of OpenAI's requests in a batch are read by the server's rules, and each row has one line, whatever it is."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from cases import cases
from commands import run
from infer import LLM, InvalidRequestError
from infer.outputs import TokenLogprob
from infer.serving.batch_file.batch_rows import ENDPOINTS, Row, read_row, row_of
from infer.serving.protocols.bodies import Served
from infer.serving.protocols.events import LEAST_LOGPROB, Spelling
from infer.serving.protocols.fields import BodyError, read_body
from infer.serving.protocols.openai.ask import ChatBody

SERVED = Served(Mock(sampling_defaults={}, tokenizer=Mock(chat_template=None)))
HI = [{"role": "user", "content": "hi"}]


def chat_row(**fields: Any) -> Row:
    return row_of({"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": HI, **fields}}, "a")


def completion_row(**fields: Any) -> Row:
    return row_of({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "hi", **fields}}, "a")


def asked_of(row: Any, served: Served = SERVED) -> Any:
    """Return what a row asks, as its route does."""
    if row.problem is not None:
        raise InvalidRequestError(row.problem)
    return row.body.ask(served)


@cases(
    "body logprobs budget",
    ({}, None, None),
    ({"logprobs": False}, None, None),
    ({"logprobs": True}, 0, None),
    ({"logprobs": True, "top_logprobs": None}, 0, None),
    ({"logprobs": True, "top_logprobs": 1}, 1, None),
    ({"thinking_token_budget": 5}, None, 5),
    ({"thinking_token_budget": 0}, None, 0),
    ({"reasoning_effort": "none"}, None, 0),
)
def test_a_chat_has_the_alternatives_and_the_budget_that_it_asks_for(body: Any, logprobs: Any, budget: Any) -> None:
    """A budget of 0 is not none."""
    asked = asked_of(chat_row(**body))
    assert (asked.params[0].logprobs, asked.options.reasoning_budget) == (logprobs, budget)


def test_alternatives_are_a_number_in_a_completion() -> None:
    for given in (None, 0, 3):
        assert asked_of(completion_row(logprobs=given)).params[0].logprobs == given


@cases(
    "fields",
    {"temperature": 3},
    {"temprature": 1},
    {"stop": ["a"] * 65},
    {"top_logprobs": 2},
    {"thinking_token_budget": 5, "reasoning_effort": "none"},
    {"response_format": {"type": "json"}},
    {"messages": [{"role": "usr", "content": "hi"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
    {"dry_multiplier": 0.8},
    {"logit_bias": {"a": 1}},
)
def test_a_row_is_refused_in_the_words_of_the_server(fields: dict[str, Any]) -> None:
    with pytest.raises(BodyError) as refused:
        read_body(msgspec.json.encode({"messages": HI} | fields), ChatBody).ask(SERVED)
    with pytest.raises(InvalidRequestError, match=re.escape(str(refused.value))):
        asked_of(chat_row(**fields))


def test_a_row_accepts_the_fields_of_the_server() -> None:
    row = chat_row(reasoning_effort="low", repeat_penalty=1.5, stop=list("abcde"), max_tokens=-1, xyzzy=1, seed=-1)
    (params,) = asked_of(row).params
    assert (params.repetition_penalty, params.stop, params.max_new_tokens) == (1.5, tuple("abcde"), None)
    assert (params.seed, row.warnings) == (2**64 - 1, ("xyzzy is not known and was ignored",))
    assert asked_of(chat_row(chat_template_kwargs={"tone": "dry"})).variables == {"tone": "dry"}


def test_a_command_s_values_come_between_the_row_s_and_the_model_s() -> None:
    served = replace(SERVED, llm=Mock(sampling_defaults={"top_p": 0.5, "top_k": 7}), values={"top_p": 0.6}, seed=3)
    for fields, expected in (({}, (0.6, 7, 3)), ({"top_p": 0.9, "top_k": 2, "seed": 4}, (0.9, 2, 4))):
        (params,) = asked_of(completion_row(**fields), served).params
        assert (params.top_p, params.top_k, params.seed) == expected


@cases(
    "fields problem",
    ({"n": 2}, "n must not be 2 here: leave it out"),
    ({"stream": True}, "stream must not be true here: leave it out"),
    ({"max_tokens": 0}, "max_tokens must be at least 1 in a row, or -1 for the whole context, got 0"),
    ({"echo": True}, "echo must not be true here: leave it out"),
    ({"prompt": ["a", "b"]}, "a row must have one prompt, got 2: write one row per prompt"),
)
def test_a_row_asks_for_one_whole_answer(fields: dict[str, Any], problem: str) -> None:
    assert completion_row(**fields).problem == problem


def test_the_likeliest_of_tokens_with_one_text_is_reported() -> None:
    spelling = Spelling([b"a", b"b", b"a", b"\xc3", b"\xc3", b"a"], {5})
    chosen = TokenLogprob(5, -3.0, 3, ((1, -0.5), (0, -1.0), (2, -2.0), (3, float("-inf")), (4, -4.0)))
    columns = spelling.completion_columns([None, chosen])
    assert (columns["tokens"], columns["token_logprobs"]) == ([None, "a"], [None, -3.0])
    assert columns["top_logprobs"] == [None, {"b": -0.5, "a": -1.0, "bytes:\\xc3": -4.0}]
    never = TokenLogprob(1, float("-inf"), 6, ((3, float("-inf")),))
    assert spelling.completion_columns([never])["top_logprobs"] == [{"b": LEAST_LOGPROB, "bytes:\\xc3": LEAST_LOGPROB}]


# Hostile rows


GOOD = '{"id": "good%d", "prompt": "hello", "max_new_tokens": 2}'
DEEP = '{"a":' * 900 + "1" + "}" * 900


def in_stack(depth: int, line: str) -> Any:
    """Return the row that is read below `depth` frames."""
    return in_stack(depth - 1, line) if depth else read_row(line, "line 1")


def of_endpoint(endpoint: str, rest: str) -> str:
    return f'{{"custom_id": "bad", "url": "{endpoint}", "body": {{{rest}}}}}'


def lines_of(folder: Path, tmp_path: Path, rows: list[str], *options: str) -> tuple[list[dict[str, Any]], str]:
    """Return the lines and the notes of a run that ends with status 1."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(rows) + "\n")
    told = run("batch", source, output, "-m", folder, "--threads", "1", *options, status=1).err
    return [json.loads(line) for line in output.read_text().splitlines()], told


@pytest.mark.parametrize("depth", [62, 100, 950, 970, 980, 990, 10_000])
@pytest.mark.parametrize("endpoint", [None, *ENDPOINTS])
def test_the_depth_of_the_stack_does_not_change_a_row(depth: int, endpoint: str | None) -> None:
    rest = f'"zz": {"[" * depth}{"]" * depth}'
    line = f'{{"id": "bad", "prompt": "a", {rest}}}' if endpoint is None else of_endpoint(endpoint, rest)
    row = read_row(line, "line 1")
    assert in_stack(300, line) == row
    assert ("nested more than 64 deep" in str(row.problem)) == (depth > 62)


@pytest.mark.parametrize("options", [(), ("--retry-errors",)])
def test_every_row_has_a_line_at_each_run(folder: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    text = json.dumps(DEEP)
    bad = [
        '{"id": "bad", "prompt": "a", "zz": %s}' % ("[" * 980 + "]" * 980),
        f'{{"id": "schema", "prompt": "a", "json_schema": {text}}}',
        of_endpoint(ENDPOINTS[0], f'"messages": [], "tools": {DEEP}').replace("bad", "tools"),
        *(of_endpoint(ENDPOINTS[index], f'"{field}": {text}').replace("bad", f"{field}{index}")
          for index in (0, 1) for field in ("guided_json", "prompt", "messages")),
        of_endpoint(ENDPOINTS[1], '"prompt": "a", "guided_json": "\\ud800"').replace("bad", "half"),
    ]  # fmt: skip
    rows = [GOOD % 0, *bad, GOOD % 1]
    for _ in range(2):
        lines, _ = lines_of(folder, tmp_path, rows, *options)
        assert (len(lines), sum(bool(line.get("error")) for line in lines)) == (len(rows), len(bad))


def test_a_run_that_leaves_a_row_does_not_end_with_status_0(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The input loses a row while the model is loaded."""
    init = LLM.__init__

    def load(self: LLM, *arguments: Any, **options: Any) -> None:
        (tmp_path / "in.jsonl").write_text(GOOD % 0 + "\n")
        init(self, *arguments, **options)

    monkeypatch.setattr(LLM, "__init__", load)
    lines, told = lines_of(folder, tmp_path, [GOOD % 0, GOOD % 1], "--quiet")
    assert (len(lines), "1 of 2 rows are answered" in told) == (1, True)


def test_the_rows_that_are_answered_together_change_no_byte(folder: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"id": str(index), "prompt": "abc" * index, "max_new_tokens": index}) for index in range(1, 8)]
    (source := tmp_path / "in.jsonl").write_text("\n".join(rows) + "\n")
    written = set[tuple[str, ...]]()
    for size in ("1", "3"):
        output = tmp_path / f"{size}.jsonl"
        run("batch", source, output, "-m", folder, "--threads", "1", "--batch-size", size)
        written.add(tuple(sorted(output.read_text().splitlines())))
    assert [len(lines) for lines in written] == [7]
