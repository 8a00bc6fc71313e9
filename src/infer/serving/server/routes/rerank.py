"""`/v1/rerank` and `/v1/score`: how relevant documents are to a query.

A reranker reads the query and a document together. With a model for embeddings, the score is the cosine of their
vectors, as in vLLM.
"""

from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from infer.engine.texts.vector_options import Computed, ranked
from infer.errors import InvalidRequestError
from infer.serving.protocols.refusals import refuse
from infer.serving.protocols.retrieval_bodies import (
    RerankBody,
    RerankDocument,
    ScoreBody,
    documents_of_body,
    pairs_of_body,
    refusal_of_texts,
)
from infer.serving.server.answer_types import Answer, Count
from infer.serving.server.asking import enter, text_tokens, while_connected
from infer.serving.server.call import call_of
from infer.serving.server.door import Arrival
from infer.serving.server.endpoint import post
from infer.serving.server.replies import json_response
from infer.serving.server.routes.embeddings import EmbeddingsUsage
from infer.serving.server.routes.served_models import check_model
from infer.serving.server.server_state import ServerState


async def rerank(request: Request, state: ServerState, body: RerankBody) -> Response:
    documents, call = documents_of_body(body), call_of(request)
    check_model(request, state, body.model)
    pairs = [(body.query, each) for each in documents]
    scores, texts = await _scored(request, state, pairs, body, "documents")
    results = [
        RerankResult(each.index, each.score, RerankDocument(each.document) if body.return_documents else UNSET)
        for each in ranked(scores, documents, body.top_n)
    ]
    usage = EmbeddingsUsage(texts.num_tokens, texts.num_tokens)
    name = "rerank-" + call.id.removeprefix("req-")
    return json_response(RerankAnswer(id=name, model=call.model, results=results, usage=usage), call)


async def score(request: Request, state: ServerState, body: ScoreBody) -> Response:
    call = call_of(request)
    check_model(request, state, body.model)
    scores, texts = await _scored(request, state, pairs_of_body(body), body, "text_2")
    data = [Score(index, each) for index, each in enumerate(scores)]
    usage = EmbeddingsUsage(texts.num_tokens, texts.num_tokens)
    name = "score-" + call.id.removeprefix("req-")
    return json_response(ScoreAnswer(id=name, created=call.created, model=call.model, data=data, usage=usage), call)


async def _scored(
    request: Request, state: ServerState, pairs: Sequence[tuple[str, str]], body: RerankBody | ScoreBody, name: str
) -> Computed:
    """Return the scores of pairs. `name` is the field with the texts, for errors."""
    llm, may_compare = state.llm(), state.settings.allow_embeddings
    heads = llm.host.facts.heads
    if not (heads.reranker or heads.embedder or may_compare):
        message = (
            "this model is not a reranker and was not made for embeddings: serve a reranker, or start the server with "
            "--reranker for a copy of a reranker"
        )
        raise refuse(message, "model", "unsupported_model")
    await enter(request, state, Arrival("", num_prompt_tokens=text_tokens(pairs), num_answer_tokens=0))
    asked = llm.score_pairs(pairs, body.instruction, truncate=bool(body.truncate), may_compare=may_compare)
    try:
        computed = await while_connected(request, asked)
    except InvalidRequestError as error:
        raise refusal_of_texts(error, name) from error
    call_of(request).warnings += [computed.texts.warning] if computed.texts.warning else []
    return computed


class RerankResult(Struct):
    index: Count
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class RerankAnswer(Answer):
    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingsUsage


class Score(Struct, tag_field="object", tag="score"):
    index: Count
    score: float


class ScoreAnswer(Answer, tag_field="object", tag="list"):
    id: str
    created: Count
    model: str
    data: list[Score]
    usage: EmbeddingsUsage


ROUTES = [
    post(path, rerank, "Rank documents by their relevance to a query", RerankBody, RerankAnswer, "rerank")
    for path in ("/v1/rerank", "/v2/rerank")
]
ROUTES.append(post("/v1/score", score, "Score how relevant texts are to others", ScoreBody, ScoreAnswer, "rerank"))
