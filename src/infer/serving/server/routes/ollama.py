"""`/api/…`: Ollama's API. `distributed.front` has the lists of a server of several models.

`/api/pull` downloads a model from the hub into its local cache, with its progress as lines.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Collection
from functools import partial
from math import inf
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

import infer
from infer.errors import InferError
from infer.models.catalog.model_facts import ModelFacts
from infer.serving.protocols.api_errors import ApiError
from infer.serving.protocols.events import LINES, Count, Output, event
from infer.serving.protocols.fields import refuse
from infer.serving.protocols.ollama import (
    LoadedModel,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaModelBody,
    OllamaModels,
    OllamaShape,
    ShownModel,
    listed,
    nanoseconds,
    shown_model,
)
from infer.serving.protocols.retrieval import EmbeddingsBody
from infer.serving.server.endpoint import ApiRequest, ApiRoute, EventStream, get, json_response, known_name, post
from infer.serving.server.routes.retrieval import embed
from infer.serving.server.routes.served_models import facts_of, fetch, is_at_hand, is_fetched
from infer.system.spellings import plain_name

API_VERSION = "0.14.0"  # the first Ollama with all of its routes that are here, /v1/messages too; clients compare it
_REFUSALS = {
    "/api/copy": "models are not copied: give a name with --served-model-name at the server's start",
    "/api/create": "models are not created here: use infer quantize, and serve the file",
    "/api/delete": "models are not deleted over HTTP: delete the file, or use the hub's own tool for its cache",
    "/api/push": "models are not uploaded here: use the hub's own tool",
}


class OllamaStatus(Struct, kw_only=True):
    """The state of a download or another change of models. A download has its bytes; `digest` is the model's name."""

    status: str
    digest: str | UnsetType = UNSET
    total: Count | UnsetType = UNSET
    completed: Count | UnsetType = UNSET


_SUCCESS = OllamaStatus(status="success")


async def pull(request: ApiRequest, body: OllamaModelBody, known: Collection[str] | None = None) -> Response:
    """Download a model, unless it is on this machine or served: `known`, or else this server's own names.

    If the client disconnects, the download ends, and the next download of this model resumes it. Raises ApiError 403 if
    clients may not download.
    """
    known = request.server.names if known is None else known
    name = await asyncio.to_thread(_name_to_fetch, known_name(body.model, known) or "", known)
    if name is not None and not request.server.settings.allow_pull:
        message = f"clients may not download {name!r:.80} here: run infer pull, or start the server with --allow-pull"
        raise ApiError(403, message, code="pull_not_allowed")
    if body.stream is False:
        await request.while_connected(_last_of(_progress(name)))
        return json_response(_SUCCESS)
    return EventStream(_progress(name), comment_seconds=inf, fail=OllamaShape.failure, media_type=LINES)


def _name_to_fetch(model: str, known: Collection[str]) -> str | None:
    """Return the name of a model on the hub, or None if it is on this machine. Raises BodyError for any other name."""
    plain = plain_name(model)
    if model in known or is_at_hand(plain):
        return None
    if (has_files := is_fetched(plain)) is None:
        message = f"{model!r:.80} is not a name on the hub: write org/repo, or org/repo:Q4_K_M for a GGUF file"
        raise refuse(message, "model")
    return None if has_files else plain


async def _progress(name: str | None) -> AsyncGenerator[bytes, None]:
    """Yield the states of a download until its end, each as a line. Raises the errors of `fetch`."""
    yield event(OllamaStatus(status="pulling manifest"), LINES)
    if name is not None:
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[bytes | None]()
        has_left = threading.Event()

        def report(num_done: int, total: int) -> None:
            if has_left.is_set():
                raise InferError(f"the download of {name} was cancelled")
            status = OllamaStatus(status=f"pulling {name}", digest=name, total=total, completed=num_done)
            loop.call_soon_threadsafe(arrived.put_nowait, event(status, LINES))

        fetching = asyncio.create_task(asyncio.to_thread(fetch, name, report))
        fetching.add_done_callback(lambda task: arrived.put_nowait(None))
        try:
            while (sent := await arrived.get()) is not None:
                yield sent
            await fetching
        finally:
            has_left.set()
            fetching.add_done_callback(lambda task: task.cancelled() or task.exception())
    yield event(_SUCCESS, LINES)


