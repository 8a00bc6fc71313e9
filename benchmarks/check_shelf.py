"""Check a server of several models that take turns in memory, under clients and while its processes are killed.

Every answer must be the one that the model gives alone. All processes together may take no more memory than the budget
and the front's process. A client that is refused returns when it was told, and must then be answered. With
`--kill-front N` the process in front is killed N times first: all its processes must end by themselves, and nothing may
be left. Ends with status 1 if a promise is broken.

    python benchmarks/check_shelf.py smollm2 gemma3-270m smollm2.gguf --memory 1800 --seconds 600 --clients 16 --report
"""

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from front_kills import kill_fronts
from harness import make_parser, say, write_report
from server_process import HOST, ServerProcess, children, running

FRONT_BYTES = 150e6  # memory of the front's process
PROMPTS = ("Once upon a time", "The capital of France", "def add(a, b):", "1, 2, 3,", "Dear Sir or Madam,")
TOKENS = 24


class Clients:
    """Clients that ask one random model after the other, until a time."""

    def __init__(self, url: str, names: Sequence[str], expected: dict[tuple[str, str], str]) -> None:
        self._url, self._names, self._expected = url, names, expected
        self._lock = threading.Lock()
        self.counts = Counter[str]()
        self.different = list[str]()
        self.seconds = list[float]()  # times from the first try to the answer

    def ask_until(self, until: float, seed: int) -> None:
        noise = random.Random(seed)
        with httpx.Client(base_url=self._url, timeout=300) as client:
            while time.time() < until:
                self._ask(client, noise.choice(self._names), noise.choice(PROMPTS))

    def _ask(self, client: httpx.Client, name: str, prompt: str) -> None:
        began, num_refused = time.time(), 0
        while (response := client.post("/v1/completions", json=body_of(name, prompt))).status_code in (429, 503):
            num_refused += 1
            time.sleep(float(response.headers.get("retry-after", 1)))
        response.raise_for_status()
        with self._lock:
            self.counts[name] += 1
            self.counts["refused"] += num_refused
            self.counts["refused again"] += max(0, num_refused - 1)
            self.seconds.append(time.time() - began)
            if (text := response.json()["choices"][0]["text"]) != self._expected[name, prompt]:
                self.different.append(f"{name}, {prompt!r}: {text!r}")


def body_of(name: str, prompt: str) -> dict[str, Any]:
    return {"model": name, "prompt": prompt, "max_tokens": TOKENS, "seed": 7, "temperature": 0.8, "ignore_eos": True}


def command_of(models: Sequence[str], *options: str) -> list[str]:
    named = [word for model in models for word in ("-m", model)]
    return [sys.executable, "-m", "infer", "serve", *named, "--port", "PORT", "--no-access-log", *options]


def answers_alone(models: Sequence[str], folder: Path) -> dict[tuple[str, str], str]:
    """Return the answers of each model, by its name and the prompt, from a server that has only this model."""
    found = dict[tuple[str, str], str]()
    for model in models:
        with running(command_of([model]), folder / "log") as server, httpx.Client(timeout=300) as client:
            for prompt in PROMPTS:
                url = f"http://{HOST}:{server.port}/v1/completions"
                answer = client.post(url, json=body_of(model, prompt)).raise_for_status().json()
                found[name_of(model), prompt] = answer["choices"][0]["text"]
    return found


def name_of(model: str) -> str:
    return Path(model).stem if model.endswith(".gguf") else model


def watch(server: ServerProcess, until: float, kill_seconds: float, found: dict[str, Any]) -> None:
    """Measure the memory of all processes, and kill one with a model from time to time."""
    noise, next_kill = random.Random(1), time.time() + kill_seconds
    while time.time() < until:
        time.sleep(0.2)
        try:
            found["most_bytes"] = max(found["most_bytes"], server.resident_bytes())
            if time.time() > next_kill and (processes := children(server.process.pid)):
                os.kill(noise.choice(processes), signal.SIGKILL)
                found["kills"] += 1
                next_kill = time.time() + kill_seconds
        except (OSError, ProcessLookupError):  # a process has just ended
            continue


def check_fronts(
    models: Sequence[str], options: Any, expected: dict[tuple[str, str], str], folder: Path
) -> dict[str, Any]:
    """Kill the process in front at random moments, and compare the answers between the kills."""
    noise = random.Random(2)

    def ask(url: str) -> None:
        name, prompt = noise.choice(list(expected))
        response = httpx.post(f"{url}/v1/completions", json=body_of(name, prompt), timeout=300)
        if response.status_code != 503:  # it is still loading
            answer = response.raise_for_status().json()["choices"][0]["text"]
            assert answer == expected[name, prompt], f"{name}, {prompt!r}: {answer!r}"

    command = command_of(models, "--memory", f"{options.memory}MB")
    return kill_fronts(command, ask, folder, num_kills=options.kill_front, longest=options.longest)


def check(models: Sequence[str], options: Any, folder: Path) -> dict[str, Any]:
    expected = answers_alone(models, folder)
    say(f"{len(expected)} answers are known")
    found: dict[str, Any] = {"most_bytes": 0, "kills": 0}
    if options.kill_front:
        found["fronts"] = check_fronts(models, options, expected, folder)
        say(str(found["fronts"]))
    with running(command_of(models, "--memory", f"{options.memory}MB"), folder / "log") as server:
        clients = Clients(f"http://{HOST}:{server.port}", [name_of(model) for model in models], expected)
        until = time.time() + options.seconds
        work = [partial(clients.ask_until, until, seed) for seed in range(options.clients)]
        with ThreadPoolExecutor(len(work) + 1) as pool:
            doing = [pool.submit(each) for each in work]
            watch(server, until, options.kill_every, found)
            for each in doing:
                each.result()
    loads = (folder / "log").read_text().count("loaded in")
    limit = options.memory * 1e6 + FRONT_BYTES
    return found | {
        "answers": dict(clients.counts),
        "different": clients.different,
        "loads": loads,
        "median_seconds": median(clients.seconds),
        "longest_seconds": max(clients.seconds),
        "is_within_budget": found["most_bytes"] <= limit,
    }


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--memory", type=int, default=1800, help="megabytes of all models together")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--kill-every", type=float, default=45.0, help="seconds between two kills")
    parser.add_argument("--kill-front", type=int, default=0, help="kills of the process in front, before all else")
    parser.add_argument("--longest", type=float, default=10.0, help="seconds from a start to such a kill, at most")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = check(options.models, options, Path(folder))
    say(str(found))
    write_report(options, **found)
    return 0 if found["is_within_budget"] and not found["different"] else 1


if __name__ == "__main__":
    sys.exit(main())
