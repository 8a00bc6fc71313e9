"""Check the service of clients that request twice what a server can compute, and return when they are told to.

The capacity is the rate of a crowd of concurrent clients. Then clients arrive at random, at `--load` times that rate. A
client that is refused waits as long as it is told, and asks again until it is answered. The goals:

    served           answers that end during the load, of what the capacity allows: at least 0.95
    kept             clients that were told at most once to wait for less than the longest time that clients are told,
                     and that had their first token within 1.2 times `--max-ttft` of being taken: at least 0.95
    refusals         for each client that was answered: at most 1 and 1.2 for each minute that it waited to be taken
    refusals_after   of a client that arrives after all others were answered: none

    python benchmarks/check_overload.py --seconds 600 --report benchmarks/reports/overload.json
"""

import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from harness import make_parser, say, write_report
from load import percentile
from server_process import running

NUM_AT_ONCE, PROMPT_TOKENS, ANSWER_TOKENS = 96, 64, 48
MAX_TTFT = 30.0  # seconds, the default of `infer serve`
LONGEST_TOLD = 55.0  # seconds: a client that is told a minute may be refused again
LEAST_SERVED, LEAST_KEPT, REFUSALS_A_MINUTE, LATE = 0.95, 0.95, 1.2, 1.2


@dataclass
class Client:
    """A client. All times are in seconds since the load began."""

    came_at: float
    told: list[float] = field(default_factory=list)  # seconds to wait, at each refusal
    taken_at: float = math.nan
    first_at: float = math.nan  # time of its first token
    ended_at: float = math.nan
    error: str = ""

    @property
    def is_kept(self) -> bool:
        is_late = self.first_at - self.taken_at > LATE * MAX_TTFT
        short = [seconds for seconds in self.told if seconds < LONGEST_TOLD]
        return not (self.error or is_late) and len(short) <= 1


class Load:
    def __init__(self, http: httpx.AsyncClient, seed: int = 1) -> None:
        self._http, self._draw, self._began = http, random.Random(seed), time.perf_counter()
        self.clients: list[Client] = []

    @property
    def now(self) -> float:
        return time.perf_counter() - self._began

    async def ask(self) -> Client:
        """Return when the client has its answer. It asks again after each refusal."""
        client = Client(self.now)
        self.clients.append(client)
        prompt = [self._draw.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]
        body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "stream": True, "ignore_eos": True}
        try:
            while (seconds := await self._try(client, body)) is not None:
                client.told.append(seconds)
                await asyncio.sleep(seconds)
        except (httpx.HTTPError, ValueError) as error:
            client.error = repr(error)[:200]
        return client

    async def _try(self, client: Client, body: dict[str, Any]) -> float | None:
        """Return the seconds that a refused client is told to wait, or None after an answer."""
        client.taken_at = self.now
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code == 429:
                return float(answer.headers["retry-after-ms"]) / 1000
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    found = json.loads(line.removeprefix("data: "))
                    if "error" in found:
                        raise ValueError(found["error"]["message"])
                    if math.isnan(client.first_at) and any(choice["text"] for choice in found["choices"]):
                        client.first_at = self.now
        client.ended_at = self.now
        return None

    async def come(self, rate: float, seconds: float) -> "list[asyncio.Task[Client]]":
        """Let clients arrive at random for some seconds."""
        tasks, due = list[asyncio.Task[Client]](), 0.0
        while (due := due + self._draw.expovariate(rate)) < seconds:
            await asyncio.sleep(due - self.now)
            tasks.append(asyncio.create_task(self.ask()))
        await asyncio.sleep(max(0.0, seconds - self.now))
        return tasks


async def measure(port: int, load: float, seconds: float) -> dict[str, float]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600, limits=limits) as http:
        capacity = 0.0
        for seed in (2, 3):  # the first one compiles, and the engine learns the costs of steps
            crowd = Load(http, seed)
            await asyncio.gather(*(crowd.ask() for _ in range(NUM_AT_ONCE)))
            capacity = NUM_AT_ONCE / crowd.now
        say(f"capacity: {capacity:.2f} requests a second")
        crowd = Load(http)
        tasks = await crowd.come(load * capacity, seconds)
        served = sum(client.ended_at <= seconds for client in crowd.clients) / (capacity * seconds)
        say(f"served {served:.2f} of the capacity")
        await asyncio.wait(tasks)
        for error, count in Counter(client.error for client in crowd.clients if client.error).items():
            say(f"{count} × {error}")
        after = await Load(http, 4).ask()
    return figures(crowd.clients, after) | {
        "capacity": capacity,
        "served": served,
        "drained_after": crowd.now - seconds,
    }


def figures(clients: Sequence[Client], after: Client) -> dict[str, float]:
    answered = [client for client in clients if not client.error]
    waits = [client.first_at - client.taken_at for client in answered]
    tries = [1 + len(client.told) for client in answered]
    return {
        "clients": len(clients),
        "errors": len(clients) - len(answered),
        "refusals": sum(len(client.told) for client in clients) / max(1, len(answered)),
        "waited": statistics.mean(client.taken_at - client.came_at for client in answered),
        "kept": sum(client.is_kept for client in clients) / max(1, len(clients)),
        "tries_median": statistics.median(tries),
        "tries_most": max(tries),
        "first_token_median": statistics.median(waits),
        "first_token_p99": percentile(waits, 99.0),
        "refusals_after": len(after.told),
    }


def is_good(found: dict[str, float]) -> bool:
    return (
        found["served"] >= LEAST_SERVED
        and found["kept"] >= LEAST_KEPT
        and found["refusals"] <= 1 + REFUSALS_A_MINUTE * found["waited"] / 60
        and found["errors"] == found["refusals_after"] == 0
    )


def main() -> int:
    parser = make_parser(__doc__, model="smollm2", threads=1)  # the clients need a core
    parser.add_argument("--load", type=float, default=2.0, help="times the capacity (2)")
    parser.add_argument("--seconds", type=float, default=600.0, help="of the load (600)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "infer", "serve", options.model, "--port", "PORT", "--no-access-log"]
        with running([*command, "--threads", str(options.threads)], Path(folder) / "log") as server:
            found = asyncio.run(measure(server.port, options.load, options.seconds))
    for name, value in found.items():
        print(f"{name:20} {value:8.2f}")
    write_report(options, **found)
    print("within the goals" if is_good(found) else "out of bounds")
    return 0 if is_good(found) else 1


if __name__ == "__main__":
    sys.exit(main())
