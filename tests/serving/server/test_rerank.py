"""`/v1/rerank` and `/v1/score`: the shapes of Cohere, Jina and vLLM, with the scores of the library."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from torch.nn.functional import cosine_similarity

import embedding_model
from cases import cases
from infer import LLM
from infer.serving.server.app import ROUTES
from infer.serving.server.routes.openapi import document
from reranker_model import CONTEXT
from served import Served, served_model, serving

QUERY, DOCUMENTS = "cats", ["a roof", "a bridge", "a fire"]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/rerank": {"query": "a", "documents": ["b"], "return_documents": True},
    "/v1/score": {"text_1": "a", "text_2": "b"},
}


served = served_model("judge")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("models") / "embedder"
    embedding_model.make_embedding_model(folder, dense=[(40, True, "Tanh")], is_normalized=False)
    with LLM(folder, kv_type="f32") as llm:
        yield llm


compared = served_model("embedder")


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
@pytest.mark.parametrize("documents", [DOCUMENTS, [{"text": each, "id": 3} for each in DOCUMENTS]])
def test_documents_come_by_relevance(served: Served, judge: LLM, path: str, documents: list[Any]) -> None:
    body = {"model": "tiny", "query": QUERY, "documents": documents, "top_n": 2}
    answer = served.ask(path, **body)
    expected = judge.rerank(QUERY, DOCUMENTS, top_n=2)
    assert answer["results"] == [{"index": each.index, "relevance_score": each.score} for each in expected]
    assert answer["model"] == "tiny"
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    whole = served.ask(path, **body, return_documents=True)
    assert [each["document"]["text"] for each in whole["results"]] == [each.document for each in expected]


def test_names_of_other_servers_are_taken(served: Served, judge: LLM) -> None:
    body = {"query": QUERY, "texts": DOCUMENTS, "top_k": 1, "return_text": True, "instruct": "find", "max_chunks": 3}
    answer = served.ask("/rerank", **body)
    (expected,) = judge.rerank(QUERY, DOCUMENTS, 1, "find")
    found = {"index": expected.index, "relevance_score": expected.score, "document": {"text": expected.document}}
    assert answer["results"] == [found]
    assert "max_chunks" in answer["infer"]["warnings"][0]


def test_pairs_are_scored_in_their_order(served: Served, judge: LLM) -> None:
    scores = {each.document: each.score for each in judge.rerank(QUERY, DOCUMENTS)}
    expected = [scores[each] for each in DOCUMENTS]
    for first in (QUERY, [QUERY], [QUERY] * 3):
        answer = served.ask("/v1/score", text_1=first, text_2=DOCUMENTS)
        assert [each["score"] for each in answer["data"]] == expected
        assert [each["index"] for each in answer["data"]] == [0, 1, 2]


def test_an_embedder_scores_by_the_cosine_of_its_vectors(compared: Served, embedder: LLM) -> None:
    texts = [*DOCUMENTS, QUERY, DOCUMENTS[0]]
    vectors = embedder.embed(texts)
    assert not torch.allclose(vectors.norm(dim=1), torch.ones(len(texts)))
    expected = cosine_similarity(vectors, vectors[3][None])
    for first in (QUERY, [QUERY], [QUERY] * 5):
        answer = compared.ask("/v1/score", text_1=first, text_2=texts)
        found = torch.tensor([each["score"] for each in answer["data"]])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        assert answer["usage"]["prompt_tokens"] == sum(len(text) + 1 for text in [*texts, QUERY])  # a byte is a token
    others = [QUERY, "", *DOCUMENTS]
    pairs = compared.ask("/v1/score", text_1=others, text_2=texts)
    expected = cosine_similarity(vectors, embedder.embed(others))
    found = torch.tensor([each["score"] for each in pairs["data"]])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    alone = [compared.ask("/v1/score", text_1=a, text_2=b) for a, b in zip(others, texts, strict=True)]
    assert [each["data"][0]["score"] for each in alone] == [each["score"] for each in pairs["data"]]


def test_an_embedder_ranks_by_the_cosine_of_its_vectors(compared: Served, embedder: LLM) -> None:
    query, *vectors = embedder.embed([QUERY, *DOCUMENTS])
    cosines = cosine_similarity(torch.stack(vectors), query[None])
    order = cosines.argsort(descending=True).tolist()
    body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2, "return_documents": True}
    results = compared.ask("/v1/rerank", **body)["results"]
    assert [each["index"] for each in results] == order[:2]
    assert [each["document"]["text"] for each in results] == [DOCUMENTS[index] for index in order[:2]]
    assert [each["relevance_score"] for each in results] == pytest.approx(cosines[order[:2]].tolist(), abs=1e-5)


def test_no_cosine_is_above_1(compared: Served) -> None:
    texts = [f"{'again ' * (number % 7)}{number}" for number in range(30)]
    pairs = compared.ask("/v1/score", text_1=texts, text_2=texts)["data"]
    assert all(1 - 1e-6 < each["score"] <= 1 for each in pairs)


def test_an_embedder_refuses_what_only_rerankers_read(compared: Served) -> None:
    for path, body in BODIES.items():
        assert compared.refusal(path, **body, instruction="find")["param"] == "instruction"
    long = {"text_1": "a", "text_2": ["b", "x" * 999]}
    refused = compared.refusal("/v1/score", **long)
    assert (refused["code"], refused["message"][:8]) == ("context_length_exceeded", "text 1: ")
    answer = compared.ask("/v1/score", **long, truncate=True)
    assert answer["infer"]["warnings"] == [f"1 of 3 texts were cut to {embedding_model.CONTEXT} tokens"]


def test_a_model_with_other_uses_is_compared_if_the_server_may(llm: LLM) -> None:
    with serving(llm, model="tiny", allow_embeddings=True) as served:
        answer = served.ask("/v1/score", text_1="a", text_2="a")
    assert answer["data"][0]["score"] == pytest.approx(1)


def test_answers_are_as_described(served: Served) -> None:
    described = document(ROUTES)
    for path, body in BODIES.items():
        place = f"#/paths/{path.replace('/', '~1')}/post/responses/200/content/application~1json/schema"
        Draft202012Validator({**described, "$ref": place}).validate(served.ask(path, **body))


def test_a_long_document_is_refused_or_cut(served: Served) -> None:
    body = {"query": QUERY, "documents": ["a", "x" * 9999]}
    assert served.refusal("/v1/rerank", **body)["code"] == "context_length_exceeded"
    answer = served.ask("/v1/rerank", **body, truncate=True)
    assert answer["infer"]["warnings"] == [f"1 of 2 texts were cut to {CONTEXT} tokens"]


@cases(
    "path change param",
    ("/v1/rerank", {"documents": None}, "documents"),
    ("/v1/rerank", {"documents": []}, "documents"),
    ("/v1/rerank", {"documents": "b"}, "documents"),
    ("/v1/rerank", {"documents": [5]}, "documents[0]"),
    ("/v1/rerank", {"top_n": 0}, "top_n"),
    ("/v1/rerank", {"model": "other"}, "model"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
    ("/v1/score", {"model": "other"}, "model"),
)
def test_documents_that_cannot_be_ranked_are_refused(served: Served, path: str, change: Any, param: str) -> None:
    assert served.refusal(path, status=404 if param == "model" else 400, **BODIES[path] | change)["param"] == param


def test_a_model_for_neither_says_what_to_do(llm: LLM) -> None:
    with serving(llm, model="tiny") as served:
        assert "--reranker" in served.refusal("/v1/rerank", query="a", documents=["b"])["message"]
