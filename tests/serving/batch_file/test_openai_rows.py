"""Fields of OpenAI's requests in a batch are read by the server's rules, and each row has one line, whatever it is."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from cases import cases
from commands import run
from infer import LLM
from infer.outputs import TokenLogprob
from infer.serving.batch_file.row import ENDPOINTS, Row, read_row, row_of
from infer.serving.protocols.answers import LEAST_LOGPROB, Spelling, completion_columns, without_end
from infer.serving.protocols.fields import BodyError, read_body
from infer.serving.protocols.openai.ask import ChatBody, ask_chat, complete_chat
from infer.serving.protocols.params import Served

SERVED = Served(Mock(sampling_defaults={}, tokenizer=Mock(chat_template=None)))
HI = [{"role": "user", "content": "hi"}]


def chat_row(**fields: Any) -> Row:
    return row_of({"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": HI, **fields}}, "a")


def completion_row(**fields: Any) -> Row:
    return row_of({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "hi", **fields}}, "a")


@cases(
    "body values options",
    ({}, {}, {}),
    ({"logprobs": None}, {}, {}),
    ({"logprobs": False}, {}, {}),
    ({"logprobs": True}, {"logprobs": 0}, {}),
    ({"logprobs": True, "top_logprobs": None}, {"logprobs": 0}, {}),
    ({"logprobs": True, "top_logprobs": 0}, {"logprobs": 0}, {}),
    ({"logprobs": True, "top_logprobs": 1}, {"logprobs": 1}, {}),
    ({"thinking_token_budget": 5}, {}, {"reasoning_budget": 5}),
    ({"thinking_token_budget": 0}, {}, {"reasoning_budget": 0}),
    ({"reasoning_effort": "none"}, {}, {"reasoning_budget": 0}),
    ({"reasoning_effort": None}, {}, {}),
    ({"tools": []}, {}, {}),
)
def test_a_chat_has_the_alternatives_and_the_budget_that_it_asks_for(body: Any, values: Any, options: Any) -> None:
    """A budget of 0 is not none."""
    row = chat_row(**body)
    assert (row.values, row.options) == (values, options)


def test_alternatives_need_log_probabilities_in_a_chat_and_are_a_number_in_a_completion() -> None:
    for body in ({"top_logprobs": 1}, {"logprobs": False, "top_logprobs": 2}):
        assert chat_row(**body).problem == "top_logprobs needs logprobs: true"
    for asked, expected in ((None, {}), (0, {"logprobs": 0}), (3, {"logprobs": 3})):
        assert completion_row(logprobs=asked).values == expected


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
        ask_chat(read_body(msgspec.json.encode({"messages": HI} | fields), ChatBody, complete_chat), SERVED)
    assert chat_row(**fields).problem == str(refused.value)


def test_a_row_accepts_the_fields_of_the_server() -> None:
    row = chat_row(reasoning_effort="low", repeat_penalty=1.5, stop=list("abcde"), max_tokens=-1, xyzzy=1, seed=-1)
    assert row.problem is None
    assert row.values == {"repetition_penalty": 1.5, "stop": list("abcde"), "max_new_tokens": None, "seed": 2**64 - 1}
    assert (row.effort, row.warnings) == ("low", ("xyzzy is not known and was ignored",))
    assert chat_row(chat_template_kwargs={"tone": "dry"}).variables == {"tone": "dry"}


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
    columns = completion_columns([None, chosen], spelling)
    assert (columns["tokens"], columns["token_logprobs"]) == ([None, "a"], [None, -3.0])
    assert columns["top_logprobs"] == [None, {"b": -0.5, "a": -1.0, "bytes:\\xc3": -4.0}]
    never = TokenLogprob(1, float("-inf"), 6, ((3, float("-inf")),))
    assert completion_columns([never], spelling)["top_logprobs"] == [{"b": LEAST_LOGPROB, "bytes:\\xc3": LEAST_LOGPROB}]


def test_only_the_token_that_ends_an_answer_is_left_out() -> None:
    logprobs = [TokenLogprob(token_id, -1.0, 1, ()) for token_id in range(3)]
    assert without_end(logprobs, "eos") == logprobs[:2]
    for reason in ("stop", "length", "abort", None):
        assert without_end(logprobs, reason) == logprobs


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
