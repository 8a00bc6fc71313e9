"""Bodies of real clients are answered. Ignored fields are named, and fields that would mislead are refused."""

import json
from typing import Any

import pytest

from cases import cases
from infer import LLM
from openai_shapes import check, counts_of, events
from served import Served, serving

USER = {"role": "user", "content": "hello"}
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SMALL = {"max_tokens": 2, "seed": 1}
SERVED = {"allow_embeddings": True}


def post(served: Served, path: str, **body: Any) -> Any:
    """Return the answer, and check that its header has the same warnings."""
    answer = served.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert json.loads(answer.headers.get("x-infer-warnings", "[]")) == warnings_of(found)
    return found


def warnings_of(found: Any) -> Any:
    return found.get("infer", {}).get("warnings", [])


def text_of(found: Any) -> Any:
    return found["choices"][0]["message"]["content"]


def chat(served: Served, **body: Any) -> Any:
    return post(served, CHAT, **({"messages": [USER]} | SMALL | body))


def call(arguments: Any, **others: Any) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": "look", "arguments": arguments}} | others


# Unknown fields

NEUTRAL = [
    {"foo": None}, {"repeat_penalty": None}, {"best_of": 0}, {"best_of": 1}, {"functions": []}, {"store": True},
    {"service_tier": "flex"}, {"reasoning_effort": "high"}, {"verbosity": "low"}, {"typical_p": 1.0},
    {"prediction": {"type": "content", "content": "x"}}, {"prompt_cache_retention": "24h"}, {"metadata": {"a": 1}},
    {"skip_special_tokens": True}, {"use_beam_search": False}, {"length_penalty": 1.0}, {"cache_prompt": True},
    {"dry_multiplier": 0}, {"mirostat": 0}, {"xtc_probability": 0.0}, {"include_reasoning": True},
    {"stop": ""}, {"stop": ["", ""]}, {"stop": []}, {"stream_options": {"include_usage": True}}, {"tools": []},
    {"truncate_prompt_tokens": None}, {"modalities": ["text"]}, {"function_call": "auto"}, {"echo": False},
    {"client_metadata": {"session": "a"}}, {"max_tool_calls": 3},
    {"function_call": "none", "functions": [{"name": "f"}]},
]  # fmt: skip


@pytest.mark.parametrize("fields", NEUTRAL, ids=json.dumps)
def test_a_field_that_asks_for_nothing_changes_nothing_and_is_not_spoken_of(served: Served, fields: Any) -> None:
    plain, found = chat(served), chat(served, **fields)
    assert (text_of(found), warnings_of(found)) == (text_of(plain), [])


SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"repeat_penalty": 1.4}, {"repetition_penalty": 1.4}),
    ({"repeat_penalty": 1.4, "repeat_last_n": 3}, {"repetition_penalty": 1.4, "repetition_window": 3}),
    ({"repeat_penalty": 1.4, "repeat_last_n": -1}, {"repetition_penalty": 1.4}),
    ({"n_predict": 5}, {"max_completion_tokens": 5}),
    ({"max_new_tokens": 5.0}, {"max_tokens": 5}),
    ({"max_tokens": 12.0, "top_k": 7.0}, {"max_tokens": 12, "top_k": 7}),
    ({"guided_regex": "[a-c]{4}"}, {"regex": "[a-c]{4}"}),
    ({"guided_choice": ["ab", "cd"]}, {"choice": ["ab", "cd"]}),
    ({"structured_outputs": {"regex": "[a-c]{4}", "json": None}}, {"regex": "[a-c]{4}"}),
    ({"top_p": 0}, {"temperature": 0}),
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
SAME += [
    ({name: value}, {"response_format": FORMAT})
    for name, value in (
        ("guided_json", SCHEMA),
        ("guided_json", json.dumps(SCHEMA)),
        ("json_schema", SCHEMA),
        ("structured_outputs", {"json": SCHEMA}),
        ("response_format", {"type": "json_object", "schema": SCHEMA}),
    )
]


