"""The ASGI app: the table of all routes, and the layers that each request passes before its handler."""

from collections.abc import Sequence
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from infer.serving.protocols.errors import ApiError
from infer.serving.server.access_log import with_calls
from infer.serving.server.auth import guarded, no_route
from infer.serving.server.call import call_of
from infer.serving.server.endpoint import ApiRoute, Endpoint, error_response
from infer.serving.server.routes import (
    answer_trace,
    engine_events,
    health,
    ollama,
    props,
    protocols,
    retrieval,
    served_models,
    tokens,
    web_files,
)
from infer.serving.server.routes.openapi import description_routes
from infer.serving.server.server_state import ServerState

_MODULES = (
    *(health, served_models, protocols, retrieval, ollama, tokens, answer_trace, engine_events, props, web_files),
)
ROUTES = [route for module in _MODULES for route in module.ROUTES]
ROUTES += description_routes(ROUTES)
_ANSWER_HEADERS = ("x-request-id", "retry-after", "retry-after-ms", "x-should-retry")


def make_app(state: ServerState, table: Sequence[ApiRoute] = ROUTES) -> ASGIApp:
    settings = state.settings
    routes = [Route(each.path, Endpoint(each, state), methods=[each.method]) for each in table]
    refuse = partial(_refuse, known=[each.path for each in table if "{" not in each.path])
    routed = Starlette(routes=routes, exception_handlers={HTTPException: refuse})
    routed.router.redirect_slashes = False
    app = guarded(routed, settings, table)
    if settings.cors_origins:  # pages of these origins may call, but never with a browser's credentials
        app = CORSMiddleware(
            app,
            settings.cors_origins,
            ["GET", "POST"],
            ["*"],
            expose_headers=_ANSWER_HEADERS,
            allow_private_network=True,  # a page of a public address asks before it calls a local server
        )
    return with_calls(app, state)


def _refuse(request: Request, error: Exception, known: Sequence[str]) -> Response:
    """Answer 404 and 405 in OpenAI's error format."""
    assert isinstance(error, HTTPException)
    path, refusal = request.url.path, ApiError(error.status_code, error.detail)
    if error.status_code == 404:
        refusal = ApiError(404, no_route(request.method, path, known), code="unknown_url")
    if error.status_code == 405:
        routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
        allowed = ", ".join(sorted({method for route in routes for method in route.methods}))
        message = f"{path} takes {allowed}, not {request.method}"
        refusal = ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
    call_of(request).error_code = refusal.code or refusal.type
    return error_response(refusal)
