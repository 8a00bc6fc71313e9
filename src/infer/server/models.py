"""`/v1/models`: the one model that is served."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from infer.server.endpoint import ApiRoute
from infer.server.state import ServerState


async def list_models(request: Request, state: ServerState) -> Response:
    model = {"id": state.settings.model, "object": "model", "created": int(state.started_at), "owned_by": "infer"}
    return JSONResponse({"object": "list", "data": [model]})


ROUTES = [ApiRoute("GET", "/v1/models", list_models)]
