"""Rows of `/v1/embeddings`, `/v1/rerank` and `/v1/classify`: the line with their vectors, scores or labels."""

from infer.engine.texts.classification import classifier_of, classify, texts_to_classify
from infer.engine.texts.embedding import embed, texts_to_embed
from infer.engine.texts.similarity import scoring
from infer.engine.texts.vector_options import ranked
from infer.errors import InvalidRequestError
from infer.llm import LLM
from infer.serving.batch_file.result_line import texts_line
from infer.serving.batch_file.row import Row
from infer.serving.batch_file.settings import Line
from infer.serving.protocols.retrieval_bodies import (
    ClassifyBody,
    EmbeddingsBody,
    RerankBody,
    documents_of_body,
    texts_of,
    texts_or_pairs_of,
    vector_options,
    written,
)


def line_of_texts(llm: LLM, row: Row, model: str) -> Line:
    """Return the line of a row. Raises InvalidRequestError if the model cannot compute it."""
    if isinstance(row.texts, EmbeddingsBody):
        return _vectors(llm, row, row.texts, model)
    if isinstance(row.texts, ClassifyBody):
        return _labels(llm, row, row.texts, model)
    assert row.texts is not None
    return _ranks(llm, row, row.texts, model)


def _vectors(llm: LLM, row: Row, body: EmbeddingsBody, model: str) -> Line:
    host, options = llm._opened, vector_options(body)
    if host.facts.heads.embedder is None and body.pooling is None:
        raise InvalidRequestError("this model was not trained for embeddings: give pooling to use it anyway")
    ids = texts_to_embed(host, texts_of(body.input), options)
    vectors = host.loop.call(embed(host, ids, options)).get().numpy()
    data = [
        {"object": "embedding", "index": index, "embedding": written(each, body.encoding_format)}
        for index, each in enumerate(vectors)
    ]
    return texts_line(row, {"data": data}, ids.num_tokens, model, _warnings(row, ids.warning))


def _ranks(llm: LLM, row: Row, body: RerankBody, model: str) -> Line:
    host, documents = llm._opened, documents_of_body(body)
    pairs = [(body.query, each) for each in documents]
    ids, work = scoring(host, pairs, body.instruction, truncate=bool(body.truncate))
    results = [
        {"index": each.index, "relevance_score": each.score}
        | ({"document": {"text": each.document}} if body.return_documents else {})
        for each in ranked(host.loop.call(work).get(), documents, body.top_n)
    ]
    return texts_line(row, {"results": results}, ids.num_tokens, model, _warnings(row, ids.warning))


def _labels(llm: LLM, row: Row, body: ClassifyBody, model: str) -> Line:
    host = llm._opened
    ids = texts_to_classify(host, texts_or_pairs_of(body.input), truncate=bool(body.truncate))
    labels = classifier_of(host).labels
    data = [
        {"index": index, "label": labels[each.index(max(each))], "probs": each, "num_classes": len(labels)}
        for index, each in enumerate(host.loop.call(classify(host, ids)).get())
    ]
    return texts_line(row, {"data": data}, ids.num_tokens, model, _warnings(row, ids.warning))


def _warnings(row: Row, warning: str) -> list[str]:
    return [*row.warnings, *([warning] if warning else [])]
