"""Requests of Claude Code and Codex CLI, as recorded from their packages with their texts cut short, in their order."""

import json
import re
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cases import cases
from idle import until_idle
from infer.serving.protocols.anthropic.ask import MessagesBody, messages_of
from infer.serving.protocols.fields import read_body
from served import Served, served_model

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "agent-requests.json").read_text())
MESSAGES, COUNT, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
PAGE = 64
MODEL, LOADED = {"context": 8192}, {"reuse_prefixes": True}
ROUTES = {"codex": RESPONSES, "codex_image": RESPONSES}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}


keeping = served_model("llm", agent_prompts="keep")


def turns_of(name: str) -> list[dict[str, Any]]:
    """Return the requests of a recorded conversation, with few tokens to answer."""
    limit = "max_output_tokens" if name in ROUTES else "max_tokens"
    return [body | {limit: 4, "stream": False} for body in deepcopy(RECORDED[name])]


def post(served: Served, path: str, body: Any) -> Any:
    answer = served.ask(path, **body)
    until_idle(served)
    return answer


def warnings_of(answer: Any) -> str:
    return "\n".join(answer.get("infer", {}).get("warnings", []))


def cached_of(answer: Any) -> int:
    usage = answer["usage"]
    return int(usage.get("cache_read_input_tokens", 0) or usage.get("input_tokens_details", {}).get("cached_tokens", 0))


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("name", ["claude_code", "claude_code_budget", "claude_code_older", "codex"])
def test_each_turn_of_an_agent_is_answered_whole_and_streamed(served: Served, name: str) -> None:
    path = ROUTES.get(name, MESSAGES)
    for body in turns_of(name):
        whole = post(served, path, body)
        streamed = events_of(served.stream(path, **body | {"stream": True}))
        last = streamed[-2 if path == MESSAGES else -1]
        assert warnings_of(last.get("response", last)) == warnings_of(whole)
        assert "error" not in {event["type"] for event in streamed}


@pytest.mark.parametrize("name", ["claude_code", "claude_code_budget", "claude_code_older", "codex"])
def test_a_turn_finds_the_turn_before_in_the_cache(served: Served, name: str) -> None:
    path = ROUTES.get(name, MESSAGES)
    first, second = turns_of(name)[:2]
    for body in (first, second):
        if path == MESSAGES:
            body["messages"][0]["content"].insert(0, {"type": "text", "text": name})  # not the prompt of another test
            body["system"].insert(1, {"type": "text", "text": name})
        else:
            body["cache_salt"] = name
    before, after = post(served, path, first), post(served, path, second)
    end = "[assistant]" + "\n\n<total_tokens>200000 tokens left</total_tokens>"  # behind the last message
    usage = before["usage"]
    num_shared = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0) - len(end) - len("<|im_end|>\n")
    assert cached_of(after) >= num_shared // PAGE * PAGE > PAGE


TEXT = "a prompt that fills a page of the cache, and that no other test has, so it is found only if it is read here "
USER = [{"role": "user", "content": TEXT}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 1},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 1},
    "/completion": {"prompt": TEXT, "n_predict": 1},
    RESPONSES: {"input": TEXT, "max_output_tokens": 1},
    MESSAGES: {"messages": USER, "max_tokens": 1},
}


@pytest.mark.parametrize("apart", [{"cache_salt": "mine"}, {"cache_prompt": False}])
@pytest.mark.parametrize("path", BODIES)
def test_a_prompt_is_read_again_if_its_request_is_kept_apart(served: Served, path: str, apart: dict[str, Any]) -> None:
    def num_cached(**fields: Any) -> int:
        found = post(served, path, BODIES[path] | fields)
        (count,) = re.findall(r'"(?:cached_tokens|cache_read_input_tokens|cache_n)": (\d+)', json.dumps(found))
        if timings := found.get("timings"):
            assert timings["prompt_n"] == found["tokens_evaluated"] - int(count)
        return int(count)

    num_cached(**{"max_tokens": 0} if path == MESSAGES else {})
    assert num_cached() >= PAGE
    assert num_cached(**apart | {name: path for name in apart if name == "cache_salt"}) == 0
    assert num_cached(cache_prompt=True) >= PAGE
    assert num_cached(cache_salt=f"{path} once more", cache_prompt=False) == 0


def test_ollama_s_bodies_have_a_salt_too(served: Served) -> None:
    body = {"prompt": TEXT.upper(), "raw": True, "stream": False, "num_predict": 1}
    apart: list[dict[str, Any]] = [{}, {"cache_salt": "mine"}, {"options": {"cache_salt": "mine"}}, {}]
    found = [post(served, "/api/generate", body | each)["prompt_eval_cached_count"] for each in apart]
    assert [count >= PAGE for count in found] == [False, False, True, True]
    assert found[:2] == [0, 0]


