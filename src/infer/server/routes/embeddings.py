"""`/v1/embeddings`: convert texts or ids to vectors."""

import base64
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, final

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from infer.engine.vector_options import VectorOptions
from infer.errors import InvalidRequestError
from infer.protocols.bodies import Body
from infer.protocols.params import prompts_of, refusal
from infer.protocols.refusals import refuse
from infer.request_limits import MAX_TEXTS
from infer.server.answer_types import Answer, Count
from infer.server.asking import enter, text_tokens, while_connected
from infer.server.call import call_of
from infer.server.door import Arrival
from infer.server.endpoint import post
from infer.server.replies import with_warnings
from infer.server.routes.served_models import check_model
from infer.server.server_state import ServerState

Encoding = Literal["float", "base64"]
_OWN_FIELDS = ("dimensions", "prompt_name")


@final
class EmbeddingsBody(Body, kw_only=True):
    """OpenAI's fields, and those of `LLM.embed`. Vectors have length 1, also if `dimensions` shortens them."""

    input: str | Annotated[list[Any], Meta(min_length=1, max_length=MAX_TEXTS)]
    encoding_format: Encoding | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    pooling: Literal["mean", "last"] | None = None  # the model's own unless given, else the mean
    prompt_name: str | None = None
    normalize: bool | None = None
    truncate: bool | None = None


async def embeddings(request: Request, state: ServerState, body: EmbeddingsBody) -> Response:
    llm = state.llm()
    check_model(request, state, body.model)
    host, texts = llm.host, texts_of(body.input)
    if not (state.settings.allow_embeddings or host.settings.pooling):
        message = "this model was not trained for embeddings: start the server with --embeddings to have them anyway"
        raise refuse(message, "model", "unsupported_model")
    options = VectorOptions(
        body.pooling,
        body.prompt_name,
        body.dimensions,
        normalize=body.normalize is not False,
        truncate=bool(body.truncate),
    )
    await enter(request, state, Arrival("", num_prompt_tokens=text_tokens(texts), num_answer_tokens=0))
    call = call_of(request)

    async def embedded() -> bytes:
        vectors, ids = await llm.compute_vectors(texts, options)
        call.warnings += [ids.warning] if ids.warning else []
        answer = partial(answer_of, call.model, vectors.numpy(), body.encoding_format, ids.num_tokens)
        # Vectors become text in a thread: 2,048 of them take the loop's time.
        return await host.answers.prepare(lambda check: msgspec.json.encode(with_warnings(answer(), call)))

    try:
        return Response(await while_connected(request, embedded()), media_type="application/json")
    except InvalidRequestError as error:
        raise refuse_of_texts(error) from error


def refuse_of_texts(error: InvalidRequestError) -> InvalidRequestError:
    """Return the library's error about texts with the name of the body's field."""
    return refuse(str(error), error.param) if error.param in _OWN_FIELDS else refusal(error, "input")


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


class Embeddings(Answer, tag_field="object", tag="list"):
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


def answer_of(model: str, vectors: Any, encoding: Encoding | None, num_tokens: int) -> Embeddings:
    """Return the answer. `vectors` is an array `[texts, size]` of float32."""
    data = [Embedding(index, _written(each, encoding)) for index, each in enumerate(vectors)]
    return Embeddings(data=data, model=model, usage=EmbeddingsUsage(num_tokens, num_tokens))


def _written(vector: Any, encoding: Encoding | None) -> str | list[float]:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    found: list[float] = vector.tolist()
    return found


ROUTES = [post("/v1/embeddings", embeddings, "Convert texts to vectors", EmbeddingsBody, Embeddings, "embeddings")]
