"""One side of bench_serving: an engine in a process of its own that answers traces, as JSON lines.

    python serving_worker.py llama|infer    requests on stdin, one answer a line on stdout

llama.cpp is driven as its own examples do it: a batch for each step with the next token of every sequence and, as far
as it has room, tokens of prompts, oldest first; sampling is greedy. The llama side needs nothing but llama-cpp-python.
"""

import asyncio
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any

from serving_trace import Answer, Ask

GRAMMAR = r"(?s:.*)"
BATCH_TOKENS = 512


class Server(ABC):
    @abstractmethod
    def serve(self, asks: list[Ask]) -> list[Answer]: ...

    def state(self) -> dict[str, Any]:
        """What the engine tells of itself."""
        return {}

    @abstractmethod
    def runs_on(self) -> str: ...


class AsyncServer(Server):
    """A client is a task of an event loop."""

    def serve(self, asks: list[Ask]) -> list[Answer]:
        return asyncio.run(self._serve(asks))

    @abstractmethod
    async def read(self, ask: Ask, answer: Answer) -> None:
        """Ask, and note what comes, until it ends or `has_seen_enough`."""

    def has_seen_enough(self, ask: Ask, answer: Answer) -> bool:
        left = ask.leaves_after is not None and len(answer.arrivals) >= ask.leaves_after
        return left or (ask.is_background and self._num_awaited == 0)

    def now(self) -> float:
        return time.perf_counter() - self._started

    async def _serve(self, asks: list[Ask]) -> list[Answer]:
        self._started = time.perf_counter()
        self._answers = [Answer(ask.at) for ask in asks]
        self._has_ended = [asyncio.Event() for _ in asks]
        self._num_awaited = sum(not ask.is_background for ask in asks)
        await asyncio.gather(*(self._answer(index, ask) for index, ask in enumerate(asks)))
        return self._answers

    async def _answer(self, index: int, ask: Ask) -> None:
        answer = self._answers[index]
        if ask.after is not None:
            await self._has_ended[ask.after].wait()
            answer.ready += self._answers[ask.after].ended
        await asyncio.sleep(max(0.0, answer.ready - self.now()))
        try:
            await self.read(ask, answer)
        except Exception as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended = self.now()
        self._num_awaited -= not ask.is_background
        self._has_ended[index].set()


class InferServer(AsyncServer):
    def __init__(self, path: str, threads: int, context: int, slots: int, **options: Any) -> None:
        from infer import AsyncLLM

        self._llm = AsyncLLM(path, threads=threads, max_seq_len=context, **options)

    def serve(self, asks: list[Ask]) -> list[Answer]:
        self._num_preempted = self._snapshot().num_preemptions
        return super().serve(asks)

    def state(self) -> dict[str, Any]:
        snapshot = self._snapshot()
        spread = snapshot.predicted_over_measured
        return {"preemptions": snapshot.num_preemptions - self._num_preempted, "predicted_over_measured": spread}

    def _snapshot(self) -> Any:
        host = self._llm.llm._opened
        return host.loop.run(host.engine.snapshot)

    def runs_on(self) -> str:
        from infer.backends.cpu.isa import instruction_set

        return instruction_set().name

    async def read(self, ask: Ask, answer: Answer) -> None:
        asked = {"grammar": {"regex": GRAMMAR}, "logprobs": {"logprobs": 20}}.get(ask.kind, {})
        options = {"max_new_tokens": ask.new_tokens, "tenant": ask.tenant, **asked}
        async with self._llm.stream(ask.prompt, temperature=0, ignore_eos=True, **options) as stream:
            async for piece in stream:
                answer.arrivals.append(self.now())
                answer.token_ids.append(piece.token_id)
                if self.has_seen_enough(ask, answer):
                    break
        result = await stream.result()
        answer.stats = {"reused_tokens": result.reused_tokens, **asdict(result.stats)}


@dataclass
class _Sequence:
    """A sequence of llama.cpp's. `pending` are tokens that its cache lacks."""

    id: int
    index: int
    ask: Ask
    answer: Answer
    pending: list[int]
    position: int = 0


