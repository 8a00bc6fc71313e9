"""The page in headless Chromium: its first paint, warm and in a new browser beside an empty page's, and its longest
tasks while an answer streams.

    python benchmarks/bench_page.py

The server is this process, without a model: it sends tokens at a rate. A task of more than 50 ms is one that a person
feels. Goals: first paint after 200 ms at most, no such task at 500 tokens per second.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from command_line import make_parser
from infer.server.endpoint import ApiRoute
from infer.server.replies import json_response
from infer.server.routes import health
from infer.server.server_state import ServerState
from infer.server.sse import DONE, EventStream, event
from machine import cpu_model

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from browser import Page, browsing
from served import serving

WORDS = (
    "word",
    " and",
    " **bold**",
    " `code`",
    ",",
    " more",
    ".",
    "\n\n",
    "- item",
    "\n",
    "```\n",
    "x = 1\n",
    "```\n\n",
)
FACTS = {
    "model": "words", "description": "none", "version": "0", "system_fingerprint": "fp_0", "can_chat": True,
    "max_model_len": 1 << 20, "vocab_size": 100, "num_layers": 0, "total_slots": 1, "kv_type": "none", "cache_bytes": 0,
    "default_sampling": {"chat": {}, "text": {}},
}  # fmt: skip
WATCH = """{ window.tasks = [];
const note = (list) => tasks.push(...list.getEntries().map((each) => each.duration));
new PerformanceObserver(note).observe({type: 'longtask'}) }"""
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rate", type=float, default=500.0, help="tokens per second")
    parser.add_argument("--tokens", type=int, default=4000)
    args = parser.parse_args()
    print(cpu_model())
    with serving(None, table=table(args.rate, args.tokens), model="words") as served:
        served.state.phase = "ready"
        cold = [(first_paint(served.url + "/empty"), first_paint(served.url + "/")) for _ in range(3)]
        print(f"first paint, new browser  {', '.join(f'{page:.0f} (empty {empty:.0f})' for empty, page in cold)} ms")
        with browsing() as browser:
            tab = browser.page(1280, 800)
            paints = [paint_of(tab, served.url + "/") for _ in range(5)]
            print(f"first paint, warm         {', '.join(f'{each:.0f}' for each in paints[1:])} ms (goal 200)")
            stream(tab, args.tokens)


def first_paint(url: str) -> float:
    with browsing() as browser:
        return paint_of(browser.page(1280, 800), url)


def paint_of(tab: Page, url: str) -> float:
    """Milliseconds."""
    tab.open(url)
    return float(tab.until(PAINT))


def table(rate: float, num_tokens: int) -> list[ApiRoute]:
    async def props(request: Request, state: ServerState) -> Response:
        return json_response(FACTS)

    async def empty(request: Request, state: ServerState) -> Response:
        return Response("<!doctype html><p>empty", media_type="text/html")

    async def chat(request: Request, state: ServerState) -> Response:
        return EventStream(chunks(), comment_seconds=10.0)

    async def chunks() -> AsyncGenerator[bytes, None]:
        began = time.monotonic()
        for index in range(num_tokens):
            await asyncio.sleep(max(0.0, began + index / rate - time.monotonic()))
            yield event(json.dumps(chunk(index, num_tokens)).encode())
        yield DONE

    own = [
        ApiRoute("GET", "/props", props),
        ApiRoute("GET", "/empty", empty, is_open=True),
        ApiRoute("POST", "/v1/chat/completions", chat),
    ]
    return [*web_files.ROUTES, *health.ROUTES, *own]


def chunk(index: int, num_tokens: int) -> dict[str, object]:
    word = WORDS[index * 7919 % len(WORDS)]
    choice = {
        "index": 0,
        "delta": {"content": word},
        "finish_reason": "length" if index == num_tokens - 1 else None,
        "token_ids": [index % 100],
        "token_bytes": [list(word.encode())],
        "token_origins": ["sampled"],
        "logprobs": {"content": [{"token": word, "logprob": -0.5, "top_logprobs": []}]},
    }
    return {"choices": [choice], "system_fingerprint": "fp_0"}


def stream(tab: Page, num_tokens: int) -> None:
    tab.until("document.getElementById('status').dataset.state === 'ready'")
    tab.run(WATCH)
    tab.run("document.getElementById('composer-text').focus()")
    tab.type("go")
    tab.key("Enter")
    began = time.monotonic()
    tab.until(f"document.querySelector('.answer .facts')?.textContent.startsWith('{num_tokens} tokens')", 120.0)
    seconds = time.monotonic() - began
    tasks = tab.run("tasks")
    found = f"{len(tasks)} tasks of over 50 ms, the longest {max(tasks, default=0.0):.0f} ms (goal 0)"
    print(f"{num_tokens} tokens in {seconds:.1f} s: {found}")


if __name__ == "__main__":
    main()
