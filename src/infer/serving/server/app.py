"""The ASGI app: the table of all paths, and the layers that each request passes before its handler.

A row of the table says path, method, body and answer of a route, and if it needs no key. A path is looked up once, for
the key, the handler, and the messages of 404 and 405.
"""

import difflib
import re
from collections.abc import Iterable, Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from infer.serving.protocols.api_errors import ApiError
from infer.serving.protocols.events import ErrorShape
from infer.serving.server.access_log import with_calls
from infer.serving.server.auth import make_guard
from infer.serving.server.call import call_of
from infer.serving.server.endpoint import ApiRoute, Endpoint, error_response, refusal_of
from infer.serving.server.routes import (
    answer_trace,
    ollama,
    protocols,
    retrieval,
    served_models,
    status,
    tokens,
    web_files,
)
from infer.serving.server.routes.openapi import description_routes
from infer.serving.server.server_state import ServerState

_MODULES = (*(status, served_models, protocols, retrieval, ollama, tokens, answer_trace, web_files),)
ROUTES = [route for module in _MODULES for route in module.ROUTES]
ROUTES += description_routes(ROUTES)
_ANSWER_HEADERS = ("x-request-id", "retry-after", "retry-after-ms", "x-should-retry")


# What to use instead, by the first word of the paths of other servers.
_ELSEWHERE = {
    "api": "only a part of Ollama's API is served, GET /docs lists the routes",
    "slots": "use /v1/engine/events",
    "version": "use /props",
    "ping": "use /health",
    "audio": "only text is served",
    "images": "only text is served",
    "files": "files are not kept: use `infer batch`",
    "batches": "batches are not kept: use `infer batch`",
    "generate": "use /v1/completions",
    "invocations": "use /v1/chat/completions",
}


def make_app(state: ServerState, table: Sequence[ApiRoute] = ROUTES) -> ASGIApp:
    settings = state.settings
    app = _routed(state, table)
    if settings.cors_origins:  # pages of these origins may call, but never with a browser's credentials
        given = " ".join(settings.cors_origins).lower().replace(",", " ").split()
        app = CORSMiddleware(
            app,
            [each if each.endswith("//") else each.removesuffix("/") for each in given],  # as browsers write them
            ["GET", "POST"],
            ["*"],
            expose_headers=_ANSWER_HEADERS,
            allow_private_network=True,  # a page of a public address asks before it calls a local server
        )
    return with_calls(app, state)


def _routed(state: ServerState, table: Sequence[ApiRoute]) -> ASGIApp:
    """Return the app of the routes, for requests that may enter. The name of a request's key is stored in its call."""
    rows = [Endpoint(each, state) for each in table]
    guard = make_guard(state.settings)

    async def call_app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        call = call_of(HTTPConnection(scope))
        path, found = _find(rows, scope["path"].removeprefix(scope.get("root_path", "")))
        row = next((each for each in found if scope["method"] in each.methods), None)
        try:
            name = guard(Headers(scope=scope), any(each.route.is_open for each in found))
            call.key_name = name or call.key_name  # a parent process has found it already
            if row is None:
                raise _missing(scope["method"], path, found, rows)
        except ApiError as error:
            refusal = refusal_of(error, call, found[0].route.shape if found else ErrorShape)
            await error_response(refusal)(scope, receive, send)
            return
        if path != scope["path"]:
            scope = {**scope, "path": path, "raw_path": path.encode("utf-8", "surrogateescape"), "root_path": ""}
        match = row.pattern.match(path)
        assert match is not None
        await row({**scope, "path_params": match.groupdict()}, receive, send)

    return call_app


def _find(rows: Sequence[Endpoint], path: str) -> tuple[str, list[Endpoint]]:
    """Return the path of a route that this path means, with the rows of this path, or the path itself and no rows."""
    path = path.replace("\n", "%0A")  # `$` in a route's pattern also matches before a newline
    for each in _spellings(path):
        if found := [row for row in rows if row.pattern.match(each)]:
            return each, found
    return path, []


def _spellings(path: str) -> list[str]:
    """Return paths that this path may mean.

    A path may lack /v1, begin with /openai, or end with a slash, because clients combine it with many base URLs.
    """
    if path.startswith("/page/"):
        return [path]
    plain = re.sub("/{2,}", "/", path).rstrip("/") or "/"
    plain = plain.removeprefix("/openai") or "/"
    found = [plain, f"/v1{plain}", plain.removeprefix("/v1"), plain.replace("/v1/v1/", "/v1/", 1)]
    return [each for each in found if each != "/" or path == "/"]


def _missing(method: str, path: str, found: Iterable[Endpoint], rows: Iterable[Endpoint]) -> ApiError:
    """Return error 405 if the path has routes of other methods, and 404 otherwise.

    The message of 404 names the nearest path, or what to use instead.
    """
    if allowed := ", ".join(sorted({each for row in found for each in row.methods})):
        message = f"{path} takes {allowed}, not {method}"
        return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
    steps = [each for each in path.split("/") if each and each != "v1"]
    hint = _ELSEWHERE.get(steps[0]) if steps else None
    if hint is None:
        known = [row.route.path for row in rows if "{" not in row.route.path]
        near = difflib.get_close_matches(path[:200], known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else "GET /docs lists the routes"
    return ApiError(404, f"there is no {method} {path:.200} here: {hint}", code="unknown_url")
