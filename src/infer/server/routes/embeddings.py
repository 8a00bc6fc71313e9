"""`/v1/embeddings`: convert texts or ids to vectors."""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal, final

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from infer.errors import InvalidRequestError
from infer.protocols.bodies import Body
from infer.protocols.params import prompts_of, refusal
from infer.protocols.refusals import refuse
from infer.request_limits import MAX_TEXTS
from infer.server.answer_types import Count
from infer.server.asking import enter, text_tokens, while_connected
from infer.server.call import call_of
from infer.server.door import Arrival
from infer.server.endpoint import post
from infer.server.routes.served_models import check_model
from infer.server.server_state import ServerState

Encoding = Literal["float", "base64"]


@final
class EmbeddingsBody(Body, kw_only=True):
    """OpenAI's fields, and `pooling`. Vectors have length 1. With `dimensions`, the shortened vectors are scaled to
    length 1.
    """

    input: str | Annotated[list[Any], Meta(min_length=1, max_length=MAX_TEXTS)]
    encoding_format: Encoding | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    pooling: Literal["mean", "last"] | None = None  # the model's own unless given, else the mean


async def embeddings(request: Request, state: ServerState, body: EmbeddingsBody) -> Response:
    llm = state.llm()
    check_model(request, state, body.model)
    host, texts = llm.host, texts_of(body.input)
    if not (state.settings.allow_embeddings or host.settings.pooling):
        message = "this model was not trained for embeddings: start the server with --embeddings to have them anyway"
        raise refuse(message, "model", "unsupported_model")
    most = llm.llm.architecture.hidden_size
    if (dimensions := body.dimensions or most) > most:
        message = f"dimensions must be at most {most}, got {dimensions}"
        raise refuse(message, "dimensions")
    await enter(request, state, Arrival("", num_prompt_tokens=text_tokens(texts), num_answer_tokens=0))

    async def embed() -> bytes:
        ids = await host.answers.prepare(lambda check: [host.requests.encode(text) for text in texts])
        found = await llm.embed(ids, body.pooling)
        num_tokens = sum(map(len, ids))
        # Vectors become text in a thread: 2,048 of them take the loop's time.
        return await host.answers.prepare(
            lambda check: msgspec.json.encode(
                answer_of(call_of(request).model, found.numpy(), dimensions, body.encoding_format, num_tokens)
            )
        )

    try:
        return Response(await while_connected(request, embed()), media_type="application/json")
    except InvalidRequestError as error:
        raise refusal(error, "input") from error


def texts_of(given: str | Sequence[Any]) -> list[Any]:
    """Return the inputs as texts or lists of ids. Raises ApiError."""
    texts = prompts_of(given, "input")
    for index, text in enumerate(texts):
        if len(text) == 0:
            path = "input" if isinstance(given, str) else f"input[{index}]"
            raise refuse(f"{path} must not be empty", path)
    return texts


class Embedding(Struct, tag_field="object", tag="embedding"):
    index: Count
    embedding: list[float] | str


class EmbeddingsUsage(Struct):
    prompt_tokens: Count
    total_tokens: Count


class Embeddings(Struct, tag_field="object", tag="list"):
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


def answer_of(model: str, vectors: Any, dimensions: int, encoding: Encoding | None, num_tokens: int) -> Embeddings:
    """Return the answer. `vectors` is an array `[texts, hidden]` of float32, whose vectors have length 1."""
    data = [Embedding(index, _written(_first(each, dimensions), encoding)) for index, each in enumerate(vectors)]
    return Embeddings(data, model, EmbeddingsUsage(num_tokens, num_tokens))


def _first(vector: Any, dimensions: int) -> Any:
    if dimensions == len(vector):
        return vector
    first = vector[:dimensions].astype("float64")
    length = float((first**2).sum()) ** 0.5
    return (first / length if length else first).astype("float32")


def _written(vector: Any, encoding: Encoding | None) -> str | list[float]:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    found: list[float] = vector.tolist()
    return found


ROUTES = [post("/v1/embeddings", embeddings, "Convert texts to vectors", EmbeddingsBody, Embeddings, "embeddings")]
