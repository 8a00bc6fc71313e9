"""`/v1/embeddings`: convert texts or ids to vectors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from infer.errors import InvalidRequestError
from infer.serving.protocols.refusals import refuse
from infer.serving.protocols.retrieval_bodies import (
    EmbeddingsBody,
    Encoding,
    refusal_of_texts,
    texts_of,
    vector_options,
    written,
)
from infer.serving.server.answer_types import Answer, Count
from infer.serving.server.asking import enter, text_tokens, while_connected
from infer.serving.server.call import call_of
from infer.serving.server.door import Arrival
from infer.serving.server.endpoint import post
from infer.serving.server.replies import with_warnings
from infer.serving.server.routes.served_models import check_model
from infer.serving.server.server_state import ServerState


async def embeddings(request: Request, state: ServerState, body: EmbeddingsBody) -> Response:
    def make_answer(vectors: Any, num_tokens: int) -> Embeddings:
        return answer_of(call_of(request).model, vectors, body.encoding_format, num_tokens)

    return await embed(request, state, body, make_answer)


async def embed(
    request: Request, state: ServerState, body: EmbeddingsBody, make_answer: Callable[[Any, int], Answer]
) -> Response:
    """Return the answer that `make_answer` makes of the vectors (float32 `[texts, size]`) and the number of tokens."""
    llm, call = state.llm(), call_of(request)
    check_model(request, state, body.model)
    host, texts, options = llm.host, texts_of(body.input), vector_options(body)
    if not (state.settings.allow_embeddings or host.facts.heads.embedder):
        message = "this model was not trained for embeddings: start the server with --embeddings to use it anyway"
        raise refuse(message, "model", "unsupported_model")
    await enter(request, state, Arrival("", num_prompt_tokens=text_tokens(texts), num_answer_tokens=0))

    async def embedded() -> bytes:
        vectors, ids = await llm.compute_vectors(texts, options)
        call.warnings += [ids.warning] if ids.warning else []
        answer = partial(make_answer, vectors.numpy(), ids.num_tokens)
        # Vectors are encoded in a thread, because 2,048 of them would stop the event loop.
        return await host.answers.prepare(lambda check: msgspec.json.encode(with_warnings(answer(), call)))

    try:
        return Response(await while_connected(request, embedded()), media_type="application/json")
    except InvalidRequestError as error:
        raise refusal_of_texts(error, "input") from error


class Embedding(Struct, tag_field="object", tag="embedding"):
    index: Count
    embedding: list[float] | str


class EmbeddingsUsage(Struct):
    prompt_tokens: Count
    total_tokens: Count


class Embeddings(Answer, tag_field="object", tag="list"):
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


def answer_of(model: str, vectors: Any, encoding: Encoding | None, num_tokens: int) -> Embeddings:
    """Return the answer. `vectors` is an array `[texts, size]` of float32."""
    data = [Embedding(index, written(each, encoding)) for index, each in enumerate(vectors)]
    return Embeddings(data=data, model=model, usage=EmbeddingsUsage(num_tokens, num_tokens))


ROUTES = [post("/v1/embeddings", embeddings, "Convert texts to vectors", EmbeddingsBody, Embeddings, "embeddings")]
