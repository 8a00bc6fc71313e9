"""Permalinks: an answer over HTTP or on the command line is repeated, bit for bit, and bad links give a message."""

import base64
import json
from typing import Any
from unittest.mock import Mock

import pytest

from cases import cases
from commands import refused, run
from infer import LLM, InvalidRequestError, SamplingParams, Tokenizer
from infer.cli import model_loading
from infer.cli.commands.replay_command import HOST, Permalink, body_of, read_permalink, sha256_of
from infer.serving.protocols.bodies import Served as ModelOfBody
from infer.serving.protocols.fields import read_body
from infer.serving.protocols.openai.ask import ChatBody, CompletionBody
from served import Served
from test_session import TEXT_IDS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello — 🙂"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
ASKED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": MESSAGES, "seed": 7, "temperature": 1.5, "max_tokens": 30}),
    (CHAT, {"messages": MESSAGES, "seed": -7, "top_k": 5, "repetition_penalty": 1.3, "presence_penalty": 1}),
    (CHAT, {"messages": MESSAGES, "temperature": 0, "chat_template_kwargs": {"name": "x"}}),
    (CHAT, {"messages": MESSAGES, "seed": 1,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}),
    (COMPLETIONS, {"prompt": "hello", "seed": 3, "stop": ["a", "b"], "min_tokens": 3, "logit_bias": {"65": 5}}),
    (COMPLETIONS, {"prompt": TEXT_IDS[:4], "seed": 4, "speculation": "ngram", "overflow": "truncate_left"}),
]  # fmt: skip
PARAMS = [
    *({}, {"temperature": 0.0}, {"regex": "[a-c]+"}, {"grammar": 'start: "a"'}, {"choice": ["yes", "no"]}),
    *({"seed": 2**63 - 1}, {"seed": 2**63}),
    {"seed": 2**64 - 1, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "temperature_last": True},
    {"repetition_penalty": 1.2, "repetition_window": 3, "frequency_penalty": -1.0, "presence_penalty": 2.0},
    {"logit_bias": {65: -100.0, 66: 2.5}, "allowed_token_ids": [65, 66, 67], "ignore_eos": True, "max_new_tokens": 9},
    {"stop": ["a", "b"], "stop_token_ids": [70], "include_stop_str_in_output": True, "min_new_tokens": 2},
    {"json_schema": SCHEMA},
]


@pytest.fixture(autouse=True)
def _loaded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loading, "load_model", lambda options: llm)
    monkeypatch.setattr(model_loading, "check_options", lambda options, params: None)


def link_of(content: Any) -> str:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return f"http://host:1/page#r={base64.urlsafe_b64encode(text).decode().rstrip('=')}"


@pytest.mark.slow(cases=3)
@pytest.mark.parametrize(("route", "body"), ASKED)
def test_an_answer_over_http_is_replayed_to_the_byte(served: Served, route: str, body: dict[str, Any]) -> None:
    answer = served.client.post(route, json=body).json()
    choice = answer["choices"][0]
    text = choice["message"]["content"] if route == CHAT else choice["text"]
    asked = {"v": 1, "route": route, "fingerprint": answer["system_fingerprint"], "body": body}
    out, told = run("replay", link_of({**asked, "sha256": sha256_of(text)}))
    assert out == (text if text.endswith("\n") else text + "\n")
    assert "the fingerprint is the same\nthe answer is the same" in told
    told = run("replay", link_of({**asked, "body": body | {"model": "tiny"}})).err
    assert "'tiny' is not on this machine: smollm2 answers" in told


def test_an_answer_before_a_suffix_is_replayed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = Mock(ends=(), prompt=lambda before, after, files, encode, room: [*encode(after), *encode(before)])
    monkeypatch.setattr(Tokenizer, "infill_marks", marks)
    body = {"prompt": "Once", "suffix": " upon a time", "seed": 3, "max_tokens": 8}
    test_an_answer_over_http_is_replayed_to_the_byte(served, COMPLETIONS, body)