@pytest.mark.parametrize(("theirs", "ours"), SAME)
def test_another_server_s_name_for_a_parameter_means_ours(served: Served, theirs: Any, ours: Any) -> None:
    given = {"messages": [USER], "seed": 3, "temperature": 1.5}
    if not {"max_tokens", "max_completion_tokens"} & set(ours):
        given["max_tokens"] = 20
    found = post(served, CHAT, **(given | theirs))
    assert (text_of(found), warnings_of(found)) == (text_of(post(served, CHAT, **(given | ours))), [])


GREEDY: dict[str, tuple[str, dict[str, Any], tuple[str | int, ...]]] = {
    "completions": (COMPLETIONS, {"prompt": "hello", "max_tokens": 12}, ("choices", 0, "text")),
    "responses": (RESPONSES, {"input": "hello", "max_output_tokens": 16}, ("output", 0, "content", 0, "text")),
    "messages": ("/v1/messages", {"messages": [USER], "max_tokens": 12}, ("content", 0, "text")),
    "llama.cpp": ("/completion", {"prompt": "hello", "n_predict": 12}, ("content",)),
    "ollama": ("/api/generate", {"model": "any", "prompt": "hello", "raw": True, "stream": False}, ("response",)),
}


@pytest.mark.parametrize("kind", GREEDY)
def test_a_top_p_of_0_keeps_one_token_on_every_route(served: Served, kind: str) -> None:
    def text(**sampling: Any) -> Any:
        path, body, place = GREEDY[kind]
        if kind == "ollama":
            sampling = {"options": sampling | {"num_predict": 12}}
        found = served.ask(path, **body, **sampling)
        for step in place:
            found = found[step]
        return found

    assert text(temperature=1, top_p=0) == text(temperature=1, top_p=0.0) == text(temperature=0)


@cases(
    "fields param",
    ({"maxTokens": 5}, "maxTokens"),
    ({"top-p": 0.5}, "top-p"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"nam": "look"}}}, "tool_choice.function.nam"),
    ({"dry_multiplier": 0.8}, "dry_multiplier"),
    ({"typical_p": 0.5}, "typical_p"),
    ({"best_of": 2}, "best_of"),
    ({"guided_grammar": "root ::= x"}, "guided_grammar"),
    ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"repeat_penalty": 1.2, "repetition_penalty": 1.1}, "repeat_penalty"),
    ({"guided_json": "{"}, "guided_json"),
    ({"max_tokens": 10**400}, "max_tokens"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"stop": ["x"] * 65}, "stop"),
)
def test_fields_that_are_misspelt_or_change_the_answer_are_refused(served: Served, fields: Any, param: str) -> None:
    assert served.refusal(CHAT, messages=[USER], **fields)["param"] == param


def test_anything_else_is_ignored_and_every_kind_of_answer_says_so(served: Served) -> None:
    asked: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [USER], **SMALL},
        COMPLETIONS: {"prompt": "hello", **SMALL},
        RESPONSES: {"input": "hello", "max_output_tokens": 2},
        "/v1/messages": {"messages": [USER], "max_tokens": 2},
        "/v1/messages/count_tokens": {"messages": [USER]},
        "/v1/trace": {"prompt": "a", "max_tokens": 2},
        "/v1/branch": {"prompt": "a", "answer_token_ids": [97], "position": 1},
        "/tokenize": {"content": "a"},
        "/detokenize": {"tokens": [97]},
        "/apply-template": {"messages": [USER]},
    }
    for path, body in asked.items():
        assert warnings_of(post(served, path, **body, xyzzy=1)) == ["xyzzy is not known and was ignored"], path


