"""The connections of clients, and their calls: one HTTP request each, as the log and the metrics record it.

A connection counts and times arriving bytes before they form a request, and refuses them in OpenAI's format. uvicorn
limits neither the size of headers nor the time that they take, and answers broken requests in plain text.

Another process can continue the stream of a call. Tokens depend only on the prompt, the parameters, the seed and their
positions. So the events of a stream are equal byte by byte if its parts are divided as before. Only counts of cached
tokens may differ. A comment before the events of each part notes its tokens (`SentPart.note`). The process that asks
again sends all these tokens with the request (`pack`). They are then given, not sampled, and cost as much as tokens of
a prompt.
"""

import asyncio
import base64
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from http import HTTPStatus
from typing import Any, NamedTuple, Self, final

import msgspec
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from infer.outputs import GenerationResult, TokenLogprob
from infer.serving.protocols.api_errors import ApiError
from infer.serving.server.door import Entry
from infer.serving.server_settings import ServerSettings

CONNECTION = "infer.connection"  # the key of a scope that has its connection
_LINGER_SECONDS = 1.0  # bytes that arrive after a refusal are dropped; an immediate close could hide the answer
_UNKNOWN_METHOD = "_OTHER"  # OpenTelemetry's name
_FIELD_BYTES = 4  # ": " and the end of the line
_SINGLE = (b"host", b"content-type", b"authorization", b"x-api-key", b"origin")  # a second one would be ignored
CALL = "infer.call"  # the key of a scope that has the call of its request
NO_ROUTE = "none"
# Headers of a request from the process that clients talk to: the name of the client's key, the call's id and its time,
# the number of bytes before the body that describe the part of the stream already sent, and the seconds that the
# request waited for its model to be loaded.
HANDED_HEADERS = ("x-infer-key-name", "x-infer-id", "x-infer-created", "x-infer-sent", "x-infer-load-seconds")
FINGERPRINT_HEADER = "x-infer-fingerprint"  # in an answer to that process: only the same model may continue it
NOTE = b": infer "
FAILED = b": infer-engine-failed\n\n"  # before the last event of a stream whose engine has failed
_END = b"\n\n"


class SentPart(NamedTuple):
    """A part of a stream that was sent. Parts are kept in the order in which they were sent.

    No tokens mean the end of the choice. `logprobs` has one entry per token, or is empty.
    """

    choice: int
    token_ids: list[int]
    logprobs: tuple[TokenLogprob, ...] = ()

    @classmethod
    def of_note(cls, event: bytes) -> Self:
        """Return the part that a note in a stream describes."""
        return msgspec.msgpack.decode(base64.b64decode(event[len(NOTE) :]), type=cls)

    @property
    def note(self) -> bytes:
        """The comment of a stream that describes the part."""
        return NOTE + base64.b64encode(msgspec.msgpack.encode(self)) + _END


pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.Decoder(list[SentPart]).decode  # parts, as bytes of a request


def given_to(choice: int, parts: Sequence[SentPart]) -> tuple[list[int], list[TokenLogprob]]:
    """Return all tokens of a choice except the last one, and their log-probabilities.

    The last token is sampled again, because it may be the one that ends the answer.
    """
    own = [part for part in parts if part.choice == choice]
    token_ids = [token_id for part in own for token_id in part.token_ids]
    logprobs = [logprob for part in own for logprob in part.logprobs]
    return token_ids[:-1], logprobs[: max(0, len(token_ids) - 1)]


