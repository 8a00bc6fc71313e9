"""Send bytes to a server and read its answers, for requests that no library would send."""

import json
import socket
from typing import Any, NamedTuple, Self

SECONDS = 300.0


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    def __init__(self, port: int, *, receive_bytes: int | None = None) -> None:
        self.socket = socket.socket()
        self.socket.settimeout(SECONDS)
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.connect(("127.0.0.1", port))
        self._reader = self.socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._reader.close()
        self.socket.close()

    def send(self, content: bytes) -> None:
        self.socket.sendall(content)

    def answer(self, *, has_body: bool = True) -> Answer:
        """Return the next answer except "100 Continue". Raises ConnectionError if the server closes instead."""
        line = self._reader.readline()
        if not line:
            raise ConnectionError("closed without an answer")
        headers = {}
        while (header := self._reader.readline().decode("latin-1").rstrip("\r\n")) != "":
            name, _, value = header.partition(":")
            headers[name.lower()] = value.strip()
        status = int(line.split()[1])
        if status == 100:
            return self.answer(has_body=has_body)
        return Answer(status, headers, self._body(headers) if has_body else b"")

    def line(self) -> bytes:
        return self._reader.readline()

    def is_closed(self) -> bool:
        """Return True if the server has closed the connection, or closes it in the time that tests wait."""
        try:
            return self._reader.read(1) == b""
        except ConnectionError:
            return True

    def _body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") != "chunked":
            return self._reader.read(int(headers.get("content-length", 0)))
        body = b""
        while size := int(self._reader.readline(), 16):
            body += self._reader.read(size)
            self._reader.readline()
        self._reader.readline()
        return body


def post(path: str, body: Any, *headers: str) -> bytes:
    """Return a request as bytes; `body` is JSON unless it is bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    head += [f"Content-Length: {len(content)}"]
    return "\r\n".join([*head, *headers, "", ""]).encode() + content
