"""Fronts: Ollama's API survives a replica's death, models come and go, and each route finds a model of its kind."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cases import cases
from embedding_model import make_embedding_model
from idle import until
from infer import LLM
from infer.model_settings import ModelSettings
from infer.models.catalog.header_facts import plan_served
from infer.serving.distributed.exchange import Exchange
from infer.serving.distributed.front import Front
from infer.serving.distributed.router import RoutedPrompt
from infer.serving.distributed.shelved_model import ModelPlan, ModelSource
from reranker_model import make_logit_score
from served import Served, serving
from shelves import FakeReplica, OneReplica, serving_shelf
from test_session import make_model

MESSAGES = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0, "num_predict": 8}
CHAT: dict[str, Any] = {"model": "a", "messages": MESSAGES, "options": GREEDY}
_TIMES = ("total_duration", "prompt_eval_duration", "eval_duration", "created_at")


@pytest.fixture(scope="module")
def child(llm: LLM) -> Iterator[Served]:
    with serving(llm, model="a", aliases=("b",), is_child=True) as child:
        yield child


class CutReader:
    """A reader of a connection that ends before a text, as if the process was killed."""

    def __init__(self, reader: asyncio.StreamReader, end: bytes) -> None:
        self._reader, self._end, self._has_ended = reader, end, False

    async def read(self, num_bytes: int, /) -> bytes:
        if self._has_ended:
            return b""
        found, end, _ = (await self._reader.read(num_bytes)).partition(self._end)
        self._has_ended = bool(end)
        return found


class DyingReplica(OneReplica):
    """A replica whose first connection ends before a text. Later ones may be to another port."""

    def __init__(self, port: int, end: bytes, later_port: int | None = None) -> None:
        super().__init__(port if later_port is None else later_port)
        self.num_asked, self._end, self._first_port = 0, end, port

    @asynccontextmanager
    async def exchange(self, prompt: RoutedPrompt) -> AsyncIterator[Exchange]:
        self.num_asked += 1
        if self.num_asked > 1:
            async with super().exchange(prompt) as exchange:
                yield exchange
            return
        reader, writer = await asyncio.open_connection("127.0.0.1", self._first_port)
        try:
            yield Exchange(CutReader(reader, self._end), writer)
        finally:
            writer.close()


def lines_of(served: Served, path: str, body: Any) -> list[dict[str, Any]]:
    answer = served.client.post(path, json=body)
    assert answer.headers["content-type"].startswith("application/x-ndjson"), answer.text
    found = [json.loads(line) for line in answer.text.splitlines()]
    return [{name: value for name, value in line.items() if name not in _TIMES} for line in found]


def text_of(lines: list[dict[str, Any]]) -> str:
    return "".join(line["message"]["content"] for line in lines)


@pytest.mark.parametrize("end", [b'"done":false', b'"done":true'], ids=["in its first line", "in its last line"])
def test_lines_continue_where_the_process_died_and_have_no_comments(child: Served, end: bytes) -> None:
    body = CHAT | {"options": {"seed": 3, "regex": "[a-z]{24}"}}
    replica = DyingReplica(child.port, end)
    with serving(child.state.llm().llm, model="a") as alone, serving(None, table=Front(replica).table) as front:
        front.state.phase = "ready"
        *expected, last = lines_of(alone, "/api/chat", body)
        *found, found_last = lines_of(front, "/api/chat", body)
    assert (replica.num_asked, found_last) == (2, last)
    assert (text_of(found), len(text_of(found))) == (text_of(expected), 24)


def test_no_stream_continues_with_the_model_of_other_files(child: Served, tmp_path: Path) -> None:
    with (
        LLM(make_model(tmp_path, num_layers=1)) as llm,
        serving(llm, model="a", is_child=True) as replaced,
        serving(None, table=Front(DyingReplica(child.port, b'"done":true', replaced.port)).table) as front,
    ):
        front.state.phase = "ready"
        *_, last = lines_of(front, "/api/chat", CHAT)
        assert last["code"] == "engine_died"
        assert lines_of(front, "/api/chat", CHAT)[-1]["done"], "the next answer is the new model's"


class OnShelf(NamedTuple):
    client: Any
    hung: list[str]  # names of models whose processes do not answer
    running: list[str]

    def post(self, path: str, **body: Any) -> Any:
        return self.client.post(path, json={"model": "a", "stream": False} | body)

    def expiry(self) -> float:
        """Return the seconds until the only loaded model is unloaded."""
        (model,) = self.client.get("/api/ps").json()["models"]
        return (datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)).total_seconds()


@pytest.fixture
def on_shelf(child: Served, folder: Path, tmp_path: Path) -> Iterator[OnShelf]:
    """Serve the models a and b, which are both the child's model."""

    def plan(source: ModelSource, most_bytes: int) -> ModelPlan:
        return ModelPlan(7, takes=("generate", "embed"), context=64)

    with serving_shelf(dict.fromkeys("ab", child.port), dict.fromkeys("ab", folder), plan, tmp_path) as (front, hung):
        yield OnShelf(front.client, hung, FakeReplica.running)


