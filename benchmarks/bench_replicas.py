"""One process with all cores beside replicas that share them: tokens per second, first tokens, and memory.

    python benchmarks/bench_replicas.py --report benchmarks/reports/replicas.json

Sides take turns. Each client asks again as soon as it is answered; prompts differ from the first word, so that no side
has them in its cache.
"""

import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from check_failover import until_ready
from command_line import make_parser
from infer import __version__
from machine import cpu_model
from server_process import ServerProcess, running

SIDES = {"one process": [], "isolated": ["--isolate"], "two replicas": ["--replicas", "2"]}
PROMPT, NUM_TOKENS = "a word of a long prompt that nobody asked before, " * 10, 128


class Answer(NamedTuple):
    seconds: float
    first_token_seconds: float


def ask(url: str, number: int) -> Answer:
    body = {"prompt": f"{number} {PROMPT}", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, "seed": 1}
    began, first = time.perf_counter(), 0.0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line and not first:
                first = time.perf_counter() - began
    return Answer(time.perf_counter() - began, first)


def measure(server: ServerProcess, num_clients: int, num_each: int, first: int) -> dict[str, float]:
    url = f"http://127.0.0.1:{server.port}"

    def ask_some(client: int) -> list[Answer]:
        return [ask(url, first + client * num_each + number) for number in range(num_each)]

    began = time.perf_counter()
    with ThreadPoolExecutor(num_clients) as pool:
        answers = [answer for found in pool.map(ask_some, range(num_clients)) for answer in found]
    seconds = time.perf_counter() - began
    return {
        "tokens per second": len(answers) * NUM_TOKENS / seconds,
        "first token (s)": statistics.median(answer.first_token_seconds for answer in answers),
    }


def run(model: str, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {side: {"1 client": [], "8 clients": []} for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for side, options in SIDES.items():
                command = [
                    sys.executable,
                    "-m",
                    "infer",
                    "serve",
                    "--model",
                    model,
                    "--port",
                    "PORT",
                    "--no-access-log",
                ]
                with running([*command, *options], Path(folder) / "log") as server:
                    if "--replicas" in options:
                        until_ready(server, 2)
                    measure(server, 2, 1, number * 10_000)
                    found[side]["1 client"].append(measure(server, 1, 3, number * 10_000 + 100))
                    found[side]["8 clients"].append(measure(server, 8, 2, number * 10_000 + 200))
                    found[side]["resident MB"] = server.resident_bytes() / 1e6
                print(side, json.dumps(found[side]), file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = make_parser(__doc__, model="smollm2", rounds=2)
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "cpu": cpu_model(),
        "model": options.model,
        "sides": run(options.model, options.rounds),
    }
    print(json.dumps(report))
    if options.report:
        options.report.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
