"""`/v1/models`: the one model that is served."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from infer.server.endpoint import ApiRoute
from infer.server.errors import ApiError
from infer.server.state import ServerState


async def list_models(request: Request, state: ServerState) -> Response:
    return JSONResponse({"object": "list", "data": [_model(state)]})


async def get_model(request: Request, state: ServerState) -> Response:
    check_model(state, request.path_params["id"])
    return JSONResponse(_model(state))


def check_model(state: ServerState, name: str | None) -> None:
    """Raises ApiError 404 for the name of another model; none is the one that is served."""
    served = state.settings.model
    if name is not None and name != served:
        message = f"the model {name!r:.80} is not served here: {served!r} is"
        raise ApiError(404, message, "invalid_request_error", param="model", code="model_not_found")


def _model(state: ServerState) -> dict[str, str | int]:
    return {"id": state.settings.model, "object": "model", "created": int(state.started_at), "owned_by": "infer"}


ROUTES = [ApiRoute("GET", "/v1/models", list_models), ApiRoute("GET", "/v1/models/{id:path}", get_model)]
