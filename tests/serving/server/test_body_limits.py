"""Limits of a body's JSON hold on every route and behind a front, and usual bodies keep within them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import inspect

from cases import cases
from infer import LLM
from infer.request_limits import MAX_DEPTH, MAX_DIGITS, MAX_KEYS, MAX_VALUES
from infer.serving.batch_file.batch_rows import read_row
from infer.serving.distributed.front import Front, ModelBody
from infer.serving.server.app import ROUTES
from infer.system.json_limits import JsonLimitError, check_limits
from raw_http import Answer, Connection, post
from served import Served, serving
from shelves import OneReplica

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.fixture(scope="module")
def servers(llm: LLM) -> Iterator[dict[str, Served]]:
    """Serve the same model in one process, and behind a front."""
    with (
        serving(llm, model="tiny") as alone,
        serving(llm, model="tiny", is_child=True) as child,
        serving(None, model="tiny", table=Front(OneReplica(child.port)).table) as front,
    ):
        front.state.phase = "ready"
        yield {"alone": alone, "front": front}


@pytest.fixture
def served(servers: dict[str, Served]) -> Served:
    return servers["alone"]


def refused(served: Served, path: str, content: str | dict[str, Any]) -> str:
    """Return the message of a refusal."""
    text = content if isinstance(content, str) else json.dumps(content)
    answer = served.client.post(path, content=text, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text[:200]
    error = answer.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("server", ["alone", "front"])
@pytest.mark.parametrize("path", [route.path for route in ROUTES if route.body is not None])
def test_a_body_deeper_than_the_limit_is_refused_on_every_route(servers: Any, server: str, path: str) -> None:
    for depth in (MAX_DEPTH, 980, 10_000):
        told = refused(servers[server], path, f'{{"zz": {nested(depth)}}}')
        assert told == f"the body is nested more than {MAX_DEPTH} deep"
    answer = servers[server].client.post(path, json={"zz": json.loads(nested(MAX_DEPTH - 1))})
    assert "nested" not in answer.text


@pytest.mark.parametrize("server", ["alone", "front"])
@pytest.mark.parametrize("value", ['"a"', "{}", "[]", "null", "[1, 2]"])
def test_a_body_of_too_many_values_is_refused(servers: dict[str, Served], server: str, value: str) -> None:
    body = f'{{"messages": [{", ".join([value] * MAX_VALUES)}]}}'
    assert refused(servers[server], CHAT, body) == f"the body is made of more than {MAX_VALUES:,} values"


@pytest.mark.parametrize("given", ['{"a": "%s"}', '{"%s": 1}', '["\\\\%s", 1]'])
def test_text_inside_strings_is_not_counted(given: str) -> None:
    check_limits(given % ('[{\\"' * 2 * MAX_VALUES + "\\\\"))
    check_limits(given % ("," * 2 * MAX_VALUES + "1" * 2 * MAX_DIGITS))


def test_the_largest_allowed_numbers_keep_within_the_limits() -> None:
    check_limits("[" + ",".join(["true"] * MAX_VALUES) + "]")
    check_limits("[" + ",".join(["1"] * 5 * MAX_VALUES) + "]")  # ids
    check_limits("[" + "1" * MAX_DIGITS + "]")
    for text in ("[" + ",".join(["true"] * (MAX_VALUES + 1)) + "]", "[" + "1" * (MAX_DIGITS + 1) + "]"):
        with pytest.raises(JsonLimitError):
            check_limits(text)


def test_a_prompt_and_a_text_of_many_ids_are_read(served: Served) -> None:
    ids = [5] * 200_000
    assert "200000 tokens" in refused(served, "/v1/completions", {"prompt": ids, "max_tokens": 1})
    assert len(served.ask("/detokenize", tokens=ids)["content"]) >= 200_000
    told = refused(served, "/detokenize", {"tokens": [*ids, 10**6, 10**7]})
    assert told.startswith("tokens[200000] must be an id")


def test_a_long_history_of_an_agent_is_read(served: Served) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": {"b": [1, "c"]}}'}}
    turn = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "x"}]
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(24)]
    told = refused(served, CHAT, {"messages": [*turn * 1000, USER], "tools": tools, "tool_choice": "none"})
    assert "shorten the prompt" in told or "tokens" in told


@cases(
    "path body place",
    (CHAT, {"messages": [USER]}, ()),
    ("/v1/completions", {"prompt": "a"}, ()),
    ("/v1/messages", {"messages": [USER], "max_tokens": 1}, ()),
    ("/api/chat", {"messages": [USER], "stream": False}, ("options",)),
    (CHAT, {"messages": [USER]}, ("stream_options",)),
    (CHAT, {"messages": [USER]}, ("chat_template_kwargs",)),
    (CHAT, {"messages": [USER], "tools": [TOOL]}, ("tools", 0, "function")),
)
def test_an_object_of_parameters_has_a_limit_of_fields(served: Served, path: str, body: Any, place: Any) -> None:
    body = json.loads(json.dumps(body))
    inner: Any = body
    for step in place:
        inner = inner.setdefault(step, {}) if isinstance(step, str) else inner[step]
    inner |= {f"zq{number}": 1 for number in range(260)}
    assert f"must have at most {MAX_KEYS} fields, got 26" in refused(served, path, body)


def test_similar_names_are_searched_for_a_limited_number_of_keys(served: Served, monkeypatch: Any) -> None:
    searched = list[str]()
    search = "infer.serving.protocols.fields.get_close_matches"
    monkeypatch.setattr(search, lambda name, *_, **__: searched.append(name))
    keys = {f"zq{number}": 1 for number in range(200)}
    tools = [{"type": "function", **keys, "function": {"name": f"f{number}", **keys}} for number in range(100)]
    served.ask(CHAT, messages=[USER], tools=tools, tool_choice="none", max_tokens=1)
    assert len(searched) == MAX_KEYS


@pytest.mark.parametrize("given", [nested(900), '{"a":' * 900 + "1" + "}" * 900])
@pytest.mark.parametrize("field", ["guided_json", "structured_outputs", "json_schema"])
def test_a_schema_as_a_text_has_the_same_limit(served: Served, given: str, field: str) -> None:
    value = {"json": given} if field == "structured_outputs" else given
    told = refused(served, "/v1/completions", {"prompt": "a", field: value})
    assert told == f"{field} is nested more than {MAX_DEPTH} deep"
    row = {"custom_id": "a", "url": CHAT, "body": {"messages": [USER], field: value}}
    assert (read_row(json.dumps(row), "line 1").id, read_row(json.dumps(row), "line 1").problem) == ("a", told)


def test_deep_arguments_of_an_earlier_call_are_shown_as_text(served: Served) -> None:
    call = {"function": {"name": "f", "arguments": '{"a":' + nested(70) + "}"}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x"}]
    answer = served.ask(CHAT, messages=messages, max_tokens=1)
    assert f"nested more than {MAX_DEPTH} deep" in answer["infer"]["warnings"][0]


# Numbers


def test_every_number_of_a_body_has_an_upper_bound() -> None:
    """`keep_alive` is capped instead, as in Ollama. Another test has the bounds of `logit_bias`."""
    seen, unbounded = set[type](), list[str]()

    def look(kind: inspect.Type, path: str) -> None:
        match kind:
            case inspect.IntType() | inspect.FloatType() if kind.le is None and kind.lt is None:
                unbounded.append(path)
            case inspect.UnionType(types=types):
                for each in types:
                    look(each, path)
            case inspect.Metadata(type=inner):
                look(inner, path)
            case inspect.ListType(item_type=inner):
                look(inner, f"{path}[]")
            case inspect.DictType(value_type=inner):
                look(inner, f"{path}{{}}")
            case inspect.StructType() if kind.cls not in seen:
                seen.add(kind.cls)
                for field in kind.fields:
                    look(field.type, f"{kind.cls.__name__}.{field.encode_name}")

    for body in [ModelBody, *(route.body for route in ROUTES if route.body is not None)]:
        look(inspect.type_info(body), "")
    assert len(seen) > 40
    assert [path for path in unbounded if not path.endswith((".keep_alive", ".logit_bias{}"))] == []


def test_a_bias_has_a_short_id_and_a_bounded_number(served: Served) -> None:
    for bias in ({"5" * 5000: 1}, {"5": 101}, {"5": -101}, {"5": 1e300}):
        assert "logit_bias" in refused(served, "/v1/completions", {"prompt": "a", "logit_bias": bias})


# Other shapes


@pytest.mark.parametrize("tool", ["f", None, 1, True, [], {}, {"type": 1}, {"type": "function", "name": []}])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens", CHAT])
def test_a_malformed_allowed_tool_is_refused(served: Served, path: str, tool: object) -> None:
    allowed = {"mode": "auto", "tools": [tool]}
    choice = {"type": "allowed_tools", **({"allowed_tools": allowed} if path == CHAT else allowed)}
    body = {"messages": [USER]} if path == CHAT else {"input": "hi"}
    assert "tools[0]" in refused(served, path, body | {"tool_choice": choice})


def test_rows_of_odd_values_are_rows_with_a_problem() -> None:
    odd = ('"guided_json": "\\ud800"', '"temperature": "\\ud800"', '"temperature": NaN', '"logit_bias": [[]]')
    for field in odd:
        body = f'{{"prompt": "a", {field}}}'
        row = read_row(f'{{"custom_id": "a", "url": "/v1/completions", "body": {body}}}', "line 1")
        assert (row.id, row.problem is None) == ("a", False)


# Bodies behind a front


ASKED: dict[str, Any] = {"messages": [USER], "max_tokens": 3, "temperature": 0, "ignore_eos": True}


def answer(served: Served, *sent: Any, path: str = CHAT) -> Answer:
    with Connection(served.port) as connection:
        connection.send(post(path, *sent))
        return connection.answer()


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"text"', b"\xef\xbb\xbf{}", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000,
        b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", b'{"messages": "\xff"}', b'{"messages":  "\\ud83d"}',
        b'{"messages": [], "seed": \xff}', b'{"messages": 5, "x` - at `$.messages[5]": 1}',
        b'{"messages": [{"role": "x` - at `$.messages[9]"}]}',
        b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "a", "temperature": 1e400}', b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "max_tokens": 1e3000000}', b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "max_tokens": 1.5}',
        b'{"prompt": [9999999999]}', b'{"prompt": [-1]}', b'{"prompt": [[]]}', b'{"prompt": [1, "a"]}',
        b'{"prompt": "a", "logit_bias": {"x": 1}}', b'{"prompt": "a"} {}',
    ],
    ids=lambda body: repr(body[:40]),
)  # fmt: skip
def test_a_body_that_cannot_be_meant_is_refused_alike_behind_a_front(servers: dict[str, Served], body: bytes) -> None:
    path = "/v1/completions" if b"prompt" in body else CHAT
    alone, behind = (answer(served, body, path=path) for served in servers.values())
    assert (alone.status, alone.json()) == (behind.status, behind.json())
    error = alone.json()["error"]
    assert (alone.status, set(error)) == (400, {"message", "type", "param", "code"})
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", ["x-infer-id", "x-infer-created", "x-infer-sent", "X-Infer-Key-Name"])
@pytest.mark.parametrize("value", ["7", "garbage", ""])
def test_headers_between_processes_mean_nothing_to_a_client(servers: dict[str, Served], name: str, value: str) -> None:
    found = [answer(served, ASKED, f"{name}: {value}", f"{name}: {value}") for served in servers.values()]
    assert [each.status for each in found] == [200, 200]
    alone, behind = (each.json()["choices"] for each in found)
    assert alone == behind
