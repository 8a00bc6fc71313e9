"""The second layer of the app: API keys, names of hosts, and paths in any spelling.

Every request needs a key if there are keys, except on open routes such as those for the server's health. A server
without keys on a loopback address answers to local names only: a web page can rebind its own name to this machine, and
could then read every answer as one of its own origin. Paths are matched to the table of routes.
"""

import difflib
import hashlib
import hmac
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from infer.errors import InvalidRequestError
from infer.serving.protocols.errors import ApiError
from infer.serving.protocols.events import ErrorShape
from infer.serving.server.call import call_of
from infer.serving.server.endpoint import ApiRoute, error_response, refusal_of
from infer.serving.server_settings import ServerSettings

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


def guarded(app: ASGIApp, settings: ServerSettings, table: Sequence[ApiRoute]) -> ASGIApp:
    """Return the app for requests that may enter. The name of a request's key is stored in its call."""
    shape_by_path = {route.path: route.shape for route in table}
    patterns = [compile_path(path)[0] for path in shape_by_path]
    open_patterns = [compile_path(route.path)[0] for route in table if route.is_open]
    name_by_digest = {_digest(key): name for key, name in settings.api_keys.items()}
    hosts = _allowed_hosts(settings)

    def check(scope: Scope, headers: Headers) -> str:
        """Return the name of the key. Raises ApiError 401 or 403."""
        if hosts is not None:
            _check_host(headers.get("host", ""), hosts, settings)
        if not name_by_digest or any(each.match(scope["path"]) for each in open_patterns):
            return ""
        return _key_name(headers, name_by_digest)

    async def call_app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        call = call_of(HTTPConnection(scope))
        if (path := known_path(scope["path"], patterns)) != scope["path"]:
            scope = {**scope, "path": path, "raw_path": path.encode("utf-8", "surrogateescape")}
        try:
            name = check(scope, Headers(scope=scope))
        except ApiError as error:
            refusal = refusal_of(error, call, shape_by_path.get(path, ErrorShape))
            await error_response(refusal)(scope, receive, send)
            return
        call.key_name = name or call.key_name  # a parent process has found it already
        await app(scope, receive, send)

    return call_app


def read_keys(path: Path) -> dict[str, str]:
    """Return the names by key.

    A line is a key, or a name and a key; text after # is a comment. Raises InvalidRequestError.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is not UTF-8"
        raise InvalidRequestError(f"the file {path} of API keys cannot be read: {reason}") from error
    names = dict[str, str]()
    for number, line in enumerate(lines, 1):
        match line.partition("#")[0].split():
            case []:
                continue
            case [key]:
                names[key] = f"key-{len(names) + 1}"
            case [name, key]:
                names[key] = name
            case _:
                raise InvalidRequestError(f"{path}, line {number}: a line must be a key, or a name and a key")
    if not names:
        raise InvalidRequestError(f"the file {path} contains no key: write one key per line")
    return names


def _key_name(headers: Headers, name_by_digest: Mapping[bytes, str]) -> str:
    """Return the name of the request's key. All keys are compared, each in constant time. Raises ApiError 401."""
    digest = _digest(_key_of(headers))
    found = [name for known, name in name_by_digest.items() if hmac.compare_digest(known, digest)]
    if not found:
        message, challenge = "a valid API key is needed: send Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"}
        raise ApiError(401, message, code="invalid_api_key", headers=challenge)
    return found[0]


def _key_of(headers: Headers) -> str:
    """Return the key as OpenAI's clients send it (Authorization: Bearer), else as Anthropic's do (x-api-key)."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    """Return the key's digest, which has the same length for every key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _allowed_hosts(settings: ServerSettings) -> set[str] | None:
    """Return the names that are served in addition to local ones, or None if every name is served."""
    allowed = {_plain(name) for name in (settings.host, *settings.allowed_hosts)}
    if settings.api_keys or settings.is_child or "*" in allowed or not _is_loopback(settings.host):
        return None
    return allowed


def _check_host(host: str, allowed: Iterable[str], settings: ServerSettings) -> None:
    """Raise ApiError 403 unless the header's name, without its port, is local or allowed."""
    name = _plain(host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0])
    if not (_is_local(name) or name in allowed):
        message = (
            f"the host {name!r:.80} is not served: a server without keys on {settings.host} answers to local names; "
            f"start it with --allowed-host {name:.80}"
        )
        raise ApiError(403, message, code="host_not_allowed")


def _plain(name: str) -> str:
    return name.strip().lower().rstrip(".")


def _is_local(name: str) -> bool:
    """Return True for names that no DNS server answers, and for a request of HTTP/1.0 without a name."""
    return not name or name == "localhost" or name.endswith(".localhost") or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    try:
        found = host if _is_address(host) else socket.gethostbyname(host)
    except OSError:
        return False
    return ip_address(found).is_loopback


def known_path(path: str, patterns: Iterable[re.Pattern[str]]) -> str:
    """Return the path of a route that this path means, or the path itself.

    A path may lack /v1, begin with /openai, or end with a slash, because clients combine it with many base URLs.
    """
    path = path.replace("\n", "%0A")  # `$` in a route's pattern also matches before a newline
    return next((each for each in _candidates(path) if any(known.match(each) for known in patterns)), path)


def no_route(method: str, path: str, known: Iterable[str]) -> str:
    """Return the message for a path without a route. It names the nearest path, or what to use instead."""
    steps = [each for each in path.split("/") if each and each != "v1"]
    message = f"there is no {method} {path:.200} here"
    if steps and (instead := _ELSEWHERE.get(steps[0])):
        return f"{message}: {instead}"
    near = difflib.get_close_matches(path[:200], list(known), n=1, cutoff=0.6)
    return f"{message}: did you mean {near[0]}?" if near else f"{message}: GET /docs lists the routes"


def _candidates(path: str) -> list[str]:
    if path.startswith("/page/"):
        return [path]
    plain = re.sub("/{2,}", "/", path).rstrip("/") or "/"
    plain = plain.removeprefix("/openai") or "/"
    found = [plain, f"/v1{plain}", plain.removeprefix("/v1"), plain.replace("/v1/v1/", "/v1/", 1)]
    return [each for each in found if each != "/" or path == "/"]
