"""Every request has an id of the server's own. A valid id from the client is echoed, and logged beside it."""

import json
import re
import secrets
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infer.server.call import CREATED_HEADER, ID_HEADER, KEY_NAME_HEADER, SENT_HEADER, Call, put_call

_MOST_HEADER = 2048  # characters
_CLEAN = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def with_request_ids(app: ASGIApp, *, is_child: bool) -> ASGIApp:
    """Return the app with an id per request. A child process receives ids and names of keys from its parent."""

    async def call_app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        asked = headers.get("x-request-id", "")
        client_id = asked if _CLEAN.fullmatch(asked) else None
        call = Call(new_id(), client_id, scope["method"])
        if is_child:
            _be_handed(call, headers)
        put_call(scope, call)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = call.shown_id
                if call.warnings:
                    headers["x-infer-warnings"] = _as_header(call.warnings)
            await send(message)

        await app(scope, receive, send_with_id)

    return call_app


def new_id() -> str:
    return f"req-{secrets.token_hex(12)}"


def _as_header(warnings: Sequence[str]) -> str:
    """Return the first warnings as a JSON list in ASCII, short enough for every proxy."""
    for count in range(len(warnings), 0, -1):
        if len(found := json.dumps(warnings[:count])) <= _MOST_HEADER:
            return found
    return "[]"


def _be_handed(call: Call, headers: Headers) -> None:
    """Set the call's fields from the headers of the process that clients talk to.

    Its own request, a readiness probe, has no id.
    """
    call.key_name = headers.get(KEY_NAME_HEADER.decode(), "")
    if call_id := headers.get(ID_HEADER.decode()):
        call.id, call.created, call.is_noted = call_id, int(headers[CREATED_HEADER.decode()]), True
        call.num_sent_bytes = int(headers[SENT_HEADER.decode()])
    else:
        call.is_probe = True