@final
@dataclass(eq=False)
class Call:
    """One HTTP request. `id` is the server's own; clients see it as `x-request-id` unless they sent one."""

    client_id: str | None  # the `x-request-id` that was sent
    method: str
    id: str = field(default_factory=lambda: f"req-{secrets.token_hex(12)}")
    route: str = NO_ROUTE  # the path in the table of routes
    received_at: float = field(default_factory=time.perf_counter)
    created: int = field(default_factory=lambda: int(time.time()))
    load_seconds: float = 0.0  # waited for the model, before `received_at`
    key_name: str = ""  # name of the API key
    operation: str = ""  # such as "chat"; "" for a request that does not use the model
    model: str = ""  # the name that the client used
    status: int = 0  # 0: the client disconnected before the answer's headers
    error_code: str = ""
    phase: str = "received"  # what is done for it now
    left_in: str = ""  # the phase in which the client disconnected
    warnings: list[str] = field(default_factory=list)  # about the request's body; the answer contains them
    answers: list[Any] = field(default_factory=list)  # `requests.answer.Answer`: those in the queue
    is_forwarded: bool = False  # sent on to the engine's process, which counts and logs it
    is_probe: bool = False  # sent by the process that clients talk to: neither counted nor logged
    is_noted: bool = False  # its stream has notes, with which another process can continue it
    notes: list[bytes] = field(default_factory=list)  # notes of the parts whose events are sent next
    num_sent_bytes: int = 0  # bytes before the body that describe `sent`
    sent: Sequence[SentPart] = ()  # parts of the stream, sent by a process that died
    entry: Entry | None = None  # the place that the door gave it

    @property
    def seconds(self) -> float:
        """Seconds since the server received the request, including its wait for the model to be loaded."""
        return self.load_seconds + time.perf_counter() - self.received_at

    @cached_property
    def results(self) -> list[GenerationResult]:
        """The results of the answers, including cancelled ones. Read it only after the call has ended."""
        return [answer.sequence.result() for answer in self.answers]

    def add(self, answer: Any) -> None:
        """Note one more answer, which is now in the queue."""
        self.answers.append(answer)
        self.phase = "answering"
        if self.entry is not None:
            self.entry.num_submitted += 1

    def handed_on(self, num_sent_bytes: int, load_seconds: float) -> list[tuple[bytes, bytes]]:
        """Return the headers by which another process takes this call over."""
        values = self.key_name, self.id, self.created, num_sent_bytes, f"{load_seconds:.6f}"
        return [(name.encode(), str(value).encode()) for name, value in zip(HANDED_HEADERS, values, strict=True)]

    def take_over(self, headers: Headers) -> None:
        """Set the fields that are `handed_on`. A readiness probe, which clients do not send, has no id."""
        texts = (headers.get(name, "").encode("latin-1").decode() for name in HANDED_HEADERS)  # they are UTF-8
        self.key_name, call_id, created, sent, load_seconds = texts
        if call_id:
            self.id, self.created, self.num_sent_bytes, self.is_noted = call_id, int(created), int(sent), True
            self.load_seconds = float(load_seconds or 0.0)
        else:
            self.is_probe = True

    def cancel(self) -> None:
        """Cancel all answers of the call."""
        for answer in self.answers:
            answer.cancel()

    def cancel_waiting(self) -> None:
        """Cancel the answers of the call that have not begun."""
        for answer in self.answers:
            if not (answer.sequence.has_slot or answer.sequence.pieces):
                answer.cancel()


def call_of(connection: HTTPConnection) -> Call:
    """Return the call of a request that goes through the server's app."""
    call: Call = connection.scope[CALL]
    return call


@final
class Connection(HttpToolsProtocol):
    def __init__(self, settings: ServerSettings, on_refusal: Callable[[Call], None], **arguments: Any) -> None:
        """Create a connection. `on_refusal` is called for each answer that does not come from the app."""
        super().__init__(**arguments)
        self._settings, self._on_refusal = settings, on_refusal
        self._is_in_head, self._is_refused = True, False
        self._has_heard = False  # at least one byte has arrived
        self._is_surplus = False  # more connections than allowed were open when this one was made
        self.url = b""  # before the first head has begun
        self._num_fields = self._num_field_bytes = 0  # complete fields of the head and the trailer, and their bytes
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
        if (problem := self._size_problem()) is not None:
            self._refuse(problem)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._num_fields, self._num_field_bytes, self._num_fed_bytes = True, 0, 0, 0
        self._time_head()
        scope: Any = self.scope
        scope[CONNECTION] = self

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a field. A trailer's fields are dropped: they must not depend on when its bytes arrive."""
        self._num_fields += 1
        self._num_field_bytes += len(name) + len(value) + _FIELD_BYTES
        if self._is_in_head:
            super().on_header(name, value)
        elif (problem := self._size_problem()) is not None:
            self._refuse(problem)

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
        if (problem := self._size_problem()) is not None:
            return problem
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

    def _size_problem(self) -> ApiError | None:
        settings, num_bytes = self._settings, max(len(self.url) + self._num_field_bytes, self._num_fed_bytes)
        if num_bytes > settings.max_header_bytes or self._num_fields > settings.max_headers:
            rule = f"at most {settings.max_header_bytes} bytes and {settings.max_headers} fields"
            return ApiError(431, f"the headers must have {rule}", code="headers_too_large")
        return None

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