def test_an_answer_loads_its_model_and_the_lists_tell_of_it(on_shelf: OnShelf) -> None:
    tags = on_shelf.client.get("/api/tags").json()["models"]
    assert [each["name"] for each in tags] == ["a:latest", "b:latest"]
    assert tags[0]["size"] > 0
    assert on_shelf.post("/api/show", model="b").json()["model_info"]["llama.context_length"] > 0
    assert on_shelf.client.get("/api/ps").json() == {"models": []}
    found = on_shelf.post("/api/chat", **CHAT | {"model": "b:latest"}).json()
    assert (found["model"], found["done"], on_shelf.running) == ("b", True, ["b"])
    assert 0 < found["load_duration"] < found["total_duration"]
    assert on_shelf.post("/api/chat", **CHAT | {"model": "b"}).json()["load_duration"] == 0
    (loaded,) = on_shelf.client.get("/api/ps").json()["models"]
    assert (loaded["name"], loaded["size"], loaded["context_length"]) == ("b:latest", 7, 64)
    refused = on_shelf.post("/api/chat", **CHAT | {"model": "c"})
    assert (refused.status_code, refused.json()["code"]) == (404, "model_not_found")
    assert isinstance(refused.json()["error"], str)
    assert on_shelf.post("/api/pull").json() == {"status": "success"}


def test_keep_alive_sets_when_an_idle_model_is_unloaded(on_shelf: OnShelf) -> None:
    on_shelf.post("/api/chat", **CHAT, keep_alive="5m")
    assert 200 < on_shelf.expiry() <= 300
    on_shelf.post("/api/generate", prompt="a", options=GREEDY, keep_alive=-1)
    assert on_shelf.expiry() > 10**9
    on_shelf.post("/api/chat", **CHAT, keep_alive=0)
    until(lambda: on_shelf.running == [])
    on_shelf.post("/v1/chat/completions", messages=MESSAGES, max_tokens=4)
    assert on_shelf.expiry() > 10**9  # the keep_alive of an earlier load does not count
    assert on_shelf.post("/api/chat", **CHAT, keep_alive="later").json()["code"] == "invalid_value"


@pytest.mark.parametrize("given", [1e11, 2.6e11, 1e18, 1e300, "2562047h"])
def test_a_model_kept_for_centuries_can_be_listed(on_shelf: OnShelf, given: float | str) -> None:
    assert on_shelf.post("/api/chat", **CHAT, keep_alive=given).status_code == 200
    assert 10**9 < on_shelf.expiry() < 10**10


@pytest.mark.parametrize("given", ["9223372036854775807s", "999999999h", "1" * 20_000, "1" * 33, "1s" * 20, "٣s٣"])
def test_a_duration_that_go_cannot_hold_is_refused(on_shelf: OnShelf, given: str) -> None:
    refused = on_shelf.post("/api/chat", **CHAT, keep_alive=given)
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_value")
    assert on_shelf.client.get("/api/ps").status_code == 200


def test_a_request_without_a_prompt_loads_and_unloads_a_model(on_shelf: OnShelf) -> None:
    loaded = on_shelf.post("/api/generate", keep_alive="10m").json()
    assert (loaded["done_reason"], on_shelf.running) == ("load", ["a"])
    assert 500 < on_shelf.expiry() <= 600
    assert on_shelf.post("/api/chat", messages=[], keep_alive=0).json()["done_reason"] == "unload"
    until(lambda: on_shelf.running == [])
    assert on_shelf.post("/api/generate", keep_alive=0).json()["done_reason"] == "unload"
    assert FakeReplica.loaded == ["a"]