class LlamaServer(Server):
    def __init__(self, path: str, threads: int, context: int, slots: int, **options: Any) -> None:
        import llama_cpp

        self._api, self._num_slots = llama_cpp, slots
        llama_cpp.llama_backend_init()
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, None)
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = context + slots * 1536, slots, True
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._sampler = llama_cpp.llama_sampler_init_greedy()
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def runs_on(self) -> str:
        known = self._api.llama_print_system_info().decode().split("|")
        return " ".join(name.split()[-1] for name, _, value in (part.partition("=") for part in known) if "1" in value)

    def serve(self, asks: list[Ask]) -> list[Answer]:
        self._started, self._asks = time.perf_counter(), asks
        self._answers = [Answer(ask.at) for ask in asks]
        self._coming = [index for index, ask in enumerate(asks) if ask.after is None]
        self._running: list[_Sequence] = []
        self._num_awaited = sum(not ask.is_background for ask in asks)
        while self._coming or self._running:
            self._admit()
            if self._running:
                self._step()
            else:
                time.sleep(max(0.0, min(self._answers[index].ready for index in self._coming) - self._now()))
        return self._answers

    def _admit(self) -> None:
        now = self._now()
        free = sorted(set(range(self._num_slots)) - {sequence.id for sequence in self._running})
        ready = sorted((index for index in self._coming if self._answers[index].ready <= now), key=self._ready)
        for slot, index in zip(free, ready, strict=False):
            self._coming.remove(index)
            ask = self._asks[index]
            self._running.append(_Sequence(slot, index, ask, self._answers[index], list(ask.prompt)))

    def _step(self) -> None:
        batch, api = self._batch, self._api
        batch.n_tokens, sampled = 0, list[tuple[_Sequence, int]]()
        for sequence in sorted(self._running, key=lambda each: (len(each.pending) > 1, each.answer.ready)):
            count = min(len(sequence.pending), BATCH_TOKENS - batch.n_tokens)
            for token in sequence.pending[:count]:
                at = batch.n_tokens
                batch.token[at], batch.pos[at], batch.logits[at] = token, sequence.position, False
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence.id
                batch.n_tokens += 1
                sequence.position += 1
            del sequence.pending[:count]
            if count and not sequence.pending:
                batch.logits[batch.n_tokens - 1] = True
                sampled.append((sequence, batch.n_tokens - 1))
        if (status := api.llama_decode(self._context, batch)) != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        for sequence, at in sampled:
            token, answer = api.llama_sampler_sample(self._sampler, self._context, at), sequence.answer
            sequence.pending = [token]
            answer.token_ids.append(token)
            answer.arrivals.append(self._now())
        for sequence in list(self._running):
            if self._is_answered(sequence.ask, len(sequence.answer.arrivals)):
                self._end(sequence)

    def _is_answered(self, ask: Ask, count: int) -> bool:
        return count in (ask.new_tokens, ask.leaves_after) or (ask.is_background and self._num_awaited == 0)

    def _end(self, sequence: _Sequence) -> None:
        self._running.remove(sequence)
        self._api.llama_memory_seq_rm(self._memory, sequence.id, -1, -1)
        sequence.answer.ended = self._now()
        self._num_awaited -= not sequence.ask.is_background
        for index, ask in enumerate(self._asks):
            if ask.after == sequence.index:
                self._answers[index].ready += sequence.answer.ended
                self._coming.append(index)

    def _ready(self, index: int) -> float:
        return self._answers[index].ready

    def _now(self) -> float:
        return time.perf_counter() - self._started


SERVERS: dict[str, type[Server]] = {"infer": InferServer, "llama": LlamaServer}


def answer_lines(servers: dict[str, type[Server]]) -> None:
    """Requests on stdin, one answer a line on stdout; the first argument says which server."""
    # Whatever a library prints goes to stderr: stdout carries the protocol alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kind, server = sys.argv[1], None
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        try:
            match request.pop("do"):
                case "load":
                    server = servers[kind](**request)
                    answer = {"runs_on": server.runs_on()}
                case "serve":
                    assert server is not None, "load a model first"
                    found = server.serve([Ask(**ask) for ask in request["asks"]])
                    answer = {"answers": [asdict(each) for each in found], "state": server.state()}
                case unknown:
                    raise ValueError(f"unknown request {unknown}")
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    answer_lines(SERVERS)
