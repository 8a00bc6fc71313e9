"""`infer embed`, `infer rerank` and `infer classify`: lines in, vectors, ranks or labels out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cases import cases
from commands import Ran, refused, run
from infer import LLM
from infer.cli import subcommands

TEXTS = ["hello", "", "a longer text"]


@pytest.fixture(autouse=True)
def _any_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subcommands, "check_options", lambda options, params: None)


def run_with(llm: LLM, *arguments: object) -> Ran:
    """Run a command with a model that is loaded already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subcommands, "load_model", lambda options: llm)
        return run(*arguments)


def test_lines_become_json_lines_or_an_array(embedder: LLM, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    expected = embedder.embed(TEXTS, prompt_name="query", dimensions=8)
    asked = ["embed", tmp_path / "texts.txt", "--prompt-name", "query", "--dimensions", "8"]
    found = run_with(embedder, *asked).records()
    assert found == [{"index": index, "embedding": each.tolist()} for index, each in enumerate(expected)]
    run_with(embedder, *asked, "-o", tmp_path / "vectors.npy")
    assert np.array_equal(np.load(tmp_path / "vectors.npy"), expected.numpy())
    run_with(embedder, *asked, "-o", tmp_path / "vectors.jsonl")
    assert len((tmp_path / "vectors.jsonl").read_text().splitlines()) == 3


def test_json_lines_keep_their_ids(embedder: LLM, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "hello", "id": "a", "other": 1}\n"plain"\n')
    first, second = run_with(embedder, "embed", tmp_path / "texts.jsonl").records()
    assert (first["id"], first["index"], second["index"], "id" in second) == ("a", 0, 1, False)


def test_documents_are_printed_by_relevance(judge: LLM, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    expected = judge.rerank("cats", TEXTS)
    asked = ["rerank", "cats", tmp_path / "texts.txt"]
    assert run_with(judge, *asked).out.splitlines() == [f"{each.score:.4f}  {each.document}" for each in expected]
    found = run_with(judge, *asked, "--json", "-n", "2").records()
    assert found == [{"index": x.index, "score": x.score, "document": x.document} for x in expected[:2]]


def test_lines_have_their_labels(labeller: LLM, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "a", "text_pair": "b", "id": "x"}\n"a"\n')
    (pair, text) = labeller.classify([("a", "b"), "a"])
    expected = [{"index": 0, "id": "x"} | pair.to_json(), {"index": 1} | text.to_json()]
    assert run_with(labeller, "classify", tmp_path / "texts.jsonl").records() == expected
    run_with(labeller, "classify", tmp_path / "texts.jsonl", "-o", tmp_path / "labels.jsonl")
    assert [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()] == expected


@cases(
    "name content options message",
    ("t.txt", "", [], "has no texts: write one per line"),
    ("t.jsonl", '{"text": 5}', [], 'line 1 must be a string or an object with "text"'),
    ("t.jsonl", '"a"\n{', [], "line 2 is not JSON"),
    ("t.txt", "a\n" * 70 + "x" * 999, [], "text 70: the text has 1000 tokens"),
    ("t.txt", "a", ["--prompt-name", "odd"], "prompt_name must be one of 'query', 'document'"),
    ("t.txt", "a", ["-o", "/no/such/folder/a.npy"], "the output /no/such/folder/a.npy cannot be written"),
)
def test_texts_that_cannot_be_embedded_give_one_line(
    embedder: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, content: str, options: Any, message: str
) -> None:
    monkeypatch.setattr(subcommands, "load_model", lambda options: embedder)
    (tmp_path / name).write_text(content)
    assert message in refused("embed", tmp_path / name, *options)


@pytest.mark.slow
def test_a_cut_is_noted(embedder: LLM, judge: LLM, labeller: LLM, tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("a\n" + "x" * 9999)
    for llm, command, limit in ((embedder, "embed", 256), (judge, "rerank q", 1024), (labeller, "classify", 256)):
        told = run_with(llm, *command.split(), path, "--truncate").err
        assert f"1 of 2 texts were cut to {limit} tokens" in told
