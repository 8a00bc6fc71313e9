"""`/v1/models`: the served model, under each of its names. `distributed.shelf_front` shows several models."""

from collections.abc import Container
from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from infer.serving.server.answer_types import Count
from infer.serving.server.call import call_of
from infer.serving.server.endpoint import get
from infer.serving.server.http_errors import ApiError
from infer.serving.server.replies import json_response
from infer.serving.server.server_state import ServerState
from infer.system.spellings import plain_name

StatusValue = Literal["unloaded", "loading", "loaded", "unloading", "failed"]


class ModelStatus(Struct, omit_defaults=True):
    """The state of a model, if the server has several. `progress` is the loaded share of a model that is loading."""

    value: StatusValue
    progress: float | None = None
    error: str | None = None


class ServedModel(Struct, kw_only=True):
    """A name of a model. The context length is known after the model's headers were read.

    A server of several models shows their state, their tasks, and the memory that each uses or would use.
    """

    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    root: str
    parent: None
    max_model_len: Count | UnsetType = UNSET  # vLLM's name
    context_length: Count | UnsetType = UNSET  # OpenRouter's name
    status: ModelStatus | UnsetType = UNSET  # llama.cpp's name
    takes: list[str] | UnsetType = UNSET
    memory_bytes: Count | UnsetType = UNSET
    is_pinned: bool | UnsetType = UNSET


class ServedModels(Struct, tag_field="object", tag="list"):
    """The models. A server of several models also shows if clients may download others."""

    data: list[ServedModel]
    allow_pull: bool | UnsetType = UNSET


async def list_models(request: Request, state: ServerState) -> Response:
    return json_response(ServedModels([_model(state, name) for name in _names(state)]))


async def get_model(request: Request, state: ServerState) -> Response:
    name = request.path_params["id"]
    check_model(request, state, name)
    return json_response(_model(state, name))


def check_model(request: Request, state: ServerState, name: str | None) -> None:
    """Note the name that the request uses for the model; None means its first name. Raises ApiError 404 for another
    model.
    """
    names = _names(state)
    name = known_name(name, names)
    if name is not None and name not in names:
        served = " or ".join(map(repr, names))
        message = f"the model {name!r:.80} is not served here: name {served}"
        raise ApiError(404, message, "invalid_request_error", param="model", code="model_not_found")
    call_of(request).model = name or names[0]


def answer_any_model(request: Request, state: ServerState, name: str | None) -> None:
    """Note the name that the request uses for the model. Another model's name is accepted with a warning."""
    names = _names(state)
    name = known_name(name, names)
    if name is not None and name not in names:
        call_of(request).warnings.append(f"the model {name!r:.80} is not served here: {names[0]!r} answers")
        name = None
    call_of(request).model = name or names[0]


def known_name(name: str | None, known: Container[str]) -> str | None:
    """Return the known spelling of a model's name: as it is, or plain, or without the ending of its file."""
    if name is None or name in known:
        return name
    plain = plain_name(name)
    return stem if (stem := plain.removesuffix(".gguf")) in known else plain


def _names(state: ServerState) -> tuple[str, ...]:
    return (state.settings.model, *state.settings.aliases)


def _model(state: ServerState, name: str) -> ServedModel:
    length = None if (loaded := state.loaded) is None else loaded.host.model.max_seq_len
    return served_model(state, name, root=state.settings.model, context=length)


def served_model(state: ServerState, name: str, *, root: str, context: int | None) -> ServedModel:
    """Return the entry of a model. `context` is its length in tokens, if known. `root` is the model's first name."""
    length = UNSET if context is None else context
    return ServedModel(
        id=name,
        object="model",
        created=int(state.started_at),
        owned_by="infer",
        root=root,
        parent=None,
        max_model_len=length,
        context_length=length,
    )


ROUTES = [
    get("/v1/models", list_models, "List the served models, under each of their names", answer=ServedModels),
    get("/v1/models/{id:path}", get_model, "Show a served model", answer=ServedModel),
]
