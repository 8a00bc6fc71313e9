"""The ASGI app: the table of all paths, and the layers that each request passes before its handler.

The first layer gives every request a `Call`, sets the ids of its answer, and logs and counts it at its end.

A row of the table says path, method, body and answer of a route, and if it needs no key. A path is looked up once, for
the key, the handler, and the messages of 404 and 405.

Every request needs a key if there are keys, except on open routes such as those for the server's health. A server
without keys on a loopback address answers to local names only: a web page can rebind its own name to this machine, and
could then read every answer as one of its own origin.
"""

import difflib
import hashlib
import hmac
import json
import logging
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infer.serving.protocols.api_errors import ApiError
from infer.serving.protocols.events import ErrorShape
from infer.serving.server.connection import CALL, FINGERPRINT_HEADER, Call
from infer.serving.server.endpoint import JSON, ApiRequest, ApiRoute, answer_to, json_response, refusal_of
from infer.serving.server.metrics import log_call
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
from infer.serving.server_settings import ServerSettings
from infer.system.child_process import asking_for

_MODULES = (status, served_models, protocols, retrieval, ollama, tokens, answer_trace, web_files)
DESCRIBED = [route for module in _MODULES for route in module.ROUTES]
ROUTES = [*DESCRIBED, *description_routes(DESCRIBED)]
log = logging.getLogger("infer.server")
_MOST_HEADER = 2048  # characters
_MOST_PATHS = 256  # whose routes are kept
_CLEAN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ANSWER_HEADERS = ("x-request-id", "retry-after", "retry-after-ms", "x-should-retry")
_Found = Mapping[str, tuple[ApiRoute, dict[str, str]]]  # by method: a route of a path, and the path's parameters

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


def with_calls(app: ASGIApp, state: ServerState) -> ASGIApp:
    """Return the app with a call per request. A child process receives ids and names of keys from its parent.

    A valid id that the client sends is returned to it, and logged next to the server's own id.
    """

    async def call_app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # an application of Ray also hears of its lifespan
            return
        headers = Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        call = Call(asked if _CLEAN.fullmatch(asked) else None, scope["method"])
        if state.settings.is_child:
            call.take_over(headers)
        scope[CALL] = call

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = call.client_id or call.id
                if state.settings.is_child and state.loaded is not None:
                    headers[FINGERPRINT_HEADER] = state.loaded.llm.system_fingerprint
                if call.warnings:
                    headers["x-infer-warnings"] = _as_header(call.warnings)
            await send(message)

        state.calls.add(call)
        try:
            await app(scope, receive, send_with_id)
        finally:
            state.calls.discard(call)
            if call.entry is not None:
                state.door.leave(call.entry)
            if not (call.is_forwarded or call.is_probe):
                count_call(state, call)

    return call_app


def _as_header(warnings: Sequence[str]) -> str:
    """Return the first warnings as a JSON list in ASCII, short enough for every proxy."""
    for count in range(len(warnings), 0, -1):
        if len(found := json.dumps(warnings[:count])) <= _MOST_HEADER:
            return found
    return "[]"


def count_call(state: ServerState, call: Call) -> None:
    """Log the call, learn from it, and count it. If one of these fails, the others are still done."""
    for note in (log_call, state.learn, state.metrics.count_call):
        try:
            note(call)
        except Exception:
            log.exception("request %s cannot be counted", call.id)


def _routed(state: ServerState, table: Sequence[ApiRoute]) -> ASGIApp:
    """Return the app of the routes, for requests that may enter. The name of a request's key is stored in its call."""
    rows = [(compile_path(each.path)[0], each) for each in table]
    guard, find = make_guard(state.settings), lru_cache(_MOST_PATHS)(partial(_find, rows))

    async def call_app(scope: Scope, receive: Receive, send: Send) -> None:
        path, found = find(scope["path"].removeprefix(scope.get("root_path", "")))
        if path != scope["path"]:
            scope = {**scope, "path": path, "raw_path": path.encode("utf-8", "surrogateescape"), "root_path": ""}
        request, routes = ApiRequest(scope, receive, state), [route for route, _ in found.values()]
        call = request.call
        try:
            name = guard(request.headers, any(each.is_open for each in routes))
            call.key_name = name or call.key_name  # a parent process has found it already
            if request.method not in found:
                raise _missing(request.method, path, found, table)
            route, scope["path_params"] = found[request.method]
            with asking_for(call.key_name):
                answer = await answer_to(request, route)
            response = answer if isinstance(answer, Response) else json_response(answer, call)
        except ClientDisconnect:
            call.left_in = call.phase
            return
        except Exception as error:
            refusal = refusal_of(error, call, routes[0].shape if routes else _nearest_shape(path, table))
            response = Response(refusal.body, refusal.status, refusal.headers, media_type=JSON)
        await response(scope, receive, send)

    return call_app


