"""Rows of `/v1/embeddings`, `/v1/rerank` and `/v1/classify`: their lines have the routes' answers."""

import json
from typing import Any

import pytest
import torch

from infer import LLM
from infer.engine.requests.request_options import RequestOptions
from infer.serving.batch_file.answering import answer_rows
from infer.serving.batch_file.row import read_rows
from infer.serving.batch_file.settings import BatchSettings, Line

SETTINGS = BatchSettings("tiny", 0, 4, {}, RequestOptions())


def answered(llm: LLM, url: str, **body: Any) -> dict[str, Any]:
    """Return the line of a row."""
    lines = list[Line]()
    row = json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body})
    answer_rows(llm, read_rows([row]), SETTINGS, lines.append)
    (line,) = lines
    found: dict[str, Any] = json.loads(line.text)
    assert line.has_failed == (found["error"] is not None)
    return found


def test_a_row_of_embeddings_has_the_library_s_vectors(embedder: LLM) -> None:
    texts = ["hello", "x" * 999]
    asked = {"prompt_name": "query", "dimensions": 8, "truncate": True}
    line = answered(embedder, "/v1/embeddings", input=texts, odd=1, **asked)
    body = line["response"]["body"]
    with pytest.warns(UserWarning, match="were cut"):
        expected = embedder.embed(texts, **asked)
    assert torch.equal(torch.tensor([each["embedding"] for each in body["data"]]), expected)
    assert body["infer"]["warnings"] == ["odd is not known and was ignored", "1 of 2 texts were cut to 256 tokens"]
    assert line == answered(embedder, "/v1/embeddings", input=texts, odd=1, **asked)


def test_a_row_of_rerank_has_the_library_s_scores(judge: LLM) -> None:
    documents = ["a roof", "a bridge"]
    body = answered(judge, "/v1/rerank", query="cats", documents=documents, return_documents=True)["response"]["body"]
    found = [(each["index"], each["relevance_score"], each["document"]["text"]) for each in body["results"]]
    assert found == [(each.index, each.score, each.document) for each in judge.rerank("cats", documents)]
    assert body["usage"]["total_tokens"] > 0


def test_a_row_of_classify_has_the_library_s_labels(labeller: LLM) -> None:
    body = answered(labeller, "/v1/classify", input=["a roof", "x" * 999], truncate=True)["response"]["body"]
    with pytest.warns(UserWarning, match="were cut"):
        expected = labeller.classify(["a roof", "x" * 999], truncate=True)
    for found, each in zip(body["data"], expected, strict=True):
        assert found["label"] == each.label
        assert sorted(found["probs"], reverse=True) == list(each.probabilities)
    assert body["id"].startswith("classify-")
    assert body["infer"]["warnings"] == ["1 of 2 texts were cut to 256 tokens"]


def test_an_embedder_ranks_by_its_vectors(embedder: LLM) -> None:
    body = answered(embedder, "/v1/rerank", query="cats", documents=["a roof", "a bridge"])["response"]["body"]
    found = [(each["index"], each["relevance_score"]) for each in body["results"]]
    assert found == [(each.index, each.score) for each in embedder.rerank("cats", ["a roof", "a bridge"])]


def test_a_request_that_a_model_cannot_compute_is_the_line_s_error(embedder: LLM, judge: LLM, labeller: LLM) -> None:
    for llm, path, body, message in (
        (labeller, "rerank", {"query": "a", "documents": ["b"]}, "not a reranker"),
        (judge, "embeddings", {"input": "a"}, "not trained for embeddings"),
        (embedder, "embeddings", {"input": "x" * 999}, "the context holds"),
        (judge, "classify", {"input": "a"}, "not a classifier"),
        (judge, "rerank", {"query": "a"}, "documents is missing"),
    ):
        assert message in answered(llm, f"/v1/{path}", **body)["error"]["message"]
    assert answered(judge, "/v1/embeddings", input="a", pooling="last")["error"] is None
