"""Clients of others for vectors and ranks return the library's results from tiny served models."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from infer import LLM
from served import Served, serving

cohere = pytest.importorskip("cohere")
langchain_cohere = pytest.importorskip("langchain_cohere")
langchain_documents = pytest.importorskip("langchain_core.documents")
langchain_openai = pytest.importorskip("langchain_openai")
llama_index = pytest.importorskip("llama_index.embeddings.openai_like")
openai = pytest.importorskip("openai")

TEXTS, QUERY = ["a roof", "a bridge", "a fire"], "cats"

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the clients


@pytest.fixture(scope="module")
def vectors(embedder: LLM) -> Iterator[Served]:
    with serving(embedder, model="tiny") as served:
        yield served


@pytest.fixture(scope="module")
def ranks(judge: LLM) -> Iterator[Served]:
    with serving(judge, model="tiny") as served:
        yield served


def close_to(expected: Any) -> Any:
    return [pytest.approx(each, abs=1e-6) for each in expected.tolist()]


@pytest.mark.parametrize("asked", [{}, {"dimensions": 8}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
def test_openai_s_client_gets_the_library_s_vectors(vectors: Served, embedder: LLM, asked: dict[str, Any]) -> None:
    with openai.OpenAI(base_url=f"{vectors.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="tiny", input=TEXTS, **asked)
    found = [each.embedding for each in answer.data]
    if asked.get("encoding_format") == "base64":  # the client does not decode it if a caller requested it
        assert all(isinstance(each, str) for each in found)
        return
    assert found == close_to(embedder.embed(TEXTS, dimensions=asked.get("dimensions")))
    assert answer.usage.prompt_tokens > 0


def test_langchain_embeds_documents_and_a_query(vectors: Served, embedder: LLM) -> None:
    # By default it sends ids of OpenAI's own tokenizer.
    settings: dict[str, Any] = {"api_key": "none", "dimensions": 16, "check_embedding_ctx_length": False}
    client = langchain_openai.OpenAIEmbeddings(model="tiny", base_url=f"{vectors.url}/v1", **settings)
    assert client.embed_documents(TEXTS) == close_to(embedder.embed(TEXTS, dimensions=16))
    (expected,) = close_to(embedder.embed([QUERY], dimensions=16))
    assert client.embed_query(QUERY) == expected
    assert asyncio.run(client.aembed_documents([QUERY])) == [expected]


def test_llama_index_embeds_texts_and_a_query(vectors: Served, embedder: LLM) -> None:
    client = llama_index.OpenAILikeEmbedding(model_name="tiny", api_base=f"{vectors.url}/v1", api_key="none")
    assert client.get_text_embedding_batch(TEXTS) == close_to(embedder.embed(TEXTS))
    assert [client.get_query_embedding(QUERY)] == close_to(embedder.embed([QUERY]))


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_cohere_s_clients_rank_documents(ranks: Served, judge: LLM, version: str) -> None:
    expected = judge.rerank(QUERY, TEXTS, top_n=2)
    if version == "v2":
        client = cohere.ClientV2(api_key="none", base_url=ranks.url)
        answer = client.rerank(model="tiny", query=QUERY, documents=TEXTS, top_n=2, max_tokens_per_doc=4096)
    else:
        client = cohere.Client(api_key="none", base_url=ranks.url)
        documents = [{"text": text, "title": "t"} for text in TEXTS]
        answer = client.rerank(model="tiny", query=QUERY, documents=documents, top_n=2, return_documents=True)
        assert [each.document.text for each in answer.results] == [each.document for each in expected]
    found = [(each.index, each.relevance_score) for each in answer.results]
    assert found == [(each.index, each.score) for each in expected]
    with pytest.raises(cohere.BadRequestError, match="documents"):
        client.rerank(model="tiny", query=QUERY, documents=[])


def test_langchain_s_reranker_keeps_the_best_documents(ranks: Served, judge: LLM) -> None:
    client = langchain_cohere.CohereRerank(model="tiny", base_url=ranks.url, cohere_api_key="none", top_n=2)
    documents = [langchain_documents.Document(page_content=text) for text in TEXTS]
    kept = client.compress_documents(documents, QUERY)
    found = [(each.page_content, each.metadata["relevance_score"]) for each in kept]
    assert found == [(each.document, each.score) for each in judge.rerank(QUERY, TEXTS, top_n=2)]