def test_calls_are_replayed(served: Served) -> None:
    flags = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    tools = [{"type": "function", "function": {"name": "light", "parameters": flags | {"additionalProperties": False}}}]
    asked = {"messages": MESSAGES, "seed": 5, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    body = {**asked, "max_tokens": 100}
    message = served.client.post(CHAT, json=body).json()["choices"][0]["message"]
    found = run("replay", link_of({"v": 1, "route": CHAT, "body": body, "sha256": sha256_of("")}))
    assert found.records() == message["tool_calls"] != []


def test_another_answer_is_told_by_its_hash_and_another_model_by_its_fingerprint(llm: LLM) -> None:
    asked = {"v": 1, "route": CHAT, "body": {"messages": MESSAGES, "seed": 1, "max_tokens": 5}}
    same = {"fingerprint": llm.system_fingerprint}
    told = run("replay", link_of({**asked, **same, "sha256": "0" * 64}), status=1).err
    assert "the answer is another one" in told
    told = run("replay", link_of({**asked, "fingerprint": "fp_other"}), status=1).err
    assert f"is {llm.system_fingerprint}, the permalink's is fp_other" in told
    assert run("replay", link_of({**asked, **same}), "-q").err == ""
    assert "no seed" in run("replay", link_of({**asked, "body": {"messages": MESSAGES, "max_tokens": 5}})).err


@cases("content told",
    (b"\xff\xfe", "damaged"),
    (b"[" * 100_000, "damaged"),
    ([], "v must be 1, got None"),
    ({"v": 2}, "v must be 1, got 2"),
    ({"v": 1, "route": "/metrics"}, "route must be /v1/chat/completions or /v1/completions, got '/metrics'"),
    ({"v": 1, "route": CHAT, "body": []}, "body must be an object"),
    ({"v": 1, "route": CHAT, "body": {}, "sha256": 5}, "sha256 must be a string, got 5"),
    ({"v": 1, "route": CHAT, "body": {}}, "messages is missing: it is required"),
    ({"v": 1, "route": CHAT, "body": {"messages": MESSAGES, "temprature": 1}}, "did you mean temperature?"),
    ({"v": 1, "route": CHAT, "body": {"messages": MESSAGES, "n": 2}}, "must ask for one answer, got 2"),
    ({"v": 1, "route": COMPLETIONS, "body": {"prompt": "a", "max_tokens": 0}}, "must ask for one answer, got 0"),
    ({"v": 1, "route": COMPLETIONS, "body": {"prompt": "a", "echo": True}}, "echo must not be true"),
    ({"v": 1, "route": COMPLETIONS, "body": {"prompt": "a", "regex": "a["}}, "regex"),
    ({"v": 1, "route": COMPLETIONS, "body": {"prompt": [10**6]}}, "ids must be"),
)  # fmt: skip
def test_a_bad_link_is_one_clear_line(content: Any, told: str) -> None:
    assert told in refused("replay", link_of(content), "-q")


@pytest.mark.parametrize("text", ["", "hello", "http://host/", "http://host/#x=abc", "#r=", "#r=a", "r=%%%", "#r=é"])
def test_a_text_that_is_not_a_link_gives_one_line(text: str) -> None:
    assert refused("replay", "--", text)


def test_a_link_is_read_whole_as_a_fragment_or_wrapped_over_lines() -> None:
    link = Permalink(CHAT, {"messages": MESSAGES})
    fragment = link.url.removeprefix(HOST)
    wrapped = "\n".join(link.url[i : i + 40] for i in range(0, len(link.url), 40))
    for text in (link.url, fragment, fragment.removeprefix("#"), f" {wrapped}=\n"):
        assert read_permalink(text) == link


@cases("options", ["--chat", "--seed", "3"], ["--temperature", "0"], ["--top-k", "4", "--kv-type", "auto"])
def test_the_command_line_makes_links_that_replay(options: list[str]) -> None:
    text, link = run("generate", "-q", "-p", "hello", "-n", "20", "--permalink", *options)
    assert run("replay", link.strip(), "-q") == (text, "")


def test_a_seed_that_is_drawn_is_kept_by_every_json(llm: LLM) -> None:
    seeds = [llm.generate("a", max_new_tokens=1, temperature=1.0).seed for _ in range(20)]
    assert all(isinstance(seed, int) and seed < 2**53 for seed in seeds)
    assert len(set(seeds)) > 1


@pytest.mark.parametrize("given", PARAMS)
@pytest.mark.parametrize("is_chat", [True, False])
def test_a_body_means_the_parameters_that_it_was_made_of(given: dict[str, Any], is_chat: bool) -> None:
    params = SamplingParams(**{"seed": 5, "repetition_window": 100, **given})
    prompt: Any = MESSAGES if is_chat else "hello"
    body = Permalink.of(body_of(prompt, params, "tiny"), Mock(seed=params.seed, text=""), "").body
    defaults = {"temperature": 0.1, "top_k": 3, "repetition_penalty": 2.0, "min_p": 0.3}
    model = Mock(sampling_defaults=defaults, tokenizer=Mock(chat_template=None))
    read: Any = read_body(json.dumps(body).encode(), ChatBody if is_chat else CompletionBody)
    assert read.ask(ModelOfBody(model)).params[0] == params


@cases(
    "given told",
    ({"stop": ["a"] * 65}, "stop must have at most 64 strings"),
    ({"logit_bias": {1: float("inf")}}, "logit_bias must be from -100 to 100 in a permalink, got 1=inf"),
    ({"json_schema": "true"}, "json_schema must be an object in a permalink, got 'true'"),
)
def test_a_request_that_no_route_takes_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        body_of("hello", SamplingParams(**given), "tiny")


def test_links_need_one_prompt() -> None:
    told = refused("generate", "-p", "a", "--permalink", "--overflow", "truncate_left")
    assert "leave out --prompts-file and --overflow" in told
