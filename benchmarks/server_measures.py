"""What bench_server measures of our server beside the traces: functions of running servers that give figures."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from bench_peers import Side, SideError, Worker, worker
from peer_models import PeerModel
from server_process import ServerError, ServerProcess, infer_command, llama_command, running
from serving_report import OURS, PEER, figures, first_token, percentile
from serving_trace import CONTEXT, Answer, Ask, Scenario, by_clients, closed, mixed

CLIENT = str(Path(__file__).parent / "server_client.py")
KIND_BY_SIDE = {OURS: "infer", PEER: "llama"}
MIB = 2**20


@dataclass(frozen=True)
class Counts:
    """How much of it."""

    rounds: int
    idle_seconds: float
    at_once: int
    cancels: int
    slow_readers: int


class HttpSides:
    """A server of each side at a time, and its clients' process. A server starts again where a scenario has other
    options: prefixes are always reused by both."""

    def __init__(self, model: PeerModel, threads: int, llama_server: str | None, logs: Path) -> None:
        self.model, self.threads, self._llama_server, self.logs = model, threads, llama_server, logs
        self.names = [PEER, OURS] if llama_server else [OURS]
        self._open: dict[str, tuple[object, ExitStack, Worker, ServerProcess]] = {}

    def run(self, name: str, scenario: Scenario) -> tuple[list[Answer], dict[str, float]]:
        """Raises SideError."""
        client, _ = self.server(name, scenario)
        return asked(client, scenario.asks), {}

    def server(self, name: str, scenario: Scenario) -> tuple[Worker, ServerProcess]:
        """Started, warm, and with clients. Raises SideError."""
        options = self._command(name, scenario)
        if name not in self._open or self._open[name][0] != options:
            self.stop(name)
            stack = ExitStack()
            try:
                server = stack.enter_context(running(options, self.logs / f"{KIND_BY_SIDE[name]}.log"))
            except ServerError as error:
                raise SideError(str(error)) from error
            client = stack.enter_context(worker(Side(name, (sys.executable, CLIENT, KIND_BY_SIDE[name]))))
            client.ask(do="load", port=server.port)
            asked(client, closed(4, 64, 32, 1, seed=1))  # warms up
            self._open[name] = (options, stack, client, server)
        _, _, client, server = self._open[name]
        return client, server

    def drop(self, name: str) -> None:
        self.stop(name)
        self.names.remove(name)

    def stop(self, name: str) -> None:
        if name in self._open:
            self._open.pop(name)[1].close()

    def close(self) -> None:
        for name in list(self._open):
            self.stop(name)

    def _command(self, name: str, scenario: Scenario) -> list[str]:
        path, context = self.model.path, scenario.options.get("context", CONTEXT)
        if name == PEER:
            assert self._llama_server is not None
            return llama_command(self._llama_server, path, self.threads, context, scenario.slots)
        pages = scenario.options.get("pool_pages")
        pool = [] if pages is None else ["--pool-pages", str(pages)]
        return infer_command(path, self.threads, context, scenario.slots, *pool)


def asked(client: Worker, asks: list[Ask]) -> list[Answer]:
    found = client.ask(do="serve", asks=[asdict(ask) for ask in asks])
    return [Answer(**each) for each in found["answers"]]


def one_client(sides: HttpSides, counts: Counts) -> Iterator[dict[str, float]]:
    """Rounds in which both answer the same requests, one after the other."""
    with worker(Side("library", (sys.executable, CLIENT, "library"))) as library:
        library.ask(do="load", path=str(sides.model.path), threads=sides.threads, context=CONTEXT)
        asked(library, closed(1, 64, 32, 2, seed=1))
        for turn in range(counts.rounds):
            asks = closed(1, 128, 100, 4, seed=900_000 + 100 * turn)
            alone = asked(library, asks)
            served, _ = sides.run(OURS, Scenario("one-client", asks))
            yield {
                "× LLM.stream": _rate(served) / _rate(alone),
                "first token beside LLM.stream (ms)": 1e3 * (_wait(served) - _wait(alone)),
                "answers unlike LLM.stream": sum(
                    a.token_ids != b.token_ids for a, b in zip(alone, served, strict=True)
                ),
            }


def start(sides: HttpSides, counts: Counts) -> Iterator[dict[str, float]]:
    for _ in range(counts.rounds):
        sides.stop(OURS)
        _, server = sides.server(OURS, Scenario("start", []))
        yield {"port answers after (s)": server.answers_after, "ready after (s)": server.ready_after}


def idle(sides: HttpSides, counts: Counts) -> Iterator[dict[str, float]]:
    """Of a server that has answered."""
    _, server = sides.server(OURS, Scenario("idle", []))
    time.sleep(1)
    before = server.cpu_seconds()
    time.sleep(counts.idle_seconds)
    share = (server.cpu_seconds() - before) / counts.idle_seconds
    yield {"% of a core": 100 * share, "resident (MiB)": server.resident_bytes() / MIB}


def at_once(sides: HttpSides, counts: Counts) -> Iterator[dict[str, float]]:
    """Capacity is what eight clients of a closed loop get of such requests."""
    asks = [replace(ask, leaves_after=None) for ask in mixed(counts.at_once, seed=3)]
    loop = Scenario("capacity", by_clients(asks[:64], 8))
    client, _ = sides.server(OURS, loop)
    capacity = figures(loop, asked(client, loop.asks), {})["tok/s"]
    answers = asked(client, asks)
    taken = [answer for answer in answers if answer.error is None]
    refused = [answer for answer in answers if answer.stats.get("status") == 429]
    waits = [answer.ended - answer.ready for answer in refused]
    tokens = sum(len(answer.arrivals) for answer in taken)
    yield {
        "taken": len(taken),
        "refused": len(refused),
        "failed otherwise": len(answers) - len(taken) - len(refused),
        "refusal p50 (ms)": 1e3 * percentile(waits, 50),
        "refusal p99 (ms)": 1e3 * percentile(waits, 99),
        "Retry-After p50 (s)": percentile([answer.stats["retry_after"] for answer in refused], 50),
        "first token p99 of those taken (s)": percentile([first_token(answer) for answer in taken], 99),
        "goodput of capacity": tokens / max(answer.ended for answer in taken) / capacity,
    }


def cancels(sides: HttpSides, counts: Counts) -> Iterator[dict[str, float]]:
    """Each after a few tokens, in 16 clients; the first tenth is what is compared with."""
    asks = [
        replace(ask, kind="plain", leaves_after=1 + index % 5)
        for index, ask in enumerate(mixed(counts.cancels, seed=5))
    ]
    client, server = sides.server(OURS, Scenario("cancels", []))
    asked(client, by_clients(asks[: counts.cancels // 10], 16))
    time.sleep(1)
    before = server.resident_bytes()
    asked(client, by_clients(asks[counts.cancels // 10 :], 16))
    time.sleep(1)
    yield {
        "requests that go on": server.metric("infer:num_requests_running"),
        "resident, × before": server.resident_bytes() / before,
    }


def slow_readers(sides: HttpSides, counts: Counts) -> Iterator[dict[str, float]]:
    """Beside whom eight clients should keep their rate: these have been answered, and take their time to read it."""
    scenario = Scenario("slow-readers", closed(8, 64, 128, 2, seed=77))
    client, server = sides.server(OURS, scenario)

    def rate() -> float:
        return figures(scenario, asked(client, scenario.asks), {})["tok/s"]

    for _ in range(counts.rounds):
        before = rate()
        with reading_slowly(server.port, counts.slow_readers):
            time.sleep(5)  # until they hold what the server sends without a reader
            beside = rate()
        yield {"rate of others × alone": 2 * beside / (before + rate())}


def isolate(sides: HttpSides, counts: Counts) -> Iterator[dict[str, float]]:
    """After kill -9 of the engine's process in the middle of a stream."""
    sides.stop(OURS)
    command = infer_command(sides.model.path, sides.threads, CONTEXT, 8, "--isolate")
    with running(command, sides.logs / "isolate.log") as server:
        for _ in range(counts.rounds):
            time.sleep(5)  # until there is a spare
            yield killed(server)


