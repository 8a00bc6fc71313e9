"""Rows of `/v1/embeddings`, `/v1/rerank` and `/v1/classify`: the line with their vectors, scores or labels."""

from typing import Any

import msgspec

from infer.engine.texts.text_ids import TextIds
from infer.errors import InvalidRequestError
from infer.llm import LLM
from infer.serving.batch_file.result_line import texts_line
from infer.serving.batch_file.row import Row
from infer.serving.batch_file.settings import Line
from infer.serving.protocols.retrieval_bodies import (
    ClassifyBody,
    EmbeddingsBody,
    documents_of_body,
    embeddings_of,
    labelled,
    rerank_results,
    texts_of,
    texts_or_pairs_of,
    vector_options,
)
from infer.text_tasks import TextTask, classifier_of, classify, embed, rerank, together


def line_of_texts(llm: LLM, row: Row, model: str) -> Line:
    """Return the line of a row. Raises InvalidRequestError if the model cannot compute it."""
    task = _task_of(llm, row)
    host = llm._opened
    texts = task.prepare(lambda: None)
    (result,) = host.loop.call(together([(task, texts)])).get()
    return _line_of(llm, row, result, texts, model)


def _task_of(llm: LLM, row: Row) -> TextTask[Any]:
    """Return the task of a row. Raises InvalidRequestError if the model has no vectors of its own."""
    host, body = llm._opened, row.texts
    if isinstance(body, EmbeddingsBody):
        if host.settings.heads.embedder is None and body.pooling is None:
            raise InvalidRequestError("this model was not trained for embeddings: give pooling to use it anyway")
        return embed(host, texts_of(body.input), vector_options(body))
    assert body is not None
    if isinstance(body, ClassifyBody):
        return classify(host, texts_or_pairs_of(body.input), truncate=bool(body.truncate))
    documents, truncate = documents_of_body(body), bool(body.truncate)
    return rerank(host, body.query, documents, body.top_n, body.instruction, truncate=truncate)


def _line_of(llm: LLM, row: Row, result: Any, texts: TextIds, model: str) -> Line:
    body, field, items = row.texts, "data", list[Any]()
    assert body is not None
    if isinstance(body, EmbeddingsBody):
        items += embeddings_of(result.numpy(), body.encoding_format)
    elif isinstance(body, ClassifyBody):
        items += labelled(result, classifier_of(llm._opened).labels)
    else:
        field, items = "results", [*rerank_results(result, body)]
    warnings = [*row.warnings, *([texts.warning] if texts.warning else [])]
    return texts_line(row, {field: msgspec.to_builtins(items)}, texts.num_tokens, model, warnings)
