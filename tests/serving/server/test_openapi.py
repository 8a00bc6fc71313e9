"""`/openapi.json` describes every route and its answers. `/docs` shows it without a script or another host."""

import json
import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from infer.serving.server.app import ROUTES
from infer.serving.server.routes.openapi import document
from served import Served

DOCUMENT = document(ROUTES)
MESSAGES = [{"role": "user", "content": "hello"}]
SERVED = {"allow_embeddings": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2},
    "/v1/completions": {"prompt": ["a", "b"], "logprobs": 2, "echo": True},
    "/v1/responses": {"input": [{"role": "user", "content": "hello"}], "store": True},
    "/v1/embeddings": {"input": ["a", "b"]},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3, "tools": []},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/api/chat": {"messages": MESSAGES, "stream": False, "logprobs": True, "options": {"num_predict": 3}},
    "/api/generate": {"prompt": "a", "stream": False, "options": {"num_predict": 3}},
    "/api/embed": {"input": ["a", "b"]},
    "/completion": {"prompt": ["a", "b"], "max_tokens": 3, "logprobs": 1},
    "/v1/trace": {"prompt": "a", "max_tokens": 2, "logit_bias": {"98": -100}},
    "/v1/branch": {"prompt": "a", "answer_token_ids": [97], "position": 1},
    "/tokenize": {"content": "hé", "with_pieces": True},
    "/detokenize": {"tokens": [97]},
    "/apply-template": {"messages": MESSAGES},
}


def validator(pointer: str) -> Draft202012Validator:
    return Draft202012Validator({**DOCUMENT, "$ref": f"#{pointer}"})


def body_of(path: str) -> Draft202012Validator:
    return validator(f"/paths/{path.replace('/', '~1')}/post/requestBody/content/application~1json/schema")


def answer_of(path: str, method: str, status: int) -> Draft202012Validator:
    place = path.replace("~", "~0").replace("/", "~1")
    return validator(f"/paths/{place}/{method}/responses/{status}/content/application~1json/schema")


def test_every_route_is_described_with_its_summary_and_its_answer() -> None:
    paths = DOCUMENT["paths"]
    described = {(method.upper(), path) for path, operations in paths.items() for method in operations}
    assert described == {(each.method, each.path.replace(":path", "")) for each in ROUTES}
    for each in ROUTES:
        operation = paths[each.path.replace(":path", "")][each.method.lower()]
        assert each.summary
        assert operation["summary"] == each.summary
        assert ("security" in operation) == each.is_open, each.path
        assert ("requestBody" in operation) == (each.method == "POST"), each.path
        assert operation["responses"]["200"]["content"], each.path


def test_every_name_in_it_is_there() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(DOCUMENT))) <= set(schemas)
    assert all(name.isidentifier() for name in schemas)  # two Structs of one name would have their modules' names
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("path", BODIES)
def test_bodies_and_answers_are_as_described(served: Served, path: str) -> None:
    body = body_of(path)
    for asked in (BODIES[path], BODIES[path] | {"unknown": 1}):
        body.validate(asked)
        answer_of(path, "post", 200).validate(served.ask(path, **asked))
    name = next(iter(BODIES[path]))
    wrong = BODIES[path] | {name: {"not": "this"}}
    assert not body.is_valid(wrong)
    refused = served.client.post(path, json=wrong)
    assert refused.status_code == 400
    answer_of(path, "post", 400).validate(refused.json())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/health", "/ready"])
def test_answers_are_as_described(served: Served, path: str) -> None:
    answer_of(path, "get", 200).validate(served.client.get(path).json())


def test_the_document_and_its_page_are_served_without_a_key(served: Served) -> None:
    assert served.client.get("/openapi.json").json() == DOCUMENT
    page = served.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"https?://|<script|javascript:|@import", page.text)
    for each in ROUTES:
        assert f"<b>{each.method} {each.path.replace(':path', '')}</b>" in page.text
    targets = set(re.findall(r'href="#([^"]*)"', page.text))
    assert targets <= set(re.findall(r'id="([^"]*)"', page.text))


@pytest.mark.parametrize("part", [{"type": "text"}, {"type": None, "text": "a"}, {"type": "text", "text": 1}])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_part_of_a_message_has_its_type(served: Served, part: Any, role: str) -> None:
    error = served.refusal("/apply-template", messages=[{"role": role, "content": [part]}])
    assert error["param"].startswith("messages[0].content[0]")


UNTYPED = [{"role": "user", "content": [{"text": "hello"}]}]
ODD_TOOL = [{"type": "web_search_20260101", "name": "web_search"}]
TOOLS_ASKED = {"messages": MESSAGES, "tools": ODD_TOOL}
TAKEN: list[tuple[str, dict[str, Any]]] = [
    *((path, {"messages": UNTYPED}) for path in ("/v1/chat/completions", "/apply-template")),
    *((path, TOOLS_ASKED) for path in ("/v1/chat/completions", "/apply-template")),
    *(("/v1/responses", asked) for asked in ({"input": UNTYPED}, {"input": "hello", "tools": ODD_TOOL})),
    *(("/v1/messages", {"max_tokens": 3, **asked}) for asked in ({"messages": UNTYPED}, TOOLS_ASKED)),
    ("/api/chat", TOOLS_ASKED | {"stream": False}),
    ("/completion", {"prompt": "a", "max_tokens": -1, "n_predict": 2}),
    ("/completion", {"prompt": "a", "max_tokens": -1}),
    ("/completion", {"prompt": "a", "n_predict": -1}),
]


@pytest.mark.parametrize(("path", "body"), TAKEN)
def test_bodies_that_are_taken_are_described(served: Served, path: str, body: dict[str, Any]) -> None:
    answer = served.client.post(path, json=body)
    assert (answer.status_code == 200) == body_of(path).is_valid(body), answer.text


def test_refused_queries_and_other_methods_are_described(served: Served) -> None:
    refused = served.client.get("/v1/engine/events", params={"interval": 11})
    assert refused.status_code == 400
    answer_of("/v1/engine/events", "get", 400).validate(refused.json())
    for path, operations in DOCUMENT["paths"].items():
        answer = served.client.request("PUT", path.replace("{id}", "x").replace("{name}", "x"))
        allowed = {method.upper() for method in operations}
        assert (answer.status_code, set(answer.headers["allow"].split(", ")) - {"HEAD"}) == (405, allowed), path
