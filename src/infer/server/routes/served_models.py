"""`/v1/models`: the served model, under each of its names."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from infer.server.call import call_of
from infer.server.endpoint import ApiRoute
from infer.server.errors import ApiError
from infer.server.server_state import ServerState


async def list_models(request: Request, state: ServerState) -> Response:
    return JSONResponse({"object": "list", "data": [_model(state, name) for name in _names(state)]})


async def get_model(request: Request, state: ServerState) -> Response:
    name = request.path_params["id"]
    check_model(request, state, name)
    return JSONResponse(_model(state, name))


def check_model(request: Request, state: ServerState, name: str | None) -> None:
    """Note the name that the request uses for the model; None means its first name. Raises ApiError 404 for another
    model.
    """
    names = _names(state)
    if name is not None and name not in names:
        served = " or ".join(map(repr, names))
        message = f"the model {name!r:.80} is not served here: {served} is"
        raise ApiError(404, message, "invalid_request_error", param="model", code="model_not_found")
    call_of(request).model = name or names[0]


def answer_any_model(request: Request, state: ServerState, name: str | None) -> None:
    """Note the name that the request uses for the model. Another model's name is accepted with a warning."""
    names = _names(state)
    if name is not None and name not in names:
        call_of(request).warnings.append(f"the model {name!r:.80} is not served here: {names[0]!r} answers")
        name = None
    call_of(request).model = name or names[0]


def _names(state: ServerState) -> tuple[str, ...]:
    return (state.settings.model, *state.settings.aliases)


def _model(state: ServerState, name: str) -> dict[str, str | int | None]:
    """Return a model's entry.

    Once the model is loaded, the entry has the context's length under vLLM's name and OpenRouter's.
    """
    found: dict[str, str | int | None] = {"id": name, "object": "model", "created": int(state.started_at)}
    found |= {"owned_by": "infer", "root": state.settings.model, "parent": None}
    if (loaded := state.loaded) is not None:
        length = loaded.host.model.max_seq_len
        found |= {"max_model_len": length, "context_length": length}
    return found


ROUTES = [ApiRoute("GET", "/v1/models", list_models), ApiRoute("GET", "/v1/models/{id:path}", get_model)]
