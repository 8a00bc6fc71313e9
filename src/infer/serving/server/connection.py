"""One connection: count and time arriving bytes before they form a request, and refuse them in OpenAI's format.

uvicorn limits neither the size of headers nor the time that they take, and answers broken requests in plain text.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from infer.serving.protocols.api_errors import ApiError
from infer.serving.server.call import Call
from infer.serving.server_settings import ServerSettings

CONNECTION = "infer.connection"  # the key of a scope that has its connection
_LINGER_SECONDS = 1.0  # bytes that arrive after a refusal are dropped; an immediate close could hide the answer
_UNKNOWN_METHOD = "_OTHER"  # OpenTelemetry's name
_FIELD_BYTES = 4  # ": " and the end of the line
_SINGLE = (b"host", b"content-type", b"authorization", b"x-api-key", b"origin")  # a second one would be ignored


@final
class Connection(HttpToolsProtocol):
    def __init__(self, settings: ServerSettings, on_refusal: Callable[[Call], None], **arguments: Any) -> None:
        """Create a connection. `on_refusal` is called for each answer that does not come from the app."""
        super().__init__(**arguments)
        self._settings, self._on_refusal = settings, on_refusal
        self._is_in_head, self._is_refused = True, False
        self._has_heard = False  # at least one byte has arrived
        self._is_surplus = False  # more connections than allowed were open when this one was made
        self._num_fields = self._num_head_bytes = 0  # complete fields of the head and the trailer, and their bytes
        self._num_fed_bytes = 0  # bytes since the head began, or since the last part of the body
        self._has_advanced = False  # the current read has the end of a head, a part of a body, or the end of a request
        self._head_timer: asyncio.TimerHandle | None = None
        self._unsent_since: float | None = None

    # Arriving bytes

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_surplus = self._are_too_many
        transport.set_write_buffer_limits(high=self._settings.max_unsent_bytes)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._has_heard = True
        if self._is_in_head:
            self._time_head()
        self._has_advanced = False
        super().data_received(data)
        self._num_fed_bytes = 0 if self._has_advanced else self._num_fed_bytes + len(data)
        self._check_size()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._num_fields, self._num_head_bytes, self._num_fed_bytes = True, 0, 0, 0
        self._time_head()
        scope: Any = self.scope
        scope[CONNECTION] = self

    def on_url(self, url: bytes) -> None:
        self._num_head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a field. A trailer's fields are dropped: they must not depend on when its bytes arrive."""
        self._num_fields += 1
        self._num_head_bytes += len(name) + len(value) + _FIELD_BYTES
        if self._is_in_head:
            super().on_header(name, value)
        else:
            self._check_size()

    def on_headers_complete(self) -> None:
        if self._is_refused:
            return
        if (refusal := self._refusal_of_head()) is not None:
            self._refuse(refusal)
            return
        self._is_in_head, self._has_advanced = False, True
        self._end_timer()
        self._unset_keepalive_if_required()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._has_advanced = True
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_head = self._has_advanced = True
        if self._is_refused:
            return
        if not self._is_answering:
            self._end_timer()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not (self._is_in_head or self._is_answering):
            self._time_head()  # after the rest of a body that is not read

    # Refusals

    def send_400_response(self, msg: str) -> None:
        """Answer 400 to bytes that the parser cannot read."""
        self._refuse(ApiError(400, "the bytes are not an HTTP request", code="bad_request"))

    def _refusal_of_head(self) -> ApiError | None:
        settings = self._settings
        if self._is_too_large:
            return self._too_large()
        counts = Counter(name for name, _ in self.headers)
        for name in _SINGLE:
            if counts[name] > 1 or (name == b"host" and not counts[name] and self.parser.get_http_version() == "1.1"):
                message = f"a request must have one {name.decode().title()} header, got {counts[name]}"
                return ApiError(400, message, code="bad_request")
        codings = b",".join(value for name, value in self.headers if name == b"transfer-encoding").lower()
        if codings.strip() not in (b"", b"chunked"):
            message = f"Transfer-Encoding must be chunked, got {codings.decode('latin-1')!r:.60}: send the plain body"
            return ApiError(501, message, code="not_implemented")
        self._is_surplus = self._is_surplus and self._are_too_many
        if self._is_surplus and not self.url.startswith(b"/health"):
            message = f"{settings.max_connections} connections are open, the most that are allowed: try again"
            return ApiError(503, message, code="too_many_connections", headers={"Retry-After": "1"})
        return None

    def _refuse(self, error: ApiError) -> None:
        """Answer before there is a request, or in place of a broken request, and close the connection.

        Nothing is written if another answer is in progress.
        """
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._end_timer()
        if self._is_answering:
            if self._is_in_head or self.pipeline or self.cycle.response_started:
                self.transport.close()
                return
            self.cycle.disconnected = True  # tells the app that the client has disconnected
            self.cycle.message_event.set()
        call = Call(None, _UNKNOWN_METHOD, status=error.status, error_code=error.code or "")
        if self._has_heard and not self._is_answering:  # the app counts its answers; browsers open spare connections
            self._on_refusal(call)
        headers = {"Content-Type": "application/json", "Content-Length": len(error.body), "Connection": "close"}
        headers["x-request-id"] = call.id
        fields = "".join(f"{name}: {value}\r\n" for name, value in {**headers, **error.headers}.items())
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n{fields}\r\n"
        self.transport.write(head.encode() + error.body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _are_too_many(self) -> bool:
        return len(self.connections) > self._settings.max_connections

    @property
    def _is_too_large(self) -> bool:
        settings = self._settings
        num_bytes = max(self._num_head_bytes, self._num_fed_bytes)
        return num_bytes > settings.max_header_bytes or self._num_fields > settings.max_headers

    def _check_size(self) -> None:
        if self._is_too_large and not self._is_refused:
            self._refuse(self._too_large())

    def _too_large(self) -> ApiError:
        settings = self._settings
        message = f"the headers must have at most {settings.max_header_bytes} bytes and {settings.max_headers} fields"
        return ApiError(431, message, code="headers_too_large")

    def _time_head(self) -> None:
        """Start the timer of the next head unless it already runs."""
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._settings.header_seconds, self._be_late)

    def _be_late(self) -> None:
        self._head_timer = None
        if self._is_answering:
            self._time_head()  # reading may be paused until earlier answers have ended
            return
        seconds = self._settings.header_seconds
        self._refuse(ApiError(408, f"the headers did not arrive within {seconds:g} s", code="timeout"))

    def _end_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    # Sent bytes

    async def has_stalled(self) -> bool:
        """Wait while too many bytes are unsent. Return True if the client takes none for `stall_seconds`."""
        while self.flow.write_paused:
            num_unsent = self.transport.get_write_buffer_size()
            try:
                async with asyncio.timeout(self._settings.stall_seconds):
                    await self.flow.drain()
            except TimeoutError:
                if self.transport.get_write_buffer_size() >= num_unsent:
                    return True
        return False

    def check_reader(self) -> None:
        """Abort the connection if bytes have stayed unsent for more than `reader_seconds`.

        This must be called regularly.
        """
        now = time.monotonic()
        if self.transport is None or not self.transport.get_write_buffer_size():
            self._unsent_since = None
        elif self._unsent_since is None:
            self._unsent_since = now
        elif now - self._unsent_since > self._settings.reader_seconds:
            self.transport.abort()
