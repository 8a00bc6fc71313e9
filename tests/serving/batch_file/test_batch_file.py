"""A batch's rows, lines, output file and workers: no line is lost, and rows of texts have the routes' answers."""

import itertools
import json
import os
import resource
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from cases import cases
from commands import refused, run
from dying_workers import answer_or_die
from infer import LLM
from infer.engine.runner.hidden_states import HiddenStates
from infer.engine.texts.text_tasks import together
from infer.errors import InferError, InvalidRequestError
from infer.outputs import GenerationResult, GenerationTiming, TokenLogprob, ToolCall
from infer.serving.batch_file import answering, workers
from infer.serving.batch_file.answering import answer_rows
from infer.serving.batch_file.batch_rows import BatchSettings, Line, Row, read_rows
from infer.serving.batch_file.output_file import OutputFile
from infer.serving.batch_file.workers import answer_by_workers
from infer.serving.protocols.bodies import seed_of
from infer.serving.protocols.events import Spelling

CHAT = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions"}
SPELLING = Spelling([str(number).encode() for number in range(6)] + [b"\xc3"], {2})
HI = [{"role": "user", "content": "hi"}]


def row_of(record: Any) -> Row:
    (row,) = read_rows([json.dumps(record)])
    return row


def result(**changes: Any) -> GenerationResult:
    logprobs = [TokenLogprob(5, -0.5, 1, ((5, -0.5), (6, float("-inf"))))]
    values: dict[str, Any] = {"token_ids": [5], "text": "ü", "finish_reason": "eos", "stop_reason": 2, "seed": 9}
    values |= {"prompt_tokens": 3, "generated_tokens": 1, "logprobs": logprobs}
    values["timing"] = GenerationTiming(0.0, [], [], [])
    return GenerationResult(**values | changes)


def test_plain_rows_and_openai_rows() -> None:
    rows = list(read_rows(['{"id": 7, "prompt": "a", "temperature": 0}', "", '{"prompt": [1, 2]}', json.dumps("a")]))
    assert rows[0] == Row("7", prompt="a", values={"temperature": 0})
    assert (rows[1].id, rows[1].prompt) == ("line 3", [1, 2])
    assert rows[2].problem == 'a row must be an object, got "a"'
    body = {"model": "any", "messages": HI, "max_completion_tokens": 5, "n": 1, "stop": None}
    row = row_of(CHAT | {"body": body})
    assert (row.id, row.endpoint, row.problem, row.body.max_completion_tokens) == ("c", "/v1/chat/completions", None, 5)


