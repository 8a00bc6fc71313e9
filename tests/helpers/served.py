"""A server over real sockets, in a thread of the test's process: several tests of a module share one."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, NamedTuple

import httpx
import pytest

from infer import LLM, AsyncLLM
from infer.serving.server.app import ROUTES
from infer.serving.server.endpoint import ApiRoute
from infer.serving.server.process import HttpServer, bind
from infer.serving.server.server_state import ServerState
from infer.serving.server_settings import ServerSettings

SECONDS = 300.0


class Served(NamedTuple):
    url: str
    state: ServerState
    client: httpx.Client  # a client of only this server

    @property
    def port(self) -> int:
        return self.state.settings.port

    def ask(self, path: str, /, **body: Any) -> Any:
        """Return the JSON of an answer whose status is 200."""
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, path: str, /, **body: Any) -> str:
        """Return the events of a stream whose status is 200, as a text."""
        answer = self.client.post(path, json={"stream": True} | body)
        assert answer.status_code == 200, answer.text
        return answer.text

    def refusal(self, path: str, /, *, status: int = 400, **body: Any) -> dict[str, Any]:
        """Return the error of a refused request."""
        answer = self.client.post(path, json=body)
        assert answer.status_code == status, answer.text
        error: dict[str, Any] = answer.json()["error"]
        return error


def served_model(name: str | None, **settings: Any) -> Any:
    """Return a fixture of a module: a server of the model that is the fixture of this name, or of none."""

    @pytest.fixture(scope="module")
    def served(request: pytest.FixtureRequest) -> Iterator[Served]:
        llm = None if name is None else request.getfixturevalue(name)
        with serving(llm, **{"model": "tiny"} | settings) as served:
            yield served

    return served


@contextmanager
def serving(llm: LLM | None, *, table: Sequence[ApiRoute] = ROUTES, **settings: Any) -> Iterator[Served]:
    """Serve a model that is ready, or for None a model that is loading until `state.become_ready`."""
    listener = bind(ServerSettings(port=0, **settings))
    port = listener.getsockname()[1]
    state = ServerState(ServerSettings(port=port, **settings))
    if llm is not None:
        state.become_ready(AsyncLLM(llm))
    server = HttpServer(state, table)
    server.config.timeout_graceful_shutdown = 1
    loops = SimpleQueue[asyncio.AbstractEventLoop]()

    async def serve() -> None:
        loops.put(asyncio.get_running_loop())
        await server.serve([listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="http", daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, timeout=SECONDS, verify=False) as client:  # to read certificates takes 40 ms
            yield Served(url, state, client)
    finally:
        loops.get(timeout=SECONDS).call_soon_threadsafe(server.stop)
        thread.join(SECONDS)
        assert not thread.is_alive()