@pytest.mark.parametrize("asks_usage", [False, True])
@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": [USER]}), (COMPLETIONS, {"prompt": "hello"})])
def test_the_last_chunk_of_a_stream_has_the_warnings(served: Served, path: str, body: Any, asks_usage: bool) -> None:
    body = {**body, **SMALL, "xyzzy": 1, "stream": True, "stream_options": {"include_usage": asks_usage}}
    answer = served.client.post(path, json=body)
    *others, last = list(events(answer.text))
    assert warnings_of(last) == ["xyzzy is not known and was ignored"]
    assert json.loads(answer.headers["x-infer-warnings"]) == warnings_of(last)
    assert not any(warnings_of(each) for each in others if each["choices"][0]["finish_reason"] is None)


@pytest.mark.parametrize("policy", ["refuse", "ignore"])
def test_an_operator_may_have_unknown_fields_refused_or_ignored(llm: LLM, policy: str) -> None:
    with serving(llm, model="tiny", unknown_fields=policy) as served:
        served.refusal(CHAT, messages=[USER], temprature=1)
        body = {"messages": [USER | {"extra": 1}], "xyzzy": 1}
        if policy == "refuse":
            assert served.refusal(CHAT, **body)["param"] == "xyzzy"
        else:
            assert warnings_of(chat(served, **body)) == []


# Fields that other programs add to messages of the history


HISTORIES: list[tuple[list[Any], list[Any]]] = [
    ([{"role": "assistant", "content": "a", "refusal": None, "provider_specific_fields": {"refusal": None}}],
     [{"role": "assistant", "content": "a"}]),
    ([{"role": "assistant", "content": None, "tool_calls": [call("{}", index=0)], "reasoning_details": [{}]}],
     [{"role": "assistant", "content": None, "tool_calls": [call("{}")]}]),
    ([{"role": "assistant", "content": "", "tool_calls": [call("")]}],
     [{"role": "assistant", "content": "", "tool_calls": [call("{}")]}]),
    ([{"role": "assistant", "content": "", "tool_calls": [call({"q": 1})]}],
     [{"role": "assistant", "content": "", "tool_calls": [call('{"q": 1}')]}]),
    ([{"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": {"name": "look"}}]}],
     [{"role": "assistant", "content": "", "tool_calls": [call("{}")]}]),
    ([{"role": "assistant", "content": "a", "function_call": {"name": "look", "arguments": "{}"}}],
     [{"role": "assistant", "content": "a", "tool_calls": [call("{}", id="")]}]),
    ([{"role": "user", "content": None}], [{"role": "user", "content": ""}]),
    ([{"role": "user", "content": []}], [{"role": "user", "content": ""}]),
    ([{"role": "user", "content": ["a", {"text": "b"}, {"type": "text", "text": "c", "cache_control": {}}]}],
     [{"role": "user", "content": "abc"}]),
    ([{"role": "function", "name": "look", "content": "a"}], [{"role": "tool", "name": "look", "content": "a"}]),
    ([{"role": "tool", "content": [{"type": "text", "text": "a"}], "tool_call_id": "a", "is_error": True}],
     [{"role": "tool", "content": "a", "tool_call_id": "a"}]),
    ([{"role": "user", "content": "a", "x": 1}, {"role": "system", "content": "b"}],
     [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]),
]  # fmt: skip


@pytest.mark.parametrize(("sent", "meant"), HISTORIES)
def test_fields_that_clients_add_to_messages_are_understood(served: Served, sent: list[Any], meant: list[Any]) -> None:
    prompts = [post(served, "/apply-template", messages=[*each, USER])["prompt"] for each in (sent, meant)]
    assert prompts[0] == prompts[1]
    assert warnings_of(chat(served, messages=[*sent, USER])) == []


def test_an_answer_that_max_tokens_cut_inside_a_call_can_be_sent_back(served: Served) -> None:
    parameters = {"type": "object", "properties": {"q": {"type": "string", "minLength": 20}}, "required": ["q"]}
    tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    for limit in range(1, 60, 4):
        given = {"tools": tools, "tool_choice": "required", "seed": 2, "max_tokens": limit}
        answer = post(served, CHAT, messages=[USER], **given)["choices"][0]
        chat(served, messages=[answer["message"], USER])


