"""A server without keys on a loopback address answers to local names only.

A web page can rebind its own name to this machine. It could then read every answer as one of its own origin.
"""

import socket
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from infer.server.call import call_of
from infer.server.endpoint import refusal_of
from infer.server.errors import ApiError
from infer.server.server_settings import ServerSettings


def with_local_names(app: ASGIApp, settings: ServerSettings) -> ASGIApp:
    allowed = {_plain(name) for name in (settings.host, *settings.allowed_hosts)}
    if settings.api_keys or settings.is_child or "*" in allowed or not _is_loopback(settings.host):
        return app

    async def call_app(scope: Scope, receive: Receive, send: Send) -> None:
        name = _name_of(Headers(scope=scope).get("host", "")) if scope["type"] == "http" else ""
        if _is_local(name) or name in allowed:
            await app(scope, receive, send)
            return
        message = (
            f"the host {name!r:.80} is not served: a server without keys on {settings.host} answers to local names; "
            f"start it with --allowed-host {name:.80}"
        )
        error = ApiError(403, message, code="host_not_allowed")
        await refusal_of(error, call_of(HTTPConnection(scope))).response(scope, receive, send)

    return call_app


def _name_of(host: str) -> str:
    """Return the header's name without its port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return _plain(name)


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
