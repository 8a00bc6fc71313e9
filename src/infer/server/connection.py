"""One connection: what arrives is counted and timed before it is a request, and refused in OpenAI's shape."""

from http import HTTPStatus
from typing import Any, final

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from infer.server.errors import ApiError

_KEY = "infer.connection"


@final
class Connection(HttpToolsProtocol):
    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: Any = self.scope
        scope[_KEY] = self

    def send_400_response(self, msg: str) -> None:
        """What uvicorn cannot parse."""
        self.refuse(ApiError(400, "this is no HTTP request", code="bad_request"))

    def refuse(self, error: ApiError) -> None:
        """Answer before there is a request, and close."""
        if self.transport.is_closing():
            return
        reason, body = HTTPStatus(error.status).phrase, error.body
        head = f"HTTP/1.1 {error.status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()

    @property
    def is_stalled(self) -> bool:
        """Whether more bytes than it may have are still to be sent."""
        return self.flow.write_paused


def is_stalled(scope: Scope) -> bool:
    """Whether the client takes too little of what it is sent."""
    connection: Connection | None = scope.get(_KEY)
    return connection is not None and connection.is_stalled