@cases(
    "part word",
    ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "image"),
    ({"type": "input_audio", "input_audio": {}}, "audio"),
    ({"type": "file", "file": {}}, "file"),
)
def test_an_image_is_refused_in_the_last_message_and_replaced_in_history(served: Served, part: Any, word: str) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "see "}, part]}
    error = served.refusal(CHAT, messages=[USER, message])
    assert error["param"] == "messages[1].content[1]"
    assert f"leave the {word} out" in error["message"]
    earlier = [message, {"role": "assistant", "content": "a"}, USER]
    (warning,) = warnings_of(chat(served, messages=earlier))
    assert warning.startswith("messages[0].content[1]")
    assert f"see [{word}]" in post(served, "/apply-template", messages=earlier)["prompt"]
    result = {"role": "tool", "tool_call_id": "a", "content": [part]}
    assert len(warnings_of(chat(served, messages=[USER, result]))) == 1


@cases(
    "tool warning",
    ({"type": "web_search"}, "tools[0]"),
    ({"type": "custom", "custom": {"name": "patch"}}, "tools[0]"),
    ({"type": "function", "function": {"name": "f", "strickt": True}}, "did you mean strict?"),
    ({"type": "function", "function": {"name": "f", "paramters": {}}}, "did you mean parameters?"),
    ({"type": "function", "function": {"name": "f"}, "strict": True}, "strict belongs to function"),
)
def test_a_misspelt_field_and_another_kind_of_a_tool_are_named(served: Served, tool: Any, warning: str) -> None:
    (found,) = warnings_of(chat(served, tools=[tool]))
    assert warning in found


def test_a_name_of_a_schema_that_openai_refuses_is_taken_with_a_warning(served: Served) -> None:
    for name in ("pkg.Model[int]", "", "a" * 65):
        asked = {"type": "json_schema", "json_schema": {"name": name, "schema": SCHEMA}}
        assert len(warnings_of(chat(served, response_format=asked, max_tokens=20))) == 1


def test_a_schema_that_is_not_strict_drops_unenforceable_keywords(served: Served) -> None:
    schema = {"type": "array", "items": {"type": "null"}, "maxItems": 2, "uniqueItems": True}
    for strict in (None, False):
        asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": strict}}
        found = chat(served, response_format=asked, max_tokens=40)
        assert "at /uniqueItems: left out: 'uniqueItems' cannot be enforced" in " ".join(warnings_of(found))
        assert set(json.loads(text_of(found))) <= {None}
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    error = served.refusal(CHAT, messages=[USER], response_format=asked)
    assert "at /: 'uniqueItems' cannot be enforced" in error["message"]


# Values


def test_a_limit_of_minus_one_is_the_context_and_one_of_zero_asks_for_no_token(served: Served) -> None:
    body: dict[str, Any] = {"messages": [USER], "allowed_token_ids": [97], "ignore_eos": True}
    whole = post(served, CHAT, **body, max_tokens=-1)
    assert whole["usage"]["total_tokens"] == served.client.get("/v1/models").json()["data"][0]["max_model_len"]
    for name in ("max_tokens", "max_completion_tokens"):
        found = post(served, CHAT, **body, **{name: 0})
        check("CreateChatCompletionResponse", found)
        assert (found["usage"]["completion_tokens"], found["choices"][0]["finish_reason"]) == (0, "length")


