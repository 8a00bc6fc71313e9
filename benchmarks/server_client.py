"""The clients of bench_server, in a process of their own: traces of requests over HTTP, as JSON lines.

    python server_client.py infer|llama|library    requests on stdin, one answer a line on stdout
    python server_client.py slow PORT COUNT        clients that ask infer for a stream and read a byte a second of it

`library` is what a server is compared with: one caller of `LLM.stream` in its own process.
"""

import asyncio
import json
import socket
import sys
import time
from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from serving_trace import Answer, Ask
from serving_worker import GRAMMAR, AsyncServer, Server, answer_lines

HOST = "127.0.0.1"


class RefusedError(Exception):
    def __init__(self, status: int, headers: dict[str, str]) -> None:
        super().__init__(f"status {status}")
        self.status, self.headers = status, headers


async def events(port: int, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Of a stream. Raises RefusedError for a status other than 200."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        content = json.dumps(body).encode()
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(content)}\r\n\r\n".encode()
            + content
        )
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines if line)
        if (status := int(first.split()[1])) != 200:
            raise RefusedError(status, headers)
        unread = b""
        async for chunk in _chunks(reader):
            *whole, unread = (unread + chunk).split(b"\n\n")
            for event in whole:
                if event.startswith(b"data: ") and event != b"data: [DONE]":
                    yield json.loads(event[6:])
    finally:
        writer.close()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readline(), 16):
        yield (await reader.readexactly(size + 2))[:-2]


class HttpServer(AsyncServer):
    """A server that runs already. Each request has a connection of its own."""

    path: str

    def __init__(self, port: int) -> None:
        self._port = port

    def runs_on(self) -> str:
        return "its own process"

    @abstractmethod
    def body(self, ask: Ask) -> dict[str, Any]: ...

    @abstractmethod
    def token_ids(self, event: dict[str, Any]) -> list[int]: ...

    async def read(self, ask: Ask, answer: Answer) -> None:
        try:
            async with aclosing(events(self._port, self.path, self.body(ask))) as found:
                async for event in found:
                    if "error" in event:
                        raise RuntimeError(event["error"]["message"])
                    token_ids = self.token_ids(event)
                    answer.token_ids += token_ids
                    answer.arrivals += [self.now()] * len(token_ids)
                    if self.has_seen_enough(ask, answer):
                        break
        except RefusedError as refusal:
            answer.stats = {"status": refusal.status, "retry_after": float(refusal.headers.get("retry-after", 0))}
            raise


class InferOverHttp(HttpServer):
    path = "/v1/completions"

    def body(self, ask: Ask) -> dict[str, Any]:
        asked = {"grammar": {"regex": GRAMMAR}, "logprobs": {"logprobs": 5}}.get(ask.kind, {})
        return {
            "prompt": ask.prompt, "max_tokens": ask.new_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "return_token_ids": True, **asked,
        }  # fmt: skip

    def token_ids(self, event: dict[str, Any]) -> list[int]:
        return [token_id for choice in event["choices"] for token_id in choice.get("token_ids") or []]


class LlamaOverHttp(HttpServer):
    """llama-server, by its own route: the one that tells ids."""

    path = "/completion"

    def body(self, ask: Ask) -> dict[str, Any]:
        return {
            "prompt": ask.prompt, "n_predict": ask.new_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "return_tokens": True, "cache_prompt": True,
        }  # fmt: skip

    def token_ids(self, event: dict[str, Any]) -> list[int]:
        return [] if event["stop"] else event["tokens"]


class Library(Server):
    """One caller after the other: a trace's moments are not kept."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        from infer import LLM

        self._llm = LLM(path, threads=threads, max_seq_len=context)

    def runs_on(self) -> str:
        return "LLM.stream"

    def serve(self, asks: list[Ask]) -> list[Answer]:
        started = time.perf_counter()
        return [self._answer(ask, started) for ask in asks]

    def _answer(self, ask: Ask, started: float) -> Answer:
        answer = Answer(time.perf_counter() - started)
        for piece in self._llm.stream(ask.prompt, temperature=0, ignore_eos=True, max_new_tokens=ask.new_tokens):
            answer.arrivals.append(time.perf_counter() - started)
            answer.token_ids.append(piece.token_id)
        answer.ended = time.perf_counter() - started
        return answer


def read_slowly(port: int, count: int) -> None:
    """For ever. What the system keeps unread for such a client is little."""
    content = json.dumps({"prompt": "Once upon a time", "max_tokens": 16, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
    clients = []
    for _ in range(count):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect((HOST, port))
        client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        clients.append(client)
    while True:
        time.sleep(1)
        for client in clients:
            client.recv(1)


if __name__ == "__main__":
    if sys.argv[1] == "slow":
        read_slowly(int(sys.argv[2]), int(sys.argv[3]))
    else:
        answer_lines({"infer": InferOverHttp, "llama": LlamaOverHttp, "library": Library})
