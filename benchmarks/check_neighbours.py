"""Check the rate of one client's stream while another client misbehaves, in each of many ways.

The quiet client streams an answer alone, and then during each misdeed. The table has the ratio of its tokens per
second, its first token and its largest gap. Both clients have keys, so each is a tenant.
docs/explanation/overload.md promises that they share the machine.
Ends with 1 if a stream fails, or falls below the bounds.

    python benchmarks/check_neighbours.py --rounds 3 --report benchmarks/reports/neighbours.json
"""

import json
import math
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from harness import make_parser, say, write_report
from server_process import ServerProcess, running

LEAST_RATE = 0.5  # of the rate without a neighbour
MOST_GAP = 0.5  # seconds, on a quiet machine
QUIET = {"prompt": "Once upon a time", "max_tokens": 300, "temperature": 0, "stream": True, "ignore_eos": True}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]
SECONDS = 120.0


class Misdeed(NamedTuple):
    """A request that one client repeats without end, from `num_threads` threads. `body` takes a number that makes
    each one new.
    """

    name: str
    path: str
    num_threads: int
    body: Callable[[int], dict[str, Any]] | None  # None: a GET whose answer is read as it arrives


def _schema(schema: Mapping[str, Any], number: int) -> dict[str, Any]:
    named = {"name": "a", "schema": {**schema, "title": str(number)}}
    return {"messages": HELLO, "max_tokens": 20, "response_format": {"type": "json_schema", "json_schema": named}}


def _many_exclusions(number: int) -> dict[str, Any]:
    items = [{"not": {"enum": [number, index, "a", "b", "c", "d"]}} for index in range(10_000)]
    return _schema({"type": "array", "prefixItems": items, "minItems": 10_000, "items": False}, number)


def _many_properties(number: int) -> dict[str, Any]:
    properties = {f"p{number}_{index}": {"type": "string"} for index in range(2_000)}
    return _schema({"type": "object", "properties": properties, "minProperties": 1_000}, number)


def _tools(number: int) -> dict[str, Any]:
    schema = {"type": "object", "properties": {f"p{number}_{index}": {"type": "integer"} for index in range(200)}}
    tools = [{"type": "function", "function": {"name": f"f{index}", "parameters": schema}} for index in range(60)]
    return {"messages": HELLO, "tools": tools, "tool_choice": "required", "max_tokens": 20}


def _ambiguous(number: int) -> dict[str, Any]:
    rule = f'start: a\na: a a | a a a | "a" | | "{number}"'
    return {"messages": HELLO, "max_tokens": 200, "grammar": rule}


MISDEEDS = [
    Misdeed("nothing", "", 0, None),
    Misdeed("schema of many exclusions", CHAT, 2, _many_exclusions),
    Misdeed("schema of many properties", CHAT, 2, _many_properties),
    Misdeed("many large tools", CHAT, 2, _tools),
    Misdeed("ambiguous grammar", CHAT, 1, _ambiguous),
    Misdeed("regexes", COMPLETIONS, 8, lambda n: {
        "prompt": "A", "max_tokens": 1, "regex": "([a-z]{1,40}[0-9]{1,40}){1,9}" + str(n)}),
    Misdeed("tokenize 2 MB", "/tokenize", 6, lambda n: {"content": f"{n} " + "word and " * 220_000}),
    Misdeed("count tokens of 2 MB", "/v1/messages/count_tokens", 4, lambda n: {
        "model": "m", "messages": [{"role": "user", "content": f"{n} " + "word and " * 220_000}]}),
    Misdeed("events", "/v1/engine/events", 50, None),
    Misdeed("flood of answers", COMPLETIONS, 60, lambda n: {
        "prompt": f"{n} A", "max_tokens": 400, "ignore_eos": True}),
    Misdeed("n = 64", COMPLETIONS, 8, lambda n: {"prompt": f"{n} A", "max_tokens": 200, "n": 64, "ignore_eos": True}),
    Misdeed("long prompts", COMPLETIONS, 12, lambda n: {"prompt": f"{n} " + "zebra " * 2_000, "max_tokens": 4}),
]  # fmt: skip


class Heard(NamedTuple):
    first: float  # seconds to the first token
    rate: float  # tokens per second after it
    largest_gap: float  # seconds


