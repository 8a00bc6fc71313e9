"""API keys: every request needs one, except on open routes such as those for the server's health."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from infer.errors import InvalidRequestError
from infer.server.call import call_of
from infer.server.endpoint import ApiRoute, refusal_of
from infer.server.errors import ApiError, api_error

_REFUSAL = ApiError(
    401,
    "a valid API key is needed: Authorization: Bearer KEY",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)


def read_keys(path: Path) -> dict[str, str]:
    """Return the names by key.

    A line is a key, or a name and a key; text after # is a comment. Raises InvalidRequestError.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "they are not UTF-8"
        raise InvalidRequestError(f"the keys {path} cannot be read: {reason}") from error
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
                raise InvalidRequestError(f"{path}, line {number}: a line is a key, or a name and a key")
    if not names:
        raise InvalidRequestError(f"the file {path} holds no key")
    return names


def with_keys(app: ASGIApp, names: Mapping[str, str], table: Iterable[ApiRoute]) -> ASGIApp:
    """Return the app with API keys required. `names` holds a name per key; if it is empty, no key is required.

    The name of a request's key is stored in its call.
    """
    route_by_path = {route.path: route for route in table}
    open_paths = [compile_path(route.path)[0] for route in route_by_path.values() if route.is_open]
    name_by_digest = {_digest(key): name for key, name in names.items()}

    def name_of(given: str) -> str | None:
        """Return the name of a valid key, else None. All keys are compared, each in constant time."""
        digest = _digest(given)
        found = [name for known, name in name_by_digest.items() if hmac.compare_digest(known, digest)]
        return found[0] if found else None

    async def call_app(scope: Scope, receive: Receive, send: Send) -> None:
        if name_by_digest and scope["type"] == "http" and not any(each.match(scope["path"]) for each in open_paths):
            name = name_of(_key_of(Headers(scope=scope)))
            call = call_of(HTTPConnection(scope))
            if name is None:
                route = route_by_path.get(scope["path"])
                await refusal_of(_REFUSAL, call, route.shape if route else api_error).response(scope, receive, send)
                return
            call.key_name = name
        await app(scope, receive, send)

    return call_app


def _key_of(headers: Headers) -> str:
    """Return the key as OpenAI's clients send it (Authorization: Bearer), else as Anthropic's do (x-api-key)."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    """Return the key's digest, which has the same length for every key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
