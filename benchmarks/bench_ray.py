"""What a model costs through Ray: the same answers over HTTP from `infer serve` and from `infer ray deploy`, in turns.

Both are started here, with one engine each. Printed of each token: how much later it comes through Ray, counted from
the request, and what lies between two tokens; of each server: seconds to the first answer, and resident memory of all
its processes. Needs `pip install 'infer-engine[ray]'`.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from command_line import REPORTS, make_parser
from machine import write_report
from server_process import ServerProcess, running

PROMPT = "Once upon a time"


def arrivals(server: ServerProcess, num_tokens: int) -> list[float]:
    """Seconds from the request to each token, as its event came."""
    body = {"prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    began, found = time.perf_counter(), list[float]()
    with server.post("/v1/completions", {**body, "stream": True}) as response:
        for line in response:
            if line.startswith(b"data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                found += [time.perf_counter() - began] * len(choice.get("token_ids") or ())
    assert len(found) == num_tokens, f"{len(found)} tokens came"
    return found


def gap(found: list[float]) -> float:
    """The mean between two tokens."""
    return (found[-1] - found[0]) / (len(found) - 1)


def main() -> int:
    parser = make_parser(__doc__, model="smollm2", rounds=20)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    options = ["--port", "PORT", "--model", arguments.model, "--threads", "1"]
    commands = {"serve": ["serve", *options, "--no-access-log"], "ray": ["ray", "deploy", *options]}
    with tempfile.TemporaryDirectory() as name:
        servers, starts = dict[str, ServerProcess](), dict[str, float]()
        log = Path(name)
        began = time.perf_counter()
        with running([sys.executable, "-m", "infer", *commands["ray"]], log / "ray") as servers["ray"]:
            arrivals(servers["ray"], 2)
            starts["ray"], began = time.perf_counter() - began, time.perf_counter()
            with running([sys.executable, "-m", "infer", *commands["serve"]], log / "serve") as servers["serve"]:
                arrivals(servers["serve"], 2)
                starts["serve"] = time.perf_counter() - began
                found: dict[str, list[list[float]]] = {"serve": [], "ray": []}
                for _ in range(arguments.rounds):
                    for side, server in servers.items():
                        found[side].append(arrivals(server, arguments.tokens))
                memory = {side: server.resident_bytes() for side, server in servers.items()}
    later = sorted(
        1000 * (ray - serve)
        for ours, theirs in zip(found["serve"], found["ray"], strict=True)
        for serve, ray in zip(ours, theirs, strict=True)
    )
    results = {
        "token_later_ms": {f"p{share}": round(later[len(later) * share // 100], 2) for share in (10, 50, 90, 99)},
        "gap_ms": {side: round(1000 * statistics.median(map(gap, each)), 3) for side, each in found.items()},
        "first_ms": {side: round(1000 * statistics.median(each[0] for each in of), 1) for side, of in found.items()},
        "seconds_to_first_answer": {side: round(seconds, 1) for side, seconds in starts.items()},
        "resident_mb": {side: round(size / 2**20) for side, size in memory.items()},
    }
    print(json.dumps(results, indent=1))
    write_report(REPORTS, "ray", vars(arguments), results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