async def _last_of(lines: AsyncGenerator[bytes, None]) -> None:
    async for _ in lines:
        pass


class OllamaVersion(Struct):
    """The version of Ollama whose API this is, and our own."""

    version: str
    infer: str


class OllamaVectors(Output, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: Count
    load_duration: Count
    prompt_eval_count: Count


class OllamaVector(Output, kw_only=True):
    embedding: list[float]


async def embed_texts(request: ApiRequest, body: OllamaEmbedBody) -> Response:
    call = request.call

    def make_answer(vectors: Any, num_tokens: int) -> OllamaVectors:
        return OllamaVectors(
            model=call.model,
            embeddings=vectors.tolist(),
            total_duration=nanoseconds(call.seconds),
            load_duration=nanoseconds(call.load_seconds),
            prompt_eval_count=num_tokens,
        )

    meant = EmbeddingsBody(
        model=body.model,
        input=body.input or [],
        dimensions=body.dimensions or None,
        normalize=True,
        truncate=body.truncate is not False,
    )
    return await embed(request, meant, make_answer)


async def embed_text(request: ApiRequest, body: OllamaEmbeddingsBody) -> Response:
    meant = EmbeddingsBody(
        model=body.model, input=body.prompt or [], normalize=False, truncate=body.truncate is not False
    )
    return await embed(request, meant, lambda vectors, _: OllamaVector(embedding=vectors.ravel().tolist()))


# Models


async def version(request: ApiRequest) -> OllamaVersion:
    return OllamaVersion(API_VERSION, infer.__version__)


async def tags(request: ApiRequest) -> OllamaModels:
    facts = await facts_of(request.server.settings.model_path)
    return OllamaModels([listed(name, facts) for name in request.server.names])


async def running(request: ApiRequest) -> OllamaModels:
    host, facts = request.server.host(), await facts_of(request.server.settings.model_path)
    cache = None if host.reads_whole_texts else host.runner.cache
    num_bytes = (0 if facts is None else facts.num_bytes) + (0 if cache is None else cache.num_bytes)
    loaded = LoadedModel(num_bytes, host.model.max_seq_len)
    return OllamaModels([listed(request.server.settings.model, facts, loaded)])


async def show(request: ApiRequest, body: OllamaModelBody) -> Response:
    request.check_model(body.model)
    facts = await facts_of(request.server.settings.model_path)
    return shown_response(request.call.model, facts, request.server.host().model.max_seq_len)


def shown_response(name: str, facts: ModelFacts | None, context: int | None) -> Response:
    """Return the answer of /api/show. Raises ApiError 404 if the headers cannot be read."""
    if facts is None:
        raise ApiError(404, f"the headers of {name!r:.80} cannot be read: infer explain shows why", code="model_failed")
    return json_response(shown_model(name, facts, context))


async def refuse_change(request: ApiRequest, body: OllamaModelBody | None = None) -> Response:
    raise ApiError(400, _REFUSALS[request.url.path], code="unsupported")


_post = partial(post, shape=OllamaShape)
_get = partial(get, shape=OllamaShape)
ROUTES = [
    _post("/api/embed", embed_texts, "Convert texts to vectors", OllamaEmbedBody, OllamaVectors, "embeddings"),
    _post("/api/embeddings", embed_text, "Convert a text", OllamaEmbeddingsBody, OllamaVector, "embeddings"),
    _get("/api/version", version, "Show the version of Ollama's API", answer=OllamaVersion),
    _get("/api/tags", tags, "The models", answer=OllamaModels),
    _get("/api/ps", running, "List the loaded models", answer=OllamaModels),
    _post("/api/show", show, "Show the headers of a model", OllamaModelBody, ShownModel),
    _post("/api/pull", pull, "Download a model from the hub", OllamaModelBody, OllamaStatus, streams=True),
    _post("/api/copy", refuse_change, "Refused", OllamaModelBody, OllamaStatus),
    _post("/api/create", refuse_change, "Refused", OllamaModelBody, OllamaStatus),
    _post("/api/push", refuse_change, "Refused", OllamaModelBody, OllamaStatus),
    ApiRoute("DELETE", "/api/delete", refuse_change, "Refused", answer=OllamaStatus, shape=OllamaShape),
]
