"""`infer.server` over real sockets: what every request meets, whatever it asks."""

from collections.abc import Iterator

import pytest

from infer import LLM
from served import Served, serving
from test_session import make_model

ERROR_KEYS = {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(make_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def served(llm: LLM) -> Iterator[Served]:
    with serving(llm, model="tiny") as served:
        yield served


def test_a_model_that_is_ready_is_named_and_healthy(served: Served) -> None:
    assert served.client.get("/health").json() == {"status": "ok"}
    assert served.client.get("/ready").status_code == 200
    assert [model["id"] for model in served.client.get("/v1/models").json()["data"]] == ["tiny"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/v1/unknown", 404), ("POST", "/v1/models", 405), ("DELETE", "/health", 405),
     ("GET", "/v1/models/", 404), ("PATCH", "/v1/models", 405), ("BREW", "/health", 400)],
)  # fmt: skip
def test_what_no_route_takes_is_refused_in_openai_s_shape(served: Served, method: str, path: str, status: int) -> None:
    answer = served.client.request(method, path)
    assert (answer.status_code, set(answer.json()), set(answer.json()["error"])) == (status, {"error"}, ERROR_KEYS)


def test_a_request_has_an_id_and_a_clean_one_of_the_client_is_echoed(served: Served) -> None:
    assert served.client.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    own = [served.client.get("/health", headers={"x-request-id": each}).headers["x-request-id"] for each in ("", "a b")]
    assert len(set(own)) == 2
    assert all(each.startswith("req-") for each in own)


def test_a_model_that_is_loading_is_alive_later() -> None:
    with serving(None) as served:
        served.state.progress = 0.25
        answer = served.client.get("/health")
        assert (answer.status_code, answer.json()) == (503, {"status": "loading", "progress": 0.25})