def test_a_model_whose_process_hangs_is_named_and_the_server_is_not_ready(on_shelf: OnShelf) -> None:
    for name in ("a", "b"):
        on_shelf.post("/api/generate", model=name)
    assert on_shelf.client.get("/ready").status_code == 200
    on_shelf.hung.append("b")
    answer = on_shelf.client.get("/ready")
    assert (answer.status_code, answer.json()) == (503, {"status": "hung", "models": ["b"]})
    assert on_shelf.client.get("/metrics").status_code == 200


# Models of several kinds


PLENTY = 1 << 40
MAKERS = {"ranks": make_logit_score, "chat": make_model, "vectors": make_embedding_model}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": ("chat", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}),
    "/v1/completions": ("chat", {"prompt": "hello", "max_tokens": 4}),
    "/v1/messages": ("chat", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}),
    "/api/generate": ("chat", {"prompt": "hello", "options": {"num_predict": 4}, "stream": False}),
    "/v1/embeddings": ("vectors", {"input": "hello"}),
    "/api/embed": ("vectors", {"input": "hello"}),
    "/v1/rerank": ("ranks", {"query": "hello", "documents": ["yes", "no"]}),
}


def plan_kind(source: ModelSource, most_bytes: int) -> ModelPlan:
    found = plan_served(source.path, ModelSettings(threads=1), most_bytes=PLENTY, share_bytes=PLENTY)
    return ModelPlan(found.num_bytes, (), found.takes, found.context)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve a reranker, a model that generates, and a model for embeddings."""
    folders = {name: tmp_path_factory.mktemp("models") / name for name in MAKERS}
    with ExitStack() as stack:
        ports = dict[str, int]()
        for name, make in MAKERS.items():
            make(folders[name])
            llm = stack.enter_context(LLM(folders[name]))
            ports[name] = stack.enter_context(serving(llm, model=name, is_child=True)).port
        sockets = tmp_path_factory.mktemp("sockets")
        front, _ = stack.enter_context(serving_shelf(ports, folders, plan_kind, sockets))
        yield front


@pytest.mark.parametrize("path", BODIES)
def test_a_route_is_answered_by_the_first_model_of_its_kind_and_by_one_that_is_named(kinds: Served, path: str) -> None:
    name, body = BODIES[path]
    for asked in (body, body | {"model": name}):
        assert kinds.ask(path, **asked)["model"] == name


@cases(
    "path name message",
    ("/v1/chat/completions", "vectors", "the model 'vectors' can embed, and not generate: name 'chat'"),
    ("/v1/messages", "ranks", "the model 'ranks' can rerank, and not generate: name 'chat'"),
    ("/api/generate", "vectors", "the model 'vectors' can embed, and not generate: name 'chat'"),
    ("/v1/embeddings", "chat", "the model 'chat' can generate, and not embed: name 'vectors'"),
    ("/v1/rerank", "chat", "the model 'chat' can generate, and not rerank: name 'ranks' or 'vectors'"),
    ("/v1/classify", "chat", "the model 'chat' can generate, and not classify: serve a model that can classify"),
    ("/v1/classify", None, "no model here can classify: serve a model that can classify"),
)
def test_a_model_of_another_kind_names_those_that_can(kinds: Served, path: str, name: Any, message: str) -> None:
    body = BODIES.get(path, ("", {"input": "hello"}))[1] | {"model": name}
    found = kinds.client.post(path, json=body)
    error = found.json()["error"]
    assert (found.status_code, error if isinstance(error, str) else error["message"]) == (400, message)


def test_vectors_rank_where_their_model_is_named_and_a_model_of_any_kind_is_loaded(kinds: Served) -> None:
    _, body = BODIES["/v1/rerank"]
    assert kinds.ask("/v1/rerank", **body | {"model": "vectors"})["model"] == "vectors"
    assert kinds.ask("/api/generate", model="vectors")["done_reason"] == "load"
