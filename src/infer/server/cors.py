"""Cross-origin requests: only pages of named origins may call, and never with a browser's credentials."""

import re
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_FIELDS = re.compile(r"[A-Za-z0-9_, -]{0,1000}")
_EXPOSED = "x-request-id, retry-after, retry-after-ms, x-should-retry"


def with_cors(app: ASGIApp, origins: Collection[str]) -> ASGIApp:
    """Return the app with CORS headers for `origins`, such as "https://example.org", or "*"."""
    if not origins:
        return app

    async def call_app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origin = headers.get("origin")
        if origin is None or not ("*" in origins or origin in origins):
            await app(scope, receive, send)
            return
        allowed = "*" if "*" in origins else origin
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(headers, allowed)(scope, receive, send)
            return

        async def send_allowed(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                answer["Access-Control-Allow-Origin"] = allowed
                answer["Access-Control-Expose-Headers"] = _EXPOSED
                answer.add_vary_header("Origin")
            await send(message)

        await app(scope, receive, send_allowed)

    return call_app


def _preflight(headers: Headers, allowed: str) -> Response:
    """Return the answer to a preflight request. The headers that it asks for are allowed, because clients send their
    own.
    """
    asked = headers.get("access-control-request-headers", "")
    found = {
        "Access-Control-Allow-Origin": allowed,
        "Access-Control-Allow-Methods": "GET, POST",
        "Access-Control-Allow-Headers": asked if _FIELDS.fullmatch(asked) else "authorization, content-type",
        "Access-Control-Max-Age": "600",
        "Vary": "Origin",
    }
    return Response(None, 204, found)
