"""`infer embed`, `infer rerank` and `infer classify`: lines in, vectors, ranks or labels out."""

import json
from pathlib import Path

import numpy as np
import pytest

from infer import LLM
from infer.cli import main, subcommands

Capture = pytest.CaptureFixture[str]
TEXTS = ["hello", "", "a longer text"]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> list[LLM]:
    models = list[LLM]()
    monkeypatch.setattr(subcommands, "load_model", lambda options: models[0])
    monkeypatch.setattr(subcommands, "check_options", lambda options, params: None)
    return models


def test_lines_become_json_lines_or_an_array(embedder: LLM, use: list[LLM], tmp_path: Path, capsys: Capture) -> None:
    use.append(embedder)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    expected = embedder.embed(TEXTS, prompt_name="query", dimensions=8)
    asked = ["embed", str(tmp_path / "texts.txt"), "--prompt-name", "query", "--dimensions", "8"]
    assert main(asked) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found == [{"index": index, "embedding": each.tolist()} for index, each in enumerate(expected)]
    assert main([*asked, "-o", str(tmp_path / "vectors.npy")]) == 0
    assert np.array_equal(np.load(tmp_path / "vectors.npy"), expected.numpy())
    assert main([*asked, "-o", str(tmp_path / "vectors.jsonl")]) == 0
    assert len((tmp_path / "vectors.jsonl").read_text().splitlines()) == 3


def test_json_lines_keep_their_ids(embedder: LLM, use: list[LLM], tmp_path: Path, capsys: Capture) -> None:
    use.append(embedder)
    (tmp_path / "texts.jsonl").write_text('{"text": "hello", "id": "a", "other": 1}\n"plain"\n')
    assert main(["embed", str(tmp_path / "texts.jsonl")]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["id"], first["index"], second["index"], "id" in second) == ("a", 0, 1, False)


def test_documents_are_printed_by_relevance(judge: LLM, use: list[LLM], tmp_path: Path, capsys: Capture) -> None:
    use.append(judge)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    expected = judge.rerank("cats", TEXTS)
    assert main(["rerank", "cats", str(tmp_path / "texts.txt")]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{each.score:.4f}  {each.document}" for each in expected]
    assert main(["rerank", "cats", str(tmp_path / "texts.txt"), "--json", "-n", "2"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found == [{"index": x.index, "score": x.score, "document": x.document} for x in expected[:2]]


def test_lines_have_their_labels(labeller: LLM, use: list[LLM], tmp_path: Path, capsys: Capture) -> None:
    use.append(labeller)
    (tmp_path / "texts.jsonl").write_text('{"text": "a", "text_pair": "b", "id": "x"}\n"a"\n')
    (pair, text) = labeller.classify([("a", "b"), "a"])
    expected = [{"index": 0, "id": "x"} | pair.to_json(), {"index": 1} | text.to_json()]
    assert main(["classify", str(tmp_path / "texts.jsonl")]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == expected
    assert main(["classify", str(tmp_path / "texts.jsonl"), "-o", str(tmp_path / "labels.jsonl")]) == 0
    assert [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()] == expected
    (tmp_path / "long.txt").write_text("a\n" + "x" * 9999)
    assert main(["classify", str(tmp_path / "long.txt"), "--truncate"]) == 0
    assert "1 of 2 texts were cut to 256 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("t.txt", "", [], "has no texts: write one per line"),
        ("t.jsonl", '{"text": 5}', [], 'line 1 must be a string or an object with "text"'),
        ("t.jsonl", '"a"\n{', [], "line 2 is not JSON"),
        ("t.txt", "a\n" * 70 + "x" * 999, [], "text 70: the text has 1000 tokens"),
        ("t.txt", "a", ["--prompt-name", "odd"], "prompt_name must be one of 'query', 'document'"),
        ("t.txt", "a", ["-o", "/no/such/folder/a.npy"], "the output /no/such/folder/a.npy cannot be written"),
    ],
)
def test_texts_that_cannot_be_embedded_give_one_line(
    embedder: LLM,
    use: list[LLM],
    tmp_path: Path,
    capsys: Capture,
    name: str,
    content: str,
    options: list[str],
    message: str,
) -> None:
    use.append(embedder)
    (tmp_path / name).write_text(content)
    assert main(["embed", str(tmp_path / name), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_cut_is_noted(embedder: LLM, judge: LLM, use: list[LLM], tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "t.txt").write_text("a\n" + "x" * 9999)
    use.append(embedder)
    assert main(["embed", str(tmp_path / "t.txt"), "--truncate"]) == 0
    assert "1 of 2 texts were cut to 256 tokens" in capsys.readouterr().err
    use[0] = judge
    assert main(["rerank", "q", str(tmp_path / "t.txt"), "--truncate"]) == 0
    assert "1 of 2 texts were cut to 1024 tokens" in capsys.readouterr().err