def _find(rows: Sequence[tuple[re.Pattern[str], ApiRoute]], path: str) -> tuple[str, _Found]:
    """Return the path of a route that this path means, and its routes. If no route has it, return the path itself."""
    path = path.replace("\n", "%0A")  # `$` in a route's pattern also matches before a newline
    for each in _spellings(path):
        if matches := [(route, match.groupdict()) for pattern, route in rows if (match := pattern.match(each))]:
            return each, {method: found for found in matches for method in found[0].methods}
    return path, {}


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


def _missing(method: str, path: str, found: _Found, table: Sequence[ApiRoute]) -> ApiError:
    """Return error 405 if the path has routes of other methods, and 404 otherwise.

    The message of 404 names the nearest path, or what to use instead.
    """
    if allowed := ", ".join(sorted(found)):
        message = f"{path} takes {allowed}, not {method}"
        return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
    steps = [each for each in path.split("/") if each and each != "v1"]
    hint = _ELSEWHERE.get(steps[0]) if steps else None
    if hint is None:
        known = [route.path for route in table if "{" not in route.path]
        near = difflib.get_close_matches(path[:200], known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else "GET /docs lists the routes"
    return ApiError(404, f"there is no {method} {path:.200} here: {hint}", code="unknown_url")


def _nearest_shape(path: str, table: Sequence[ApiRoute]) -> type[ErrorShape]:
    """Return the format of errors of the routes that begin as the path does, or OpenAI's if these have several."""
    path = path[:200]
    while path:
        path = path.rpartition("/")[0]
        near = {each.shape.error_type: each.shape for each in table if f"{each.path}/".startswith(f"{path}/")}
        if near:
            return near.popitem()[1] if len(near) == 1 else ErrorShape
    return ErrorShape


# Keys and names of hosts


def make_guard(settings: ServerSettings) -> Callable[[Headers, bool], str]:
    """Return a function that returns the name of a request's key, from its headers and if its path is open.

    The function raises ApiError 401 or 403 for a request that may not enter. All keys are compared, each in constant
    time. Names of hosts that are local or allowed are served.
    """
    name_by_digest = {_digest(key): name for key, name in settings.api_keys.items()}
    allowed = {_plain(name) for name in (settings.host, *settings.allowed_hosts)}
    serves_all = settings.api_keys or settings.is_child or "*" in allowed or not _is_loopback(settings.host)

    def check(headers: Headers, is_open: bool) -> str:
        host = headers.get("host", "")
        name = _plain(host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0])
        if not (serves_all or _is_local(name) or name in allowed):
            message = (
                f"the host {name!r:.80} is not served: a server without keys on {settings.host} answers to local "
                f"names; start it with --allowed-host {name:.80}"
            )
            raise ApiError(403, message, code="host_not_allowed")
        if is_open or not name_by_digest:
            return ""
        digest = _digest(_key_of(headers))
        names = [each for known, each in name_by_digest.items() if hmac.compare_digest(known, digest)]
        if not names:
            message = "a valid API key is needed: send Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return names[0]

    return check


def _key_of(headers: Headers) -> str:
    """Return the key as OpenAI's clients send it (Authorization: Bearer), else as Anthropic's do (x-api-key)."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    """Return the key's digest, which has the same length for every key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _plain(name: str) -> str:
    return name.strip().lower().rstrip(".")


@lru_cache(_MOST_PATHS)
def _is_local(name: str) -> bool:
    """Return True for names that no DNS server answers, and for a request of HTTP/1.0 without a name."""
    return not name or name == "localhost" or name.endswith(".localhost") or _address_of(name) is not None


def _address_of(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    try:
        address = _address_of(host) or ip_address(socket.gethostbyname(host))
    except OSError:
        return False
    return address.is_loopback