def test_the_billing_line_and_the_budget_do_not_reach_the_middle_of_a_prompt() -> None:
    for name in ("claude_code", "claude_code_budget", "claude_code_older"):
        prompts = [shown(body) for body in RECORDED[name]]
        for prompt in prompts:
            assert all("x-anthropic-billing-header" not in each["content"] for each in prompt)
            assert all("<total_tokens>" not in each["content"] for each in prompt[:-1])
            assert prompt[-1]["content"].count("<total_tokens>") == (name != "claude_code")
        for before, after in pairwise(prompts):
            assert after[: len(before) - 1] == before[:-1]


def test_the_newest_budget_is_shown_and_a_text_that_only_mentions_one_is_left_alone() -> None:
    for body, left in zip(RECORDED["claude_code_budget"], (200_000, 199_985), strict=False):
        assert shown(body)[-1]["content"].endswith(f"<total_tokens>{left} tokens left</total_tokens>")
    text = "Why does <total_tokens>5 tokens left</total_tokens> appear?"
    body = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "a"}]}
    assert shown(body)[0]["content"] == text


def test_prompts_are_kept_as_they_are_if_asked(served: Served, keeping: Served) -> None:
    body = RECORDED["claude_code"][0]
    kept, adapted = post(keeping, COUNT, body), post(served, COUNT, body)
    assert kept["input_tokens"] - adapted["input_tokens"] == len(body["system"][0]["text"])


def test_a_later_system_message_stays_one_until_a_template_refuses_it() -> None:
    turns = [{"role": role, "content": role} for role in ("user", "system", "assistant")]
    assert shown({"messages": turns}) == turns


