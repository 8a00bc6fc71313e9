"""`/v1/embeddings`, `/v1/rerank`, `/v1/score` and `/v1/classify`: vectors, scores and labels of texts.

A reranker reads the query and a document together. With a model for embeddings, the score is the cosine of their
vectors, as in vLLM. The labels have vLLM's shape, too.
"""

from collections.abc import Callable, Coroutine
from functools import partial
from itertools import starmap
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

from infer.outputs import ranked
from infer.serving.protocols.bodies import refusing
from infer.serving.protocols.events import Output, with_warnings
from infer.serving.protocols.fields import refuse
from infer.serving.protocols.retrieval import (
    ClassifyBody,
    Embeddings,
    EmbeddingsBody,
    EmbeddingsUsage,
    Labelled,
    ListOutput,
    RankedText,
    RerankBody,
    RerankOutput,
    Score,
    ScoreBody,
)
from infer.serving.server.door import Arrival
from infer.serving.server.endpoint import ApiRequest, post, text_tokens

_Ranked = RerankOutput | list[RankedText]  # as Cohere, or as Text Embeddings Inference
_Item = TypeVar("_Item")
_Call = Callable[[Any], Coroutine[Any, Any, Any]]  # of an `AsyncLLM`


async def embeddings(request: ApiRequest, body: EmbeddingsBody) -> Response:
    def make_answer(vectors: Any, num_tokens: int) -> Embeddings:
        usage = EmbeddingsUsage(num_tokens, num_tokens)
        return Embeddings(data=body.items(vectors), model=request.call.model, usage=usage)

    return await embed(request, body, make_answer)


async def embed(request: ApiRequest, body: EmbeddingsBody, make_answer: Callable[[Any, int], Output]) -> Response:
    """Return the answer that `make_answer` makes of the vectors (float32 `[texts, size]`) and the number of tokens."""
    host, call = request.server.host(), request.call
    request.check_model(body.model)
    texts, options = body.texts(), body.options()
    if not (request.server.settings.allow_embeddings or host.facts.heads.embedder):
        message = "this model was not trained for embeddings: start the server with --embeddings to use it anyway"
        raise refuse(message, "model", "unsupported_model")
    computed = await _compute(request, texts, lambda llm: llm.compute_vectors(texts, options))
    answer = partial(make_answer, computed.found.numpy(), computed.texts.num_tokens)
    # Vectors are encoded in a thread, because 2,048 of them would stop the event loop.
    encoded = host.loop.prepare(lambda check: msgspec.json.encode(with_warnings(answer(), call.warnings)))
    return Response(await request.while_connected(encoded), media_type="application/json")


async def rerank(request: ApiRequest, body: RerankBody, *, lists_texts: bool = False) -> _Ranked:
    """Rank documents.

    If `lists_texts`, a body with `texts` gets the list of Text Embeddings Inference. It has only the path `/rerank`,
    which clients of other servers use without /v1.
    """
    documents, call = body.document_texts(), request.call
    scores, num_tokens = await _score(request, body)
    best, usage = ranked(scores, documents, body.top_n), EmbeddingsUsage(num_tokens, num_tokens)
    if lists_texts and body.texts is not None:
        return body.ranked_texts(best)
    own_id = "rerank-" + call.id.removeprefix("req-")
    return RerankOutput(id=own_id, model=call.model, results=body.items(best), usage=usage)


async def score(request: ApiRequest, body: ScoreBody) -> ListOutput[Score]:
    scores, num_tokens = await _score(request, body)
    return _list_output(request, "score", list(starmap(Score, enumerate(scores))), num_tokens)


async def classify(request: ApiRequest, body: ClassifyBody) -> ListOutput[Labelled]:
    classifier = request.server.host().facts.heads.classifier
    request.check_model(body.model)
    texts, truncate = body.texts(), bool(body.truncate)
    if classifier is None:
        raise refuse("this model is not a classifier: serve a classifier", "model", "unsupported_model")
    computed = await _compute(request, texts, lambda llm: llm.compute_labels(texts, truncate=truncate))
    data = body.items(computed.found, classifier.labels)
    return _list_output(request, "classify", data, computed.texts.num_tokens)


async def _score(request: ApiRequest, body: RerankBody | ScoreBody) -> tuple[list[float], int]:
    """Return the scores of the body's pairs, and their number of tokens. A raw score of a reranker is its logit."""
    request.check_model(body.model)
    pairs, is_raw = body.pairs(), bool(body.raw_scores)
    heads, may_compare = request.server.host().facts.heads, request.server.settings.allow_embeddings
    if not (heads.reranker or heads.embedder or may_compare):
        message = (
            "this model is not a reranker and was not made for embeddings: serve a reranker, or start the server with "
            "--reranker for a copy of a reranker"
        )
        raise refuse(message, "model", "unsupported_model")

    options = {"truncate": bool(body.truncate), "may_compare": may_compare, "is_raw": is_raw}
    computed = await _compute(
        request, pairs, lambda llm: llm.score_pairs(pairs, body.instruction, **options), body.names
    )
    return computed.found, computed.texts.num_tokens


async def _compute(request: ApiRequest, texts: Any, call: _Call, names: tuple[str, ...] = ("input",)) -> Any:
    """Return the `Computed` of a call. `texts` count at the door; `names` are the fields of texts, for errors."""
    await request.enter(Arrival(request.call.key_name, num_prompt_tokens=text_tokens(texts), num_answer_tokens=0))
    with refusing(*names):
        computed = await request.while_connected(call(request.server.llm()))
    request.call.warnings += [computed.texts.warning] if computed.texts.warning else []
    return computed


def _list_output(request: ApiRequest, name: str, data: list[_Item], num_tokens: int) -> ListOutput[_Item]:
    call, usage = request.call, EmbeddingsUsage(num_tokens, num_tokens)
    own_id = f"{name}-{call.id.removeprefix('req-')}"
    return ListOutput(id=own_id, created=call.created, model=call.model, data=data, usage=usage)


_list_ranked = partial(rerank, lists_texts=True)
ROUTES = [
    post("/v1/embeddings", embeddings, "Convert texts to vectors", EmbeddingsBody, Embeddings, "embeddings"),
    *(
        post(path, rerank, "Rank documents by their relevance to a query", RerankBody, RerankOutput, "rerank")
        for path in ("/v1/rerank", "/v2/rerank")
    ),
    post("/rerank", _list_ranked, "Rank texts by their relevance to a query", RerankBody, _Ranked, "rerank"),
    post("/v1/score", score, "Score how relevant texts are to others", ScoreBody, ListOutput[Score], "rerank"),
    post("/v1/classify", classify, "Label texts", ClassifyBody, ListOutput[Labelled], "classify"),
]