def listen(client: httpx.Client) -> Heard:
    """Read an answer. Raises httpx.HTTPStatusError for a refusal and ValueError for an answer that is cut."""
    started, arrived = time.perf_counter(), list[float]()
    with client.stream("POST", COMPLETIONS, json=QUIET) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                found = json.loads(line.removeprefix("data: "))
                if "error" in found:
                    raise ValueError(found["error"]["message"])
                if any(choice["text"] for choice in found["choices"]):
                    arrived.append(time.perf_counter())
    gaps = [after - before for before, after in pairwise(arrived)]
    rate = (int(str(QUIET["max_tokens"])) - 1) / (arrived[-1] - arrived[0])
    return Heard(arrived[0] - started, rate, max(gaps))


def listen_or_not(client: httpx.Client) -> Heard:
    """Return a rate of 0 for a request that is refused or cut."""
    try:
        return listen(client)
    except (httpx.HTTPError, ValueError) as error:
        say(f"not answered: {error}")
        return Heard(math.inf, 0.0, math.inf)


@contextmanager
def misbehaving(misdeed: Misdeed, make_client: Callable[[], httpx.Client], numbers: Iterator[int]) -> Iterator[None]:
    """Send the requests without a pause during the body of `with`. Wait only a moment after a refusal."""
    is_over = threading.Event()

    def run() -> None:
        with make_client() as client:
            while not is_over.is_set():
                try:
                    if misdeed.body is None:
                        with client.stream("GET", misdeed.path) as answer:
                            for _ in answer.iter_raw():
                                if is_over.is_set():
                                    break
                    else:
                        client.post(misdeed.path, json=misdeed.body(next(numbers)))
                except httpx.HTTPError:
                    pass
                is_over.wait(0.05)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(misdeed.num_threads)]
    for thread in threads:
        thread.start()
    if threads:
        time.sleep(1.5)
    try:
        yield
    finally:
        is_over.set()


def measure(server: ServerProcess, names: list[str], rounds: int) -> dict[str, list[Heard]]:
    """Return the figures of the quiet client during each misdeed, in turns."""
    url, numbers = f"http://127.0.0.1:{server.port}", count()

    def client(key: str) -> httpx.Client:
        return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=SECONDS)

    found: dict[str, list[Heard]] = {}
    with client("sk-quiet") as quiet:
        listen(quiet)
        for _ in range(rounds):
            for misdeed in MISDEEDS:
                if names and misdeed.name not in (*names, "nothing"):
                    continue
                with misbehaving(misdeed, lambda: client("sk-loud"), numbers):
                    heard = listen_or_not(quiet)
                found.setdefault(misdeed.name, []).append(heard)
                say(f"{misdeed.name}: {heard}")
                _await_idle(quiet)
    return found


def _await_idle(client: httpx.Client) -> None:
    """Wait until all answers without a reader have ended."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.5)
        lines = client.get("/metrics").text.splitlines()
        if sum(float(line.split()[-1]) for line in lines if line.startswith("infer:num_requests_running")) == 0:
            return


def table(found: Mapping[str, list[Heard]]) -> tuple[list[dict[str, Any]], bool]:
    """Return the medians by misdeed, and whether all are within the bounds."""
    alone = statistics.median(heard.rate for heard in found["nothing"])
    rows = list[dict[str, Any]]()
    for name, heard in found.items():
        first, rate, gap = (statistics.median(column) for column in zip(*heard, strict=True))
        is_good = rate >= LEAST_RATE * alone and gap <= MOST_GAP
        rows.append({"misdeed": name, "first": first, "rate": rate, "ratio": rate / alone, "gap": gap, "good": is_good})
    return rows, all(row["good"] for row in rows)


def main() -> int:
    parser = make_parser(__doc__, model="smollm2", threads=1, rounds=3)  # the clients need a core
    parser.add_argument("--only", action="append", default=[], help="one misdeed by its name; may be repeated")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys, log = Path(folder) / "keys", Path(folder) / "log"
        keys.write_text("loud sk-loud\nquiet sk-quiet\n")
        keys.chmod(0o600)
        command = [sys.executable, "-m", "infer", "serve", options.model, "--port", "PORT", "--api-key-file", str(keys)]
        with running([*command, "--threads", str(options.threads)], log) as server:
            found = measure(server, options.only, options.rounds)
    rows, is_good = table(found)
    for row in rows:
        mark = "" if row["good"] else "  out of bounds"
        times = f"first {row['first']:6.2f} s  largest gap {row['gap']:5.2f} s"
        print(f"{row['misdeed']:28} {times}  {row['rate']:6.1f} tok/s  {row['ratio']:5.2f} of alone{mark}")
    write_report(options, rows=rows)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
