"""One request to a replica and its answer, forwarded byte by byte, over its own connection.

The other side is the same server, on a socket that only this process uses.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from typing import NamedTuple, Protocol, final, runtime_checkable

import httptools

from infer.serving.distributed.router import RoutedPrompt
from infer.serving.protocols.events import LINES

_READ_BYTES, _END, _LINE_END = 2**16, b"\n\n", b"\n"
HOP_BY_HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade", b"expect", b"host", b"date"}
Headers = Iterable[tuple[bytes, bytes]]


class GoneError(Exception):
    """The other side has died, or does not exist."""


class ReplicaFailedError(GoneError):
    """The other side's engine has failed: its process is alive, but does not answer any more."""


class ResponseHead(NamedTuple):
    status: int
    headers: list[tuple[bytes, bytes]]


async def connected(path: str) -> "Exchange":
    """Return an exchange with the server that listens at `path`. Raises GoneError if there is none."""
    try:
        return Exchange(*await asyncio.open_unix_connection(path))
    except OSError:
        raise GoneError from None


def media_type_of(headers: Headers) -> str:
    """Return the media type of an answer, without its parameters."""
    return dict(headers).get(b"content-type", b"").partition(b";")[0].decode("latin-1")


def request_bytes(method: str, target: bytes, headers: Headers, body: bytes = b"") -> bytes:
    own = [(b"host", b"engine"), (b"connection", b"close"), (b"content-length", str(len(body)).encode())]
    fields = b"".join(name + b": " + value + b"\r\n" for name, value in (*headers, *own))
    return method.encode() + b" " + target + b" HTTP/1.1\r\n" + fields + b"\r\n" + body


@runtime_checkable
class ByteReader(Protocol):
    """A reader like asyncio's, or a reader of bytes that arrive in another way."""

    async def read(self, num_bytes: int, /) -> bytes: ...


@runtime_checkable
class ByteWriter(Protocol):
    def write(self, found: bytes, /) -> None: ...

    async def drain(self) -> None: ...

    def close(self) -> None: ...


@final
class Exchange:
    def __init__(self, reader: ByteReader, writer: ByteWriter) -> None:
        self._reader, self._writer = reader, writer
        self._parser = httptools.HttpResponseParser(self)
        self._headers = list[tuple[bytes, bytes]]()
        self._chunks = list[bytes]()
        self._has_head = self._has_ended = False
        self.load_seconds = 0.0  # that the request waited until the other side was loaded

    # Callbacks of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        self._has_ended = True

    # Requests. Each method raises GoneError if the other side is gone before the end.

    async def get(self, target: bytes) -> tuple[int, bytes]:
        """Send a GET request, and return status and body."""
        head = await self.head(request_bytes("GET", target, []))
        return head.status, await self.body()

    async def head(self, request: bytes) -> ResponseHead:
        with suppress(OSError):
            self._writer.write(request)
            await self._writer.drain()
        while not self._has_head:
            await self._read()
        kept = [(name, value) for name, value in self._headers if name not in HOP_BY_HOP]
        return ResponseHead(self._parser.get_status_code(), kept)

    async def body(self) -> bytes:
        return b"".join([chunk async for chunk in self._body_chunks()])

    async def events(self) -> AsyncGenerator[list[bytes], None]:
        """Yield the events that have arrived, for a body that is a stream of events or of lines.

        An incomplete event is dropped. A comment between lines, which only our own processes write, ends like an event.
        """
        rest, end = b"", _LINE_END if media_type_of(self._headers) == LINES else _END
        async for chunk in self._body_chunks():
            *whole, rest = (rest + chunk).split(end)
            if found := [event + (_END if event.startswith(b":") else end) for event in whole if event]:
                yield found

    def close(self) -> None:
        self._writer.close()

    async def _body_chunks(self) -> AsyncGenerator[bytes, None]:
        while True:
            if self._chunks:
                found, self._chunks = b"".join(self._chunks), []
                yield found
            elif self._has_ended:
                return
            else:
                await self._read()

    async def _read(self) -> None:
        try:
            found = await self._reader.read(_READ_BYTES)
        except OSError:
            found = b""
        if not found:
            raise GoneError
        self._parser.feed_data(found)


@runtime_checkable
class Exchanges(Protocol):
    """Exchanges with the replicas of a server."""

    @property
    def are_several(self) -> bool: ...

    def exchange(self, prompt: RoutedPrompt) -> AbstractAsyncContextManager[Exchange]:
        """Yield an exchange with the replica chosen for the prompt, when a replica is ready.

        Raises GoneError if that replica dies meanwhile.
        """

    async def get(self, target: bytes) -> dict[str, tuple[int, bytes]]:
        """Return status and body by name, for the replicas that are ready and answer soon."""