def test_a_row_may_have_tools() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = {"messages": HI, "tools": tools, "tool_choice": "required"}
    options = {"tools": tools, "tool_choice": "required"}
    assert row_of({"id": "a", **asked, "reasoning_budget": 3}).options == options | {"reasoning_budget": 3}
    called = result(text="", tool_calls=(ToolCall("call_1", "f", "{}"),), reasoning="Hm")
    (choice,) = line_of(called, "/v1/chat/completions")["response"]["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = {"content": None, "reasoning_content": "Hm", "tool_calls": [called.tool_calls[0].to_json()]}
    assert choice["message"] == choice["message"] | message


@cases(
    "record problem",
    ({"id": "", "prompt": "a"}, "an id must be a whole number or a text with characters, got ''"),
    ({"id": 1.5, "prompt": "a"}, "an id must be a whole number or a text with characters, got 1.5"),
    ({"id": "\ud800", "prompt": "a"}, "an id must be a whole number or a text with characters, got '\\ud800'"),
    ({"id": "a", "messages": []}, "messages must hold at least one message, got none"),
    (CHAT | {"body": {"messages": []}}, "messages: expected `array` of length >= 1, got a list of 0"),
    ({"id": "a"}, 'a row must have either "prompt", a text or ids, or "messages", a list'),
    ({"id": "a", "prompt": "a", "messages": HI}, 'a row must have either "prompt"'),
    (CHAT | {"url": "/v1/score"}, "or /v1/rerank or /v1/classify, got '/v1/score'"),
    (CHAT | {"method": "GET", "body": {}}, "method must be 'POST', got 'GET'"),
    (CHAT | {"body": 5}, "body must be an object, got 5"),
    (CHAT | {"body": {"prompt": "a"}}, "prompt is not supported here: use messages here, or"),
    (CHAT | {"body": {"messages": HI, "n": 2}}, "n must not be 2 here: leave it out"),
    (CHAT | {"body": {"messages": ["hi"]}}, "messages[0]: expected `object`, got 'hi'"),
)
def test_a_malformed_row_has_a_problem(record: Any, problem: str) -> None:
    assert problem in str(row_of(record).problem)


def line_of(result: GenerationResult, url: str | None = None) -> Any:
    return json.loads(Row("a", url).result_line(result, "m", SPELLING).text)


def test_a_line_has_the_warnings_of_its_answer() -> None:
    said = result(warnings=("tool 'f': /a is left out",))
    for line in (line_of(said), line_of(said, "/v1/chat/completions")["response"]["body"]["infer"]):
        assert line["warnings"] == ["tool 'f': /a is left out"]


def test_a_result_is_a_line_without_a_clock() -> None:
    plain = line_of(result())
    assert list(plain)[:3] == ["id", "model", "text"]
    assert plain["logprobs"] == [{"token_id": 5, "logprob": -0.5, "rank": 1, "top": [[5, -0.5], [6, None]]}]
    assert not {"timing", "stats"} & set(plain)
    record = line_of(result(finish_reason="length"), "/v1/chat/completions")
    assert (record["custom_id"], record["error"], record["response"]["status_code"]) == ("a", None, 200)
    (choice,) = record["response"]["body"]["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("ü", "length")
    entry = {"token": "5", "logprob": -0.5, "bytes": [53]}
    tops = [entry, {"token": "bytes:\\xc3", "logprob": -9999.0, "bytes": [0xC3]}]
    assert choice["logprobs"]["content"] == [entry | {"top_logprobs": tops}]
    ended = line_of(result(), "/v1/chat/completions")
    assert ended["response"]["body"]["choices"][0]["logprobs"]["content"] == []
    (choice,) = line_of(result(logprobs=None), "/v1/completions")["response"]["body"]["choices"]
    assert choice == {"index": 0, "text": "ü", "logprobs": None, "finish_reason": "stop"}
    failed = Row("a").result_line(result(finish_reason="error", stop_reason="logits", error="NaN"), "m", SPELLING)
    assert failed == Row("a").error_line("logits", "NaN", "m")
    assert failed.has_failed


def test_a_torn_line_is_cut_and_failed_rows_are_asked_again(tmp_path: Path) -> None:
    path, row = tmp_path / "out.jsonl", Row("b", "/v1/completions")
    lines = [Row("a").result_line(result(), "m", SPELLING).text, row.error_line("x", "y", "m").text]
    path.write_text("".join(lines) + lines[0][:20], encoding="utf-8")
    with OutputFile(path, "m") as output:
        assert (output.finished, output.num_failed) == ({"a", "b"}, 1)
        with pytest.raises(InvalidRequestError, match="another infer batch writes"):
            OutputFile(path, "m")
        output.write(lines[0].replace('"a"', '"c"'))
    assert path.read_text(encoding="utf-8") == "".join(lines) + lines[0].replace('"a"', '"c"')
    with OutputFile(path, "m", retry_errors=True) as output:
        assert (output.finished, output.num_failed) == ({"a", "c"}, 0)
        output.write(lines[1])
    assert (path.read_text(encoding="utf-8").count("\n"), os.listdir(tmp_path)) == (3, ["out.jsonl"])
    with pytest.raises(InvalidRequestError, match="holds answers of m, not of other"):
        OutputFile(path, "other")


def test_failed_rows_of_an_earlier_run_are_counted_wherever_they_stand(tmp_path: Path) -> None:
    path, good = tmp_path / "out.jsonl", Row("a").result_line(result(), "m", SPELLING).text
    failed = [Row(name).error_line("x", "y", "m").text for name in "bc"]
    path.write_text("".join([*failed, good]), encoding="utf-8")
    with OutputFile(path, "m") as output:
        assert (output.finished, output.num_failed) == ({"a", "b", "c"}, 2)


def test_a_row_that_was_cancelled_gets_no_line_and_is_answered_by_the_next_run(llm: LLM) -> None:
    cancel, ids = threading.Event(), list[str]()
    values = {"temperature": 0.0, "ignore_eos": True}
    rows = [Row("short", prompt="a", values={"max_new_tokens": 2})]
    rows += [Row(name, prompt="b", values={"max_new_tokens": 390}) for name in ("long", "waiting")]

    def write(line: Line) -> None:
        ids.append(line.row_id)
        cancel.set()

    answer_rows(llm, rows, BatchSettings("m", 0, 2, values, cancel), write)
    assert ids == ["short"]
    left = [row for row in rows if row.id not in ids]
    answer_rows(llm, left, BatchSettings("m", 0, 2, values), write)
    assert sorted(ids) == ["long", "short", "waiting"]


def test_a_completion_without_a_limit_has_as_many_tokens_as_over_http(llm: LLM) -> None:
    lines = dict[str, Any]()
    values = {"temperature": 0.0, "ignore_eos": True}
    bodies = {"c": {"prompt": "a"}, "d": {"prompt": "a", "max_tokens": 3}}
    rows = [row_of({"custom_id": name, "url": "/v1/completions", "body": body}) for name, body in bodies.items()]

    def write(line: Line) -> None:
        lines[line.row_id] = json.loads(line.text)["response"]["body"]["usage"]["completion_tokens"]

    answer_rows(llm, rows, BatchSettings("m", 0, 2, values), write)
    assert lines == {"c": 16, "d": 3}
    answer_rows(llm, rows, BatchSettings("m", 0, 2, values | {"max_new_tokens": 5}), write)
    assert lines == {"c": 5, "d": 3}


def test_a_file_of_another_program_is_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary\n")
    with pytest.raises(InvalidRequestError, match=r"notes.txt, line 1 was not written by infer batch"):
        OutputFile(path, "m")
    assert path.read_text() == "dear diary\n"
    with pytest.raises(InvalidRequestError, match="must be a regular file"):
        OutputFile(tmp_path, "m")


def test_a_byte_order_mark_is_no_part_of_a_row() -> None:
    lines = ['\ufeff{"id": "a", "prompt": "x"}\n', "\ufeff\n", '\ufeff{"id": "b", "prompt": "x"}\n']
    assert [(row.id, row.problem) for row in read_rows(lines)] == [("a", None), ("b", None)]


@pytest.mark.parametrize("rest", ['"max_new_tokens": 1, "max_new_tokens": 2', '"logit_bias": {"5": 1, "5": 2}'])
def test_a_key_that_appears_twice_is_refused(rest: str) -> None:
    (row,) = read_rows([f'{{"id": "a", "prompt": "x", {rest}}}'])
    name = "5" if "5" in rest else "max_new_tokens"
    assert row.problem == f"the key '{name}' appears twice: give it once"


def test_a_finished_output_is_not_taken_for_that_of_another_seed(tmp_path: Path) -> None:
    source, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"id": "own", "prompt": "x", "seed": 7}\n{"id": "a", "prompt": "x"}\n')
    answers = [Row(name).result_line(result(seed=seed), "smollm2", SPELLING).text
               for name, seed in (("own", 7), ("a", seed_of(3, "a")))]  # fmt: skip
    path.write_text("".join(answers), encoding="utf-8")
    assert len({seed_of(seed, name) for seed in (0, 1) for name in ("a", "b", "1")}) == 6
    run("batch", source, path, "--seed", "3")
    assert "has answers with another --seed than 4" in refused("batch", source, path, "--seed", "4")
    assert path.read_text(encoding="utf-8") == "".join(answers)


@cases(
    "content error",
    ('{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}\n', "has two rows with the id 'a': ids must differ"),
    ("\n\n", "has no row"),
    (None, "cannot be read: No such file or directory"),
)
def test_bad_input_is_refused_before_a_model_is_loaded(content: str | None, error: str, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    if content is not None:
        source.write_text(content)
    assert error in refused("batch", source, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.slow
def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    path, (soft, hard) = tmp_path / "out.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    with OutputFile(path, "m") as output:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
        try:
            with pytest.raises(OSError, match="File too large") as caught:
                output.write("a line that is longer\n")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(path)


# Rows of texts


TEXT_SETTINGS = BatchSettings("tiny", 0, 4, {})


def text_rows(bodies: Any) -> list[Row]:
    ids = map(str, itertools.count())
    records = [{"custom_id": next(ids), "url": f"/v1/{path}", "body": body} for path, body in bodies]
    return list(read_rows(map(json.dumps, records)))


def line_for(llm: LLM, path: str, **body: Any) -> dict[str, Any]:
    """Return the line of a row."""
    lines = list[Line]()
    answer_rows(llm, text_rows([(path, body)]), TEXT_SETTINGS, lines.append)
    (line,) = lines
    found: dict[str, Any] = json.loads(line.text)
    assert line.has_failed == (found["error"] is not None)
    return found


def test_a_row_of_embeddings_has_the_library_s_vectors(embedder: LLM) -> None:
    texts = ["hello", "x" * 999]
    asked = {"prompt_name": "query", "dimensions": 8, "truncate": True}
    line = line_for(embedder, "embeddings", input=texts, odd=1, **asked)
    body = line["response"]["body"]
    with pytest.warns(UserWarning, match="were cut"):
        expected = embedder.embed(texts, **asked)
    assert torch.equal(torch.tensor([each["embedding"] for each in body["data"]]), expected)
    assert body["infer"]["warnings"] == ["odd is not known and was ignored", "1 of 2 texts were cut to 256 tokens"]
    assert line == line_for(embedder, "embeddings", input=texts, odd=1, **asked)


def test_a_row_of_rerank_has_the_library_s_scores(judge: LLM, embedder: LLM) -> None:
    documents = ["a roof", "a bridge"]
    for llm in (judge, embedder):
        body = line_for(llm, "rerank", query="cats", documents=documents, return_documents=True)["response"]["body"]
        found = [(each["index"], each["relevance_score"], each["document"]["text"]) for each in body["results"]]
        assert found == [(each.index, each.score, each.document) for each in llm.rerank("cats", documents)]
        assert body["usage"]["total_tokens"] > 0


def test_a_row_of_classify_has_the_library_s_labels(labeller: LLM) -> None:
    body = line_for(labeller, "classify", input=["a roof", "x" * 999], truncate=True)["response"]["body"]
    with pytest.warns(UserWarning, match="were cut"):
        expected = labeller.classify(["a roof", "x" * 999], truncate=True)
    for found, each in zip(body["data"], expected, strict=True):
        assert found["label"] == each.label
        assert sorted(found["probs"], reverse=True) == list(each.probabilities)
    assert body["id"].startswith("classify-")
    assert body["infer"]["warnings"] == ["1 of 2 texts were cut to 256 tokens"]


def test_a_request_that_a_model_cannot_compute_is_the_line_s_error(embedder: LLM, judge: LLM, labeller: LLM) -> None:
    for llm, path, body, message in (
        (labeller, "rerank", {"query": "a", "documents": ["b"]}, "not a reranker"),
        (judge, "embeddings", {"input": "a"}, "not trained for embeddings"),
        (embedder, "embeddings", {"input": "x" * 999}, "the context holds"),
        (judge, "classify", {"input": "a"}, "not a classifier"),
        (judge, "rerank", {"query": "a"}, "documents is missing"),
    ):
        assert message in line_for(llm, path, **body)["error"]["message"]
    assert line_for(judge, "embeddings", input="a", pooling="last")["error"] is None


LONG = "x" * 999
NEIGHBOURS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "embedder": [
        *(("embeddings", {"input": text}) for text in ("a roof", ["a", "a bridge"], LONG, "", "hello")),
        ("rerank", {"query": "cats", "documents": ["a roof", "a bridge"]}),
        ("embeddings", {"input": ["a", LONG], "truncate": True, "dimensions": 8}),
        ("embeddings", {"input": "a", "prompt_name": "query", "normalize": False, "encoding_format": "base64"}),
        *(("embeddings", {"input": text, "pooling": "max"}) for text in ("a", [[5, 6], [7]])),
    ],
    "judge": [
        *(("rerank", {"query": query, "documents": ["a roof"]}) for query in ("cats", "dogs", "birds")),
        *(("rerank", {"query": "cats", "documents": ["a", text], "top_n": 1}) for text in ("b", LONG, "c")),
        ("rerank", {"query": "cats", "documents": ["a", "b"], "instruction": "find"}),
    ],
    "labeller": [
        *(("classify", {"input": text}) for text in ("a roof", "b", [["a", "b"], ["a", LONG]], ["c", "d"], LONG)),
        *(("classify", {"input": text, "truncate": True}) for text in ([["a", "b"], ["a", LONG]], "e")),
    ],
}


@pytest.mark.parametrize("kind", NEIGHBOURS)
def test_neighbouring_rows_share_forwards_and_have_the_lines_of_single_rows(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, forward = request.getfixturevalue(kind), Mock(side_effect=HiddenStates._run)
    monkeypatch.setattr(HiddenStates, "_run", lambda *arguments: forward(*arguments))
    rows, alone, shared = text_rows(NEIGHBOURS[kind]), list[Line](), list[Line]()
    for row in rows:
        answer_rows(llm, [row], TEXT_SETTINGS, alone.append)
    num_alone = forward.call_count
    answer_rows(llm, rows, TEXT_SETTINGS, shared.append)
    assert shared == alone
    assert 0 < sum(line.has_failed for line in shared) < len(rows) / 2
    assert forward.call_count - num_alone < num_alone


def test_a_row_that_fails_among_others_fails_alone(embedder: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def computed(asked: Any) -> Any:
        if any(len(text.ids) == 9 for _, texts in asked for text in texts.texts):
            raise InvalidRequestError("there is no memory")
        return together(asked)

    lines, rows = list[Line](), text_rows([("embeddings", {"input": [[5] * length]}) for length in (3, 9, 4)])
    monkeypatch.setattr(answering, "together", computed)
    answer_rows(embedder, rows, TEXT_SETTINGS, lines.append)
    assert [line.has_failed for line in lines] == [False, True, False]
    assert "there is no memory" in lines[1].text


@pytest.mark.parametrize(("name", "limit"), [("MAX_TEXTS", 2), ("MAX_TOKENS", 8)])
def test_few_rows_wait_for_their_lines(embedder: LLM, name: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, name, limit)
    lines, cancel, num_lines = list[Line](), threading.Event(), list[int]()

    def rows() -> Iterator[Row]:
        for row in text_rows([("embeddings", {"input": [[5] * 4]})] * 5):
            yield row
            num_lines.append(len(lines))
        cancel.set()

    answer_rows(embedder, rows(), replace(TEXT_SETTINGS, cancel=cancel), lines.append)
    assert (num_lines, len(lines)) == ([0, 2, 2, 4, 4], 4), "a row that waits when the run is cancelled gets no line"


# Rows that are handed out to processes that die


SETTINGS = BatchSettings("m", 0, 1, {})
ROWS = [Row(str(number)) for number in range(40)]


@pytest.fixture(autouse=True)
def _without_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_work", answer_or_die)


def answered(load: dict[str, Any], num_workers: int) -> list[str]:
    """Return the ids of the lines, in the order of the rows."""
    found = list[str]()
    answer_by_workers(iter(ROWS), SETTINGS, load, num_workers, lambda line: found.append(line.row_id), lambda: False)
    return sorted(found, key=int)


@pytest.mark.slow
def test_the_rows_of_a_process_that_died_are_answered_once_by_others(tmp_path: Path) -> None:
    """This includes the rows that the process had received in advance."""
    load = {"folder": tmp_path, "deaths": {"2": 1, "39": 1}}
    assert (answered(load, num_workers=2), len(list(tmp_path.iterdir()))) == ([row.id for row in ROWS], 2)


def test_processes_that_die_end_no_run_while_there_are_answers_between(tmp_path: Path) -> None:
    load = {"folder": tmp_path, "deaths": {"0": 2, "9": 1, "19": 2}}
    assert (answered(load, num_workers=1), len(list(tmp_path.iterdir()))) == ([row.id for row in ROWS], 5)


@pytest.mark.slow
def test_three_processes_that_die_one_after_the_other_end_a_run(tmp_path: Path) -> None:
    with pytest.raises(InferError, match=r"3 processes died in a row \(exit status 3\), perhaps because the memory"):
        answered({"folder": tmp_path, "deaths": {"5": 3}}, num_workers=1)


def test_a_process_that_cannot_load_the_model_ends_the_run_with_its_reason() -> None:
    with pytest.raises(InferError, match="no such model"):
        answered({"cannot load": True}, num_workers=1)
