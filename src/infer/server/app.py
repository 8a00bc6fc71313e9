"""The ASGI app: the table of all routes, and what each request goes through before its handler."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from infer.server import (
    branch,
    chat,
    completions,
    embeddings,
    events,
    health,
    messages,
    models,
    openapi,
    tokens,
    trace,
)
from infer.server.endpoint import Endpoint
from infer.server.errors import ApiError
from infer.server.request_ids import with_request_ids
from infer.server.state import ServerState

_MODULES = (health, models, chat, completions, embeddings, messages, tokens, trace, branch, events, openapi)
ROUTES = [route for module in _MODULES for route in module.ROUTES]


def make_app(state: ServerState) -> ASGIApp:
    routes = [Route(each.path, Endpoint(each.handler, state), methods=[each.method]) for each in ROUTES]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _refuse})
    app.router.redirect_slashes = False
    return with_request_ids(app)


def _refuse(request: Request, error: Exception) -> Response:
    """What no route takes."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        allowed = ", ".join(sorted({each.method for each in ROUTES if each.path == path}))
        message = f"{path} takes {allowed}, not {request.method}"
        return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed}).response
    return ApiError(404, f"there is no {request.method} {path} here", code="unknown_url").response
