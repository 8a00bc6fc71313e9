"""`/v1/models`: the one model that is served, by each of its names."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from infer.server.call import call_of
from infer.server.endpoint import ApiRoute
from infer.server.errors import ApiError
from infer.server.state import ServerState


async def list_models(request: Request, state: ServerState) -> Response:
    return JSONResponse({"object": "list", "data": [_model(state, name) for name in _names(state)]})


async def get_model(request: Request, state: ServerState) -> Response:
    name = request.path_params["id"]
    check_model(request, state, name)
    return JSONResponse(_model(state, name))


def check_model(request: Request, state: ServerState, name: str | None) -> None:
    """Note the name under which the model is asked: None is its first. Raises ApiError 404 for another model."""
    names = _names(state)
    if name is not None and name not in names:
        served = " or ".join(map(repr, names))
        message = f"the model {name!r:.80} is not served here: {served} is"
        raise ApiError(404, message, "invalid_request_error", param="model", code="model_not_found")
    call_of(request).model = name or names[0]


def _names(state: ServerState) -> tuple[str, ...]:
    return (state.settings.model, *state.settings.aliases)


def _model(state: ServerState, name: str) -> dict[str, str | int]:
    return {"id": name, "object": "model", "created": int(state.started_at), "owned_by": "infer"}


ROUTES = [ApiRoute("GET", "/v1/models", list_models), ApiRoute("GET", "/v1/models/{id:path}", get_model)]