def shown(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages that the template receives."""
    read = read_body(json.dumps({"max_tokens": 1} | body).encode(), MessagesBody)
    return messages_of(read.messages, read.system)


# Refused, replaced and ignored fields


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_an_image_of_the_last_message_is_refused_in_one_line(served: Served, path: str) -> None:
    image = IMAGE if path == MESSAGES else {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    field, limit = ("messages", "max_tokens") if path == MESSAGES else ("input", "max_output_tokens")
    asked = {"role": "user", "content": [image]}
    message = served.refusal(path, **{limit: 4, field: [asked]})["message"]
    assert ("image" in message, "\n" in message) == (True, False)
    later = [asked, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    assert "was replaced by [image]" in warnings_of(post(served, path, {limit: 4, field: later}))


def test_images_of_codex_and_of_a_tool_become_placeholders_in_the_history(served: Served) -> None:
    first, second = turns_of("codex_image")
    served.refusal(RESPONSES, **first)
    for path, body in ((RESPONSES, second), (MESSAGES, turns_of("claude_code_budget")[2])):
        assert "was replaced by [image]" in warnings_of(post(served, path, body))


@cases(
    "blocks warned",
    ([{"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}}], "server_tool_use"),
    ([{"type": "web_search_tool_result", "tool_use_id": "a", "content": []}], "web_search_tool_result"),
    ([{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}], "encrypted"),
    ([{"type": "thinking", "thinking": "a"}, {"type": "text", "text": "a"}], ""),
    ([{"type": "tool_use", "id": "a", "name": "f", "input": '{"a": '}], "INVALID_JSON"),
    ([{"type": "tool_use", "id": "a", "name": "f", "input": None, "caller": {"type": "direct"}}], ""),
    ([], ""),
    (None, ""),
)
def test_a_history_of_another_server_is_taken(served: Served, blocks: Any, warned: str) -> None:
    user = {"role": "user", "content": "a"}
    turns = [user, {"role": "assistant", "content": blocks}, user]
    found = warnings_of(post(served, MESSAGES, {"max_tokens": 2, "messages": turns}))
    assert (warned in found, bool(found)) == (True, bool(warned))


@pytest.mark.parametrize("content", [None, [], "", [{"type": "text", "text": "a"}], [IMAGE]])
def test_a_result_of_a_tool_is_taken_with_any_content(served: Served, content: Any) -> None:
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": content, "is_error": True}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [call]}]
    assert post(served, MESSAGES, {"max_tokens": 2, "messages": [*turns, {"role": "user", "content": [result]}]})


def test_a_document_of_plain_text_is_read() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "apples"}
    block = {"type": "document", "title": "Fruit", "source": source}
    assert shown({"messages": [{"role": "user", "content": [block]}]})[-1]["content"] == "Fruit\napples"


@cases(
    "change",
    {"thinking": {"type": "enabled", "budget_tokens": 4000, "display": "summarized"}},
    {"thinking": {"type": "adaptive", "display": "omitted"}},
    {"output_config": {"effort": "max"}},
    {"context_management": {"edits": []}, "speed": "fast", "service_tier": "priority"},
    {"stop_sequences": ["", *(f"stop{index}" for index in range(40))]},
    {"max_tokens": None, "stop_sequences": ["a", "b", "e", " "], "temperature": 1},
    {"top_p": 0},
    {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}},
    {"tool_choice": {"type": "auto"}},
)
def test_hints_and_generous_values_are_taken_without_a_warning(served: Served, change: dict[str, Any]) -> None:
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": "a"}]} | change
    assert warnings_of(post(served, MESSAGES, body)) == ""


def test_tools_that_only_anthropic_defines_are_left_out_with_a_warning(served: Served) -> None:
    own = {"name": "f", "input_schema": {"type": "object"}, "defer_loading": True, "eager_input_streaming": True}
    kinds = ["web_search_20250305", "bash_20250124", "text_editor_20250728", "computer_20250124"]
    tools = [own, *({"type": kind, "name": f"t{index}"} for index, kind in enumerate(kinds))]
    asked = {"max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}
    answer = post(served, MESSAGES, asked | {"tools": tools})
    for index, kind in enumerate(kinds, 1):
        assert f"tools[{index}] was left out: tools of type '{kind}'" in warnings_of(answer)
    counted, expected = (post(served, COUNT, asked | {"tools": each}) for each in (tools, tools[:1]))
    assert counted == expected | {"infer": {"warnings": answer["infer"]["warnings"]}}


# /v1/responses


ZOO = {"type": "namespace", "name": "mcp__zoo", "description": "A zoo.", "tools": [
    {"type": "function", "name": "feed", "parameters": {"type": "object", "additionalProperties": False}}
]}  # fmt: skip


def test_a_call_of_a_namespace_has_its_name_and_its_namespace(served: Served) -> None:
    asked = {"input": "a", "tools": [ZOO], "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
    (item,) = post(served, RESPONSES, asked)["output"]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "feed", "mcp__zoo")
    streamed = events_of(served.stream(RESPONSES, **asked))
    items = [event["item"] for event in streamed if event["type"] == "response.output_item.done"]
    assert [(each["name"], each["namespace"]) for each in items] == [("feed", "mcp__zoo")]
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "fed"}
    history = [{"role": "user", "content": "a"}, item, result]
    assert warnings_of(post(served, RESPONSES, {"input": history, "tools": [ZOO], "max_output_tokens": 2})) == ""


@cases("item warned",
    ({"type": "web_search_call", "id": "a", "status": "completed", "action": {}}, "'web_search_call'"),
    ({"type": "item_reference", "id": "a"}, "'item_reference'"),
    ({"type": "compaction", "encrypted_content": "x"}, "'compaction'"),
    ({"type": "reasoning", "id": "a", "summary": [], "encrypted_content": "x"}, "encrypted"),
    ({"type": "local_shell_call", "call_id": "a", "action": {"type": "exec", "command": ["ls"]}}, ""),
    ({"type": "local_shell_call_output", "call_id": "a", "output": "x"}, ""),
    ({"type": "custom_tool_call", "call_id": "a", "name": "apply_patch", "input": "*** Begin"}, ""),
    ({"type": "custom_tool_call_output", "call_id": "a", "output": "x"}, ""),
    ({"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"a'}, "INVALID_JSON"),
    ({"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image"}]}, "[image]"),
    ({"type": "message", "role": "assistant", "status": "done", "content": []}, ""),
)  # fmt: skip
def test_an_item_of_another_server_is_taken(served: Served, item: Any, warned: str) -> None:
    user = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    found = warnings_of(post(served, RESPONSES, {"input": [user, item, user], "max_output_tokens": 2}))
    assert (warned in found, bool(found)) == (True, bool(warned))


def test_kinds_of_tools_and_includes_that_are_not_known_are_left_out_with_a_warning(served: Served) -> None:
    tools = [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}, {"type": "local_shell"}, ZOO]
    asked = {"input": "a", "tools": tools, "include": ["file_search_call.results"], "max_output_tokens": 2}
    found = warnings_of(post(served, RESPONSES, asked))
    assert [f"tools[{index}] was left out" in found for index in range(4)] == [True, True, True, False]
    assert "file_search_call.results" in found
    served.refusal(RESPONSES, **asked, tool_choice={"type": "web_search"})


def test_a_response_without_a_limit_goes_to_the_end_of_the_context(served: Served) -> None:
    """Codex sets no limit, and fails at one."""
    answer = post(served, RESPONSES, {"input": "a" * 7000, "regex": "[a-z]{900,}", "seed": 1})
    assert answer["usage"]["output_tokens"] > 512


def test_the_input_tokens_of_a_response_are_those_of_its_usage(served: Served) -> None:
    for body in turns_of("codex"):
        counted = post(served, f"{RESPONSES}/input_tokens", body)
        assert counted["object"] == "response.input_tokens"
        assert counted["input_tokens"] == post(served, RESPONSES, body)["usage"]["input_tokens"]