def test_many_stops_hold(served: Served) -> None:
    plain = post(served, COMPLETIONS, prompt="hello", seed=4, max_tokens=30)["choices"][0]["text"]
    stops = ["", *(f"no such {index}" for index in range(60)), plain[3:6]]
    found = post(served, COMPLETIONS, prompt="hello", seed=4, max_tokens=30, stop=stops)["choices"][0]
    assert (found["text"], found["finish_reason"]) == (plain[: plain.index(plain[3:6])], "stop")


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": [USER]}), (COMPLETIONS, {"prompt": ["hello", "a"]})])
@pytest.mark.parametrize("is_last_asked", [False, True])
def test_each_chunk_has_the_usage_so_far_if_asked(served: Served, path: str, body: Any, is_last_asked: bool) -> None:
    options = {"continuous_usage_stats": True, "include_usage": is_last_asked}
    asked = {**body, "seed": 5, "max_tokens": 12, "ignore_eos": True, "n": 2}
    usages = [each["usage"] for each in events(served.stream(path, **asked, stream_options=options))]
    whole = post(served, path, **asked)["usage"]
    prompt, completion, total = zip(*map(counts_of, usages), strict=True)
    assert counts_of(usages[-1]) == counts_of(whole)
    assert list(completion) == sorted(completion)
    assert len(set(completion)) > 2
    assert list(total) == [whole["prompt_tokens"] + each for each in completion]
    assert set(prompt) == {whole["prompt_tokens"]}


# Names and paths


def test_any_model_s_name_is_answered_by_the_one_that_is_served(served: Served) -> None:
    for name in ("gpt-3.5-turbo", "", "claude-haiku-4-5", "default"):
        for path in (CHAT, "/v1/messages"):
            found = post(served, path, model=name, messages=[USER], max_tokens=2)
            warning = f"the model {name!r} is not served here: 'tiny' answers"
            assert (found["model"], warnings_of(found)) == ("tiny", [warning])
    assert served.refusal("/v1/embeddings", status=404, model="ada-002", input="a")["code"] == "model_not_found"


@pytest.mark.parametrize(
    "path", ["/chat/completions", "/v1/chat/completions/", "//v1/chat/completions", "/openai/v1/chat/completions",
             "/v1/v1/chat/completions", "/openai/chat/completions"],
)  # fmt: skip
def test_a_path_is_found_however_the_base_url_was_given(served: Served, path: str) -> None:
    assert text_of(post(served, path, messages=[USER], **SMALL)) == text_of(chat(served))
    for path, known in (("/models", "/v1/models"), ("/v1/health", "/health"), ("/v1/models/", "/v1/models")):
        assert served.client.get(path).json() == served.client.get(known).json()


@cases(
    "method path hint",
    ("POST", "/v1/chat/completion", "did you mean /v1/chat/completions?"),
    ("POST", "/v1/embedding", "did you mean /v1/embeddings?"),
    ("GET", "/xyzzy", "GET /docs lists the routes"),
)
def test_an_unknown_path_is_answered_with_a_known_one(served: Served, method: str, path: str, hint: str) -> None:
    answer = served.client.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")
    assert hint in answer.json()["error"]["message"]


def test_an_unknown_path_has_the_errors_of_its_neighbours(served: Served) -> None:
    hint = "only a part of Ollama's API is served, GET /docs lists the routes"
    assert hint in served.client.post("/api/blobs/sha256:1").json()["error"]
    anthropics = served.client.get("/v1/messages/batches").json()
    assert (anthropics["type"], anthropics["error"]["code"]) == ("error", "unknown_url")


def test_a_key_is_needed_on_every_spelling_of_a_path(llm: LLM) -> None:
    with serving(llm, model="tiny", api_keys={"secret": "me"}) as served:
        for path in ("/v1/models", "/models", "//v1//models/", "/openai/v1/models"):
            given = ({}, {"authorization": "Bearer secret"})
            assert [served.client.get(path, headers=headers).status_code for headers in given] == [401, 200]
        assert served.client.get("/v1/health").status_code == 200


def test_a_model_says_how_long_its_context_is(served: Served, llm: LLM) -> None:
    (model,) = served.client.get("/v1/models").json()["data"]
    assert model["max_model_len"] == model["context_length"] == llm.max_seq_len
    with serving(None, model="tiny") as loading:
        (model,) = loading.client.get("/v1/models").json()["data"]
        assert model["id"] == "tiny"
