"""One side of bench_serving: clients of an engine in this process, or of a server that runs already.

    python serving_worker.py LLM|llama.cpp|http|llama-server

llama.cpp is used as in its own examples: each step is a batch with the next token of every sequence, and with tokens of
prompts up to its size, the oldest first. Sampling is greedy. This side needs only llama-cpp-python.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from harness import answer_lines
from load import Answer, Ask, Clients

HOST = "127.0.0.1"
ANY_TEXT = {"regex": r"(?s:.*)"}
BATCH_TOKENS = 512


class LibraryClients(Clients):
    """Tasks that read streams of an `AsyncLLM`."""

    def __init__(self, path: str, threads: int, context: int, slots: int, **options: Any) -> None:
        from infer import AsyncLLM

        self._llm = AsyncLLM(path, threads=threads, max_seq_len=context, **options)

    async def read(self, ask: Ask, answer: Answer) -> None:
        asked = {"grammar": ANY_TEXT, "logprobs": {"logprobs": 20}}.get(ask.kind, {})
        options = {"max_new_tokens": ask.new_tokens, **asked}
        async with self._llm.stream(ask.prompt, temperature=0, ignore_eos=True, **options) as stream:
            async for piece in stream:
                self.note(answer, [piece.token_id])
                if self.has_seen_enough(ask, answer):
                    break


class HttpClients(Clients):
    """Clients of `infer serve`, or of a server with its API. Each request has a new connection."""

    path = "/v1/completions"

    def __init__(self, port: int) -> None:
        self._port = port

    def body(self, ask: Ask) -> dict[str, Any]:
        asked = {"grammar": ANY_TEXT, "logprobs": {"logprobs": 5}}.get(ask.kind, {})
        return {
            "prompt": ask.prompt, "max_tokens": ask.new_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "return_token_ids": True, **asked,
        }  # fmt: skip

    def token_ids(self, event: dict[str, Any]) -> list[int]:
        return [token_id for choice in event["choices"] for token_id in choice.get("token_ids") or []]

    async def read(self, ask: Ask, answer: Answer) -> None:
        async with aclosing(_events(self._port, self.path, self.body(ask))) as found:
            async for event in found:
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                self.note(answer, self.token_ids(event))
                if self.has_seen_enough(ask, answer):
                    break


class LlamaServerClients(HttpClients):
    """Clients of llama-server's own route, which gives token ids."""

    path = "/completion"

    def body(self, ask: Ask) -> dict[str, Any]:
        return {
            "prompt": ask.prompt, "n_predict": ask.new_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "return_tokens": True, "cache_prompt": True,
        }  # fmt: skip

    def token_ids(self, event: dict[str, Any]) -> list[int]:
        return [] if event["stop"] else event["tokens"]


async def _events(port: int, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a stream. Raise RuntimeError for a status other than 200."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        content = json.dumps(body).encode()
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(content)}\r\n\r\n".encode()
            + content
        )
        first = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").partition("\r\n")[0]
        if int(first.split()[1]) != 200:
            raise RuntimeError(first)
        unread = b""
        while size := int(await reader.readline(), 16):
            chunk = (await reader.readexactly(size + 2))[:-2]
            *whole, unread = (unread + chunk).replace(b"\r", b"").split(b"\n\n")
            for event in whole:
                if event.startswith(b"data: ") and event != b"data: [DONE]":
                    yield json.loads(event[6:])
    finally:
        writer.close()


@dataclass
class _Sequence:
    """A sequence of llama.cpp. `pending` are tokens that its cache lacks."""

    slot: int
    ask: Ask
    answer: Answer
    pending: list[int]
    over: asyncio.Future[None]
    position: int = 0


class LlamaClients(Clients):
    """Tasks that wait for the steps of llama.cpp. A separate task runs the steps."""

    def __init__(self, path: str, threads: int, context: int, slots: int, **options: Any) -> None:
        import llama_cpp

        self._api, self._free = llama_cpp, list(range(slots))
        llama_cpp.llama_backend_init()
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, None)
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = context + slots * 1536, slots, True
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._sampler = llama_cpp.llama_sampler_init_greedy()
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._waiting: list[tuple[Ask, Answer, asyncio.Future[None]]] = []
        self._running: list[_Sequence] = []
        self._driver: asyncio.Task[None] | None = None

    async def read(self, ask: Ask, answer: Answer) -> None:
        over = asyncio.get_running_loop().create_future()
        self._waiting.append((ask, answer, over))
        if self._driver is None:
            self._driver = asyncio.create_task(self._run())
        await over

    async def _run(self) -> None:
        """Run steps until no client waits. An error ends all answers."""
        try:
            while self._waiting or self._running:
                self._step()
                await asyncio.sleep(0)
        except RuntimeError as error:
            for over in [over for _, _, over in self._waiting] + [sequence.over for sequence in self._running]:
                over.set_exception(error)
            self._waiting, self._running = [], []
        finally:
            self._driver = None

    def _step(self) -> None:
        while self._waiting and self._free:
            ask, answer, over = self._waiting.pop(0)
            self._running.append(_Sequence(self._free.pop(), ask, answer, list(ask.prompt), over))
        batch, api = self._batch, self._api
        batch.n_tokens, sampled = 0, list[tuple[_Sequence, int]]()
        for sequence in sorted(self._running, key=lambda each: (len(each.pending) > 1, each.answer.ready)):
            count = min(len(sequence.pending), BATCH_TOKENS - batch.n_tokens)
            for token in sequence.pending[:count]:
                at = batch.n_tokens
                batch.token[at], batch.pos[at], batch.logits[at] = token, sequence.position, False
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence.slot
                batch.n_tokens += 1
                sequence.position += 1
            del sequence.pending[:count]
            if count and not sequence.pending:
                batch.logits[batch.n_tokens - 1] = True
                sampled.append((sequence, batch.n_tokens - 1))
        if (status := api.llama_decode(self._context, batch)) != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        for sequence, at in sampled:
            token = api.llama_sampler_sample(self._sampler, self._context, at)
            sequence.pending = [token]
            self.note(sequence.answer, [token])
        for sequence in list(self._running):
            is_whole = len(sequence.answer.arrivals) == sequence.ask.new_tokens
            if is_whole or self.has_seen_enough(sequence.ask, sequence.answer):
                self._end(sequence)

    def _end(self, sequence: _Sequence) -> None:
        self._running.remove(sequence)
        self._free.append(sequence.slot)
        api = self._api
        api.llama_memory_seq_rm(api.llama_get_memory(self._context), sequence.slot, -1, -1)
        sequence.over.set_result(None)


CLIENTS = {
    "LLM": LibraryClients, "llama.cpp": LlamaClients, "http": HttpClients, "llama-server": LlamaServerClients,
}  # fmt: skip


if __name__ == "__main__":
    made = dict[str, Clients]()

    def load(**options: Any) -> None:
        made["clients"] = CLIENTS[sys.argv[1]](**options)

    answer_lines(load=load, serve=lambda asks: made["clients"].serve(asks))