def killed(server: ServerProcess) -> dict[str, float]:
    asked = {"prompt": "Once upon a time", "max_tokens": 1000, "ignore_eos": True}
    with server.post("/v1/completions", {**asked, "stream": True}) as stream:
        stream.readline()
        os.kill(server.oldest_child(), signal.SIGKILL)
        last, longest = time.perf_counter(), 0.0
        for _ in iter(stream.readline, b""):
            now = time.perf_counter()
            last, longest = now, max(longest, now - last)
    return {"longest pause (s)": longest}


@contextmanager
def reading_slowly(port: int, count: int) -> Iterator[None]:
    """Clients in a process of their own, each of which reads a byte a second of a stream."""
    with subprocess.Popen([sys.executable, CLIENT, "slow", str(port), str(count)]) as process:
        try:
            yield
        finally:
            process.kill()


def _rate(answers: list[Answer]) -> float:
    """Of decoding: tokens per second after the first."""
    return median((len(a.arrivals) - 1) / (a.arrivals[-1] - a.arrivals[0]) for a in answers)


def _wait(answers: list[Answer]) -> float:
    return median(map(first_token, answers))


MEASURES: dict[str, Callable[[HttpSides, Counts], Iterator[dict[str, float]]]] = {
    "one-client": one_client, "start": start, "idle": idle, "at-once": at_once, "cancels": cancels,
    "slow-readers": slow_readers, "isolate": isolate,
}  # fmt: skip
