"""Check that no client notices when the replica that answers is killed, at a random moment of each answer.

Every answer must add up to the undisturbed one: tokens, log-probabilities, calls, reasoning, ids and usage. The pause
is the longest time between two reads of a stream, compared with undisturbed ones. The status is 1 if an answer differs.
With `--end stop`, the replica is stopped, as a debugger does it, and killed some seconds later. With `--end rank`, each
replica has two processes that share the model, and the second one is killed.

    python benchmarks/check_failover.py --kills 200 --report benchmarks/reports/failover.json
    python benchmarks/check_failover.py --kills 20 --end rank
"""

import json
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from failover_cases import TEMPLATE, cases, merged
from harness import make_parser, say, write_report
from server_process import ServerProcess, children, running

SECONDS = 120.0
STOPPED_SECONDS = 8.0  # after which a stopped replica is killed, because the next try needs it


class Heard(NamedTuple):
    adds_up_to: dict[str, Any]
    seconds: float
    longest_gap: float


def listen(client: httpx.Client, path: str, body: dict[str, Any], begun: threading.Event) -> Heard:
    """Read an answer. `begun` is set at the first byte of a stream, and otherwise at the start."""
    started = last = time.perf_counter()
    longest, chunks = 0.0, list[str]()
    if "stream" not in body:
        begun.set()
    with client.stream("POST", path, json=body) as answer:
        answer.raise_for_status()
        for chunk in answer.iter_text():
            now = time.perf_counter()
            if chunks:
                longest = max(longest, now - last)
            last = now
            chunks.append(chunk)
            begun.set()
    return Heard(merged("".join(chunks)), time.perf_counter() - started, longest)


def replica_processes(server: ServerProcess) -> dict[int, int]:
    """Return the replicas by their sockets' descriptors, the last word of their commands."""
    found = dict[int, int]()
    for pid in children(server.process.pid):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if len(words) > 1 and words[-2].isdigit():
            found[int(words[-2])] = pid
    return found


def num_running(server: ServerProcess) -> dict[int, float]:
    """Return the numbers of active answers, by the indices of the replicas that are ready."""
    lines = [line for line in server.get("/metrics").splitlines() if line.startswith("infer:num_requests_running{")]
    return {int(line.split('"')[1]): float(line.split()[-1]) for line in lines}


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def kill_rank(pid: int) -> None:
    ranks = [each for each in children(pid) if b"tensor_parallel" in Path(f"/proc/{each}/cmdline").read_bytes()]
    kill(ranks[0])


ENDS: dict[str, Callable[[int], None]] = {"kill": kill, "stop": stop, "rank": kill_rank}


def end_busiest(server: ServerProcess, sockets: Sequence[int], end: Callable[[int], None]) -> bool:
    """End the replica with the most answers. Return False if none has any. `sockets` are in the replicas' order."""
    running_by_index = num_running(server)
    if not any(running_by_index.values()):
        return False
    index = max(running_by_index, key=running_by_index.__getitem__)
    end(replica_processes(server)[sockets[index]])
    return True


def until_ready(server: ServerProcess, count: int) -> None:
    deadline = time.monotonic() + SECONDS
    while len(num_running(server)) < count:
        if time.monotonic() > deadline:
            raise TimeoutError("a replica did not come back")
        time.sleep(0.05)


def ask_all(client: httpx.Client, num_replicas: int) -> None:
    """Ask short questions in parallel, some for each replica. All must be answered."""

    def ask(number: int) -> None:
        body = {"prompt": f"Question {number}", "max_tokens": 4, "seed": number}
        client.post("/v1/completions", json=body).raise_for_status()

    with ThreadPoolExecutor() as pool:
        list(pool.map(ask, range(2 * num_replicas)))


def listen_while_killing(
    client: httpx.Client, path: str, body: dict[str, Any], after: float, end: Callable[[], bool]
) -> tuple[Heard, bool]:
    """Read an answer, and call `end` `after` seconds from its first byte. Return the answer and the result of `end`."""
    begun, killed = threading.Event(), list[bool]()

    def end_later() -> None:
        begun.wait()
        time.sleep(after)
        killed.append(end())

    killer = threading.Thread(target=end_later)
    killer.start()
    heard = listen(client, path, body, begun)
    killer.join()
    return heard, killed[0]


def check(
    server: ServerProcess,
    asked: Mapping[str, tuple[str, dict[str, Any]]],
    num_kills: int,
    num_replicas: int,
    seed: int,
    *,
    most_seconds: float = math.inf,
    end: Callable[[int], None] = kill,
) -> dict[str, Any]:
    """Check all cases. `asked` has the route and the body of each."""
    rng, found, started = random.Random(seed), list[dict[str, Any]](), time.monotonic()
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=SECONDS) as client:
        until_ready(server, num_replicas)
        sockets = sorted(replica_processes(server))
        expected = {name: listen(client, path, body, threading.Event()) for name, (path, body) in asked.items()}
        while len(found) < num_kills and time.monotonic() - started < most_seconds:
            until_ready(server, 2)
            ask_all(client, num_replicas)
            name = rng.choice(list(asked))
            after = rng.uniform(0, 0.9) * expected[name].seconds
            ends = partial(end_busiest, server, sockets, end)
            heard, was_killed = listen_while_killing(client, *asked[name], after, ends)
            if was_killed:
                equal = heard.adds_up_to == expected[name].adds_up_to
                found.append({"case": name, "after_seconds": after, "equal": equal, "gap": heard.longest_gap})
                say(json.dumps(found[-1]))
    gaps = sorted(each["gap"] for each in found if "stream" in asked[each["case"]][1]) or [0.0]
    undisturbed = max(heard.longest_gap for heard in expected.values())
    return {
        "kills": len(found),
        "different": sum(not each["equal"] for each in found),
        "pause_seconds": {"median": gaps[len(gaps) // 2], "longest": gaps[-1], "undisturbed": undisturbed},
        "tries": found,
    }


def main() -> int:
    parser = make_parser(__doc__, model="smollm2")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no further replica is killed")
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--end", choices=ENDS, default="kill", help="what becomes of the replica (kill)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE)
        command = [sys.executable, "-m", "infer", "serve", "--model", options.model, "--port", "PORT"]
        command += ["--replicas", str(options.replicas), "--chat-template", str(template), "--no-access-log"]
        if options.end == "rank":
            command += ["--tensor-parallel", "2", "--threads", "1"]
        if options.end == "stop":
            command += ["--watchdog-seconds", str(STOPPED_SECONDS)]
        with running(command, Path(folder) / "log") as server:
            asked, most, end = cases(options.tokens), options.seconds, ENDS[options.end]
            found = check(server, asked, options.kills, options.replicas, options.seed, most_seconds=most, end=end)
    print(json.dumps({name: value for name, value in found.items() if name != "tries"}))
    write_report(options, **found)
    return int(found["different"] > 0)


if __name__ == "__main__":
    sys.exit(main())
