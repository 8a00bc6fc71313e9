"""Models of several kinds in one server: each route finds a model of its kind, or names one in its refusal."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from cases import cases
from embedding_model import make_embedding_model
from infer import LLM
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.models.catalog.served_plan import plan_served
from infer.models.memory.memory_estimate import LoadSettings
from infer.serving.distributed.shelved_model import ModelPlan, ModelSource
from reranker_model import make_logit_score
from served import Served, serving
from shelves import serving_shelf
from test_session import make_model

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


def plan(source: ModelSource, most_bytes: int) -> ModelPlan:
    found = plan_served(
        source.path, LoadSettings(num_threads=1), CacheSettings(),
        max_seq_len=None, pool_pages=None, most_bytes=PLENTY, share_bytes=PLENTY,
    )  # fmt: skip
    return ModelPlan(found.num_bytes, (), found.takes, found.context)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve a reranker, a model that generates, and a model for embeddings."""
    folders = {name: tmp_path_factory.mktemp("models") / name for name in MAKERS}
    with ExitStack() as stack:
        ports = dict[str, int]()
        for name, make in MAKERS.items():
            make(folders[name])
            llm = stack.enter_context(LLM(folders[name]))
            ports[name] = stack.enter_context(serving(llm, model=name, is_child=True)).port
        sockets = tmp_path_factory.mktemp("sockets")
        front, _ = stack.enter_context(serving_shelf(ports, folders, plan, sockets))
        yield front


@pytest.mark.parametrize("path", BODIES)
def test_a_route_is_answered_by_the_first_model_of_its_kind_and_by_one_that_is_named(served: Served, path: str) -> None:
    name, body = BODIES[path]
    for asked in (body, body | {"model": name}):
        assert served.ask(path, **asked)["model"] == name


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
def test_a_model_of_another_kind_names_those_that_can(served: Served, path: str, name: Any, message: str) -> None:
    body = BODIES.get(path, ("", {"input": "hello"}))[1] | {"model": name}
    found = served.client.post(path, json=body)
    error = found.json()["error"]
    assert (found.status_code, error if isinstance(error, str) else error["message"]) == (400, message)


def test_vectors_rank_where_their_model_is_named_and_a_model_of_any_kind_is_loaded(served: Served) -> None:
    _, body = BODIES["/v1/rerank"]
    assert served.ask("/v1/rerank", **body | {"model": "vectors"})["model"] == "vectors"
    assert served.ask("/api/generate", model="vectors")["done_reason"] == "load"
