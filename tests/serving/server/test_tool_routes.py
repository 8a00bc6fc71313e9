"""Tools and reasoning over HTTP: the calls of `LLM.chat`, in the shapes of each API, whole and streamed."""

import json
from pathlib import Path
from typing import Any

import pytest

from cases import cases
from infer import LLM, SamplingParams
from infer.cli.chat_session import ChatSession
from openai_shapes import check, events, named_events
from served import Served, serving
from test_session import TEXT_IDS, make_model
from test_tool_calls import THINKING
from tool_templates import TEMPLATES

ASKED = [{"role": "user", "content": "weather?"}]
CHAT = "/v1/chat/completions"
MODEL, LOADED = {"context": 1_500}, {"chat_template": THINKING, "reuse_prefixes": True}
PARAMETERS = {"type": "object", "properties": {"flag": {"type": "boolean"}}, "required": ["flag"]}
FUNCTION: dict[str, Any] = {"name": "is_on", "description": "Whether it is on.", "parameters": PARAMETERS}
NOW: dict[str, Any] = {"name": "now"}
TOOLS = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": NOW | {"strict": None}}]
BOOLEAN = {"type": "boolean"}
SAMPLED: dict[str, Any] = {"seed": 3, "max_tokens": 200, "temperature": 1.5}


def joined(chunks: list[dict[str, Any]], index: int) -> tuple[dict[str, Any], str]:
    """Return a message and its finish reason, joined from chunks as clients do."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = ""
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        entries = delta.get("tool_calls", [])
        assert len({entry["index"] for entry in entries}) == len(entries)
        for entry in entries:
            if "id" in entry:
                assert entry["index"] == len(message["tool_calls"])
                message["tool_calls"].append({name: entry[name] for name in ("id", "type", "function")})
            else:
                message["tool_calls"][entry["index"]]["function"]["arguments"] += entry["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return message, reason


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_call_over_http_is_that_of_the_library(served: Served, llm: LLM, choice: Any) -> None:
    body = {"messages": ASKED, "tools": TOOLS, "tool_choice": choice, "n": 2, **SAMPLED}
    expected = llm.chat(ASKED, tools=[FUNCTION, NOW], tool_choice=choice, seed=3, max_new_tokens=200, temperature=1.5)
    whole = served.ask(CHAT, **body)
    check("CreateChatCompletionResponse", whole)
    message = whole["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"] == [call.to_json() for call in expected.tool_calls]
    ids = [call["id"] for choice in whole["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == len(ids)
    chunks = list(events(served.stream(CHAT, **body)))
    for chunk in chunks:
        check("CreateChatCompletionStreamResponse", chunk)
    for index, choice in enumerate(whole["choices"]):
        found, reason = joined(chunks, index)
        assert found["tool_calls"] == choice["message"]["tool_calls"]
        assert (found["content"], reason) == ("", choice["finish_reason"])
        assert reason in ("tool_calls", "length")


def test_harmony_is_served_whole_and_streamed_without_its_headers(tmp_path: Path) -> None:
    folder = make_model(tmp_path, context=1_500)
    body = {"messages": ASKED, "thinking_token_budget": 5, **SAMPLED, "max_tokens": 400}
    called = {**body, "tools": TOOLS, "tool_choice": "required"}
    chosen = {**body, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": BOOLEAN}}}
    with LLM(folder, chat_template=TEMPLATES["harmony"]) as other, serving(other, model="tiny") as served:
        whole = served.ask(CHAT, **called)["choices"][0]
        assert whole["finish_reason"] == "tool_calls"
        (call,) = whole["message"]["tool_calls"]
        assert (whole["message"]["content"], call["function"]["name"] in ("is_on", "now")) == (None, True)
        found, reason = joined(list(events(served.stream(CHAT, **called))), 0)
        assert (found["content"], found["tool_calls"], reason) == ("", [call], "tool_calls")
        answer = served.ask(CHAT, **chosen)["choices"][0]["message"]
        assert answer["content"] in ("true", "false")
        assert "<|" not in (answer.get("reasoning_content") or "")
        heard = {"role": "tool", "tool_call_id": call["id"], "content": "on"}
        assert served.ask(CHAT, **{**called, "messages": [*ASKED, whole["message"], heard]})["choices"]


def test_a_conversation_with_calls_and_results_goes_on(served: Served) -> None:
    body = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, **SAMPLED}
    answer = served.ask(CHAT, messages=ASKED, **body)["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    (call,) = answer["message"]["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "yes"}]}
    messages = [*ASKED, answer["message"], result]
    after = served.ask(CHAT, messages=messages, tools=TOOLS, seed=1, max_tokens=5, allowed_token_ids=TEXT_IDS)
    assert after["choices"][0]["message"]["content"]
    prompt = served.ask("/apply-template", messages=messages)["prompt"]
    assert call["function"]["name"] in prompt


def test_reasoning_is_a_field_of_its_own_counted_and_switched_off(served: Served) -> None:
    body = {"messages": ASKED, "chat_template_kwargs": {"open": True}, "thinking_token_budget": 6, **SAMPLED}
    letters = [*range(97, 123), 256, *b"</>"]
    whole = served.ask(CHAT, **body, allowed_token_ids=letters)
    message = whole["choices"][0]["message"]
    assert len(message["reasoning_content"]) <= 6
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6 + len("</think>")
    found, _ = joined(list(events(served.stream(CHAT, allowed_token_ids=letters, **body))), 0)
    assert found == {"tool_calls": []} | {name: message[name] for name in ("content", "reasoning_content")}
    raw = served.ask(CHAT, **body, allowed_token_ids=letters, reasoning_format="none")["choices"][0]["message"]
    assert "reasoning_content" not in raw
    assert raw["content"].startswith(f"{message['reasoning_content']}</think>")
    del body["thinking_token_budget"]
    off = served.ask(CHAT, **body, reasoning_effort="none", allowed_token_ids=letters)
    assert "reasoning_content" not in off["choices"][0]["message"]
    for name in ("reasoning", "reasoning_content"):
        past = {"role": "assistant", "content": "a", name: "because"}
        assert "because" in served.ask("/apply-template", messages=[*ASKED, past])["prompt"]


def test_an_answer_with_tools_is_traced_and_branched_with_its_own_grammar(served: Served, llm: LLM) -> None:
    thinking = {"chat_template_kwargs": {"open": True}, "thinking_token_budget": 6}
    body = {"messages": ASKED, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, **SAMPLED}
    answer = served.ask(CHAT, **body, **thinking, return_token_ids=True)["choices"][0]
    ids, message = answer["token_ids"], answer["message"]
    traced = served.ask("/v1/trace", **body, **thinking, num_candidates=3)
    assert [each["token_id"] for each in traced["tokens"]] == traced["token_ids"] == ids
    assert (traced["reasoning_content"], traced["tool_calls"]) == (message["reasoning_content"], message["tool_calls"])
    assert traced["finish_reason"] == answer["finish_reason"] == "tool_calls"
    assert min(stage["num_kept"] for each in traced["tokens"] for stage in each["stages"]) == 1
    given = {"answer_token_ids": ids, "position": 9}
    part = served.ask("/v1/trace", **body, **thinking, **given, num_tokens=4, num_candidates=3)
    assert part["tokens"] == traced["tokens"][9:13]
    branch = served.ask("/v1/branch", **body, **thinking, **given)
    assert (branch["token_ids"], branch["tool_calls"]) == (ids, message["tool_calls"])
    assert (branch["reasoning_content"], branch["finish_reason"]) == (message["reasoning_content"], "tool_calls")
    streamed = served.stream("/v1/branch", **body, **thinking, **given)
    choices = [{"index": 0, "delta": chunk, "finish_reason": chunk["finish_reason"]} for chunk in events(streamed)]
    found, reason = joined([{"choices": choices}], 0)
    assert (found["reasoning_content"], found["tool_calls"]) == (message["reasoning_content"], message["tool_calls"])
    assert reason == "tool_calls"
    expected = llm.sample_trace(ASKED, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=3, step=5,
                                temperature=1.5, num_candidates=3).to_json()  # fmt: skip
    fifth = served.ask("/v1/trace", **body, num_candidates=3)["tokens"][4]
    del fifth["bytes"], expected["text_before"]
    assert fifth == json.loads(json.dumps(expected))


def test_a_chat_traces_an_answer_that_tools_hold(llm: LLM) -> None:
    chat = ChatSession(llm, "tiny", SamplingParams(seed=3, max_new_tokens=30, temperature=1.5))
    chat.tools = TOOLS[:1]
    result = chat.ask(chat.question("weather?"), lambda text: None)
    found = chat.trace(4)
    assert (found.token_id, found.step, found.position) == (result.token_ids[3], 4, result.prompt_tokens + 3)
    assert found == llm.sample_trace(ASKED, chat.last_answer().params, step=4, tools=TOOLS[:1])
    assert "allowed" in {stage.name for stage in found.stages}


def test_a_chat_traces_an_answer_with_a_schema_after_its_reasoning(llm: LLM) -> None:
    params = SamplingParams(seed=3, max_new_tokens=30, temperature=1.5, json_schema=FUNCTION["parameters"])
    chat = ChatSession(llm, "tiny", params)
    chat.ask(chat.question("weather?"), lambda text: None)
    second = chat.ask(chat.question("and now?"), lambda text: None)
    for step in (1, 2, len(second.token_ids)):
        found = chat.trace(step)
        assert (found.token_id, found.position) == (second.token_ids[step - 1], second.prompt_tokens + step - 1)


def test_options_of_messages_are_refused_beside_a_text(served: Served) -> None:
    for name, value in {"tools": TOOLS, "thinking_token_budget": 1, "reasoning_effort": "low"}.items():
        assert served.refusal("/v1/trace", **{"prompt": "a", name: value})["param"] == name


STRICT_LIST = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "array"}}}


@cases(
    "body param",
    ({"tools": [STRICT_LIST]}, "tools"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": TOOLS, "tool_format": "x"}, "tool_format"),
    ({"thinking_token_budget": 3, "reasoning_effort": "none"}, "thinking_token_budget"),
    ({"thinking_token_budget": -3}, "thinking_token_budget"),
)
def test_faults_of_tools_are_named(served: Served, body: dict[str, Any], param: str) -> None:
    error = served.refusal(CHAT, messages=ASKED, **body)
    assert (error["param"], "\n" in error["message"]) == (param, False)
    check("ErrorResponse", {"error": error})


def test_an_answer_cut_in_a_call_says_length(served: Served) -> None:
    choice = {"type": "function", "function": {"name": "is_on"}}
    body = {"messages": ASKED, "tools": TOOLS, "tool_choice": choice, "seed": 1, "max_tokens": 40}
    (answer,) = served.ask(CHAT, **body)["choices"]
    assert answer["finish_reason"] == "length"
    (call,) = answer["message"]["tool_calls"]
    assert not call["function"]["arguments"].endswith("}")


# /v1/responses


FLAT = [{"type": "function", **FUNCTION}, {"type": "function", **NOW}]
RESPONSES = "/v1/responses"


def streamed(served: Served, **body: Any) -> list[dict[str, Any]]:
    found = list(named_events(served.stream(RESPONSES, **body)))
    for each in found:
        check("ResponseStreamEvent", each)
    return found


def test_a_response_has_its_calls_as_items_whole_and_in_events(served: Served, llm: LLM) -> None:
    sampled = {"seed": 3, "max_output_tokens": 200, "temperature": 1.5}
    body = {"input": "weather?", "tools": FLAT, "tool_choice": "required", **sampled}
    tools = {"tools": [FUNCTION, NOW], "tool_choice": "required"}
    expected = llm.chat(ASKED, **tools, seed=3, max_new_tokens=200, temperature=1.5)
    whole = served.ask(RESPONSES, **body)
    check("Response", whole)
    found = [(item["call_id"], item["name"], item["arguments"]) for item in whole["output"]]
    assert found == [(call.id, call.name, call.arguments) for call in expected.tool_calls]
    events_found = streamed(served, **body)
    items = [each["item"] for each in events_found if each["type"] == "response.output_item.done"]
    assert [{**item, "id": ""} for item in items] == [{**item, "id": ""} for item in whole["output"]]
    for index, item in enumerate(items):
        own = [each for each in events_found if each.get("output_index") == index]
        kinds = [each["type"] for each in own]
        assert (kinds[0], kinds[-1]) == ("response.output_item.added", "response.output_item.done")
        deltas = [each["delta"] for each in own if each["type"] == "response.function_call_arguments.delta"]
        assert "".join(deltas) == item["arguments"]
    past = [{"role": "user", "content": "weather?"}, *items]
    results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "yes"} for item in items]
    answer = served.ask(RESPONSES, input=[*past, *results], tools=FLAT, tool_choice="none", max_output_tokens=3)
    assert answer["output"][-1]["type"] == "message"


def test_a_response_has_its_reasoning_before_its_message(served: Served, llm: LLM) -> None:
    begun = [{"role": "user", "content": "a"}]
    body: dict[str, Any] = {"input": begun, "thinking_token_budget": 5, "seed": 2, "max_output_tokens": 60}
    body["allowed_token_ids"] = [*range(97, 123), 256, *b"<>/"]
    sampled = {"seed": 2, "max_new_tokens": 60, "allowed_token_ids": body["allowed_token_ids"]}
    llm_result = llm.chat(begun, sampled, answer_prefix=[], reasoning_budget=5)
    whole = served.ask(RESPONSES, **body)
    check("Response", whole)
    kinds, has_message = [item["type"] for item in whole["output"]], llm_result.text or not llm_result.reasoning
    assert kinds == ["reasoning"] * bool(llm_result.reasoning) + ["message"] * bool(has_message)
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == llm_result.reasoning_tokens
    items = [each["item"] for each in streamed(served, **body) if each["type"] == "response.output_item.done"]
    assert [item["content"] for item in items] == [item["content"] for item in whole["output"]]
    assert streamed(served, **body | {"thinking_token_budget": 0})


# /v1/messages


BLOCKS_TOOLS = [
    {"name": "is_on", "description": "Whether it is on.", "input_schema": FUNCTION["parameters"]},
    {"name": "now", "input_schema": {"type": "object"}},
]
MESSAGES = "/v1/messages"


def blocks_of(text: str) -> tuple[list[dict[str, Any]], str]:
    """Return the blocks that Anthropic's client makes from events."""
    blocks, reason = list[dict[str, Any]](), ""
    for event in text.strip().split("\n\n"):
        found = json.loads(event.split("data: ")[1])
        match found["type"]:
            case "content_block_start":
                assert found["index"] == len(blocks)
                blocks.append(found["content_block"] | {"partial": ""})
            case "content_block_delta":
                block, delta = blocks[found["index"]], found["delta"]
                assert found["index"] == len(blocks) - 1
                kind = delta["type"].removesuffix("_delta")
                block["partial" if kind == "input_json" else kind] += delta.get(kind) or delta["partial_json"]
            case "message_delta":
                reason = found["delta"]["stop_reason"]
    for block in blocks:
        if partial := block.pop("partial"):
            block["input"] = json.loads(partial)
    return blocks, reason


@cases("choice", {"type": "any"}, {"type": "tool", "name": "is_on", "disable_parallel_tool_use": True})
def test_a_message_has_its_calls_as_blocks_and_hears_their_results(served: Served, llm: LLM, choice: Any) -> None:
    body = {"messages": ASKED, "tools": BLOCKS_TOOLS, "tool_choice": choice, "seed": 3, "max_tokens": 300}
    name = choice.get("name")
    tools = {"tools": [FUNCTION, NOW | {"parameters": {"type": "object"}}], "tool_choice": name or "required"}
    expected = llm.chat(ASKED, **tools, parallel_tool_calls=not name, seed=3, max_new_tokens=300)
    whole = served.ask(MESSAGES, **body)
    calls = [(call.id, call.name, call.parsed()) for call in expected.tool_calls]
    assert [(each["id"], each["name"], each["input"]) for each in whole["content"]] == calls
    assert whole["stop_reason"] == "tool_use"
    blocks, reason = blocks_of(served.stream(MESSAGES, **body))
    assert (blocks, reason) == (whole["content"], "tool_use")
    yes = {"type": "tool_result", "content": [{"type": "text", "text": "yes"}]}
    results = [yes | {"tool_use_id": each["id"]} for each in whole["content"]]
    turns = [*ASKED, {"role": "assistant", "content": whole["content"]}, {"role": "user", "content": results}]
    counted = served.ask(f"{MESSAGES}/count_tokens", messages=turns, tools=BLOCKS_TOOLS)["input_tokens"]
    answer = served.ask(MESSAGES, messages=turns, tools=BLOCKS_TOOLS, max_tokens=3, tool_choice={"type": "none"})
    assert answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"] <= counted


def test_thinking_is_a_block_before_the_text(served: Served, llm: LLM) -> None:
    body = {"messages": ASKED, "seed": 5, "max_tokens": 40, "thinking": {"type": "enabled", "budget_tokens": 7}}
    expected = llm.chat(ASKED, seed=5, max_new_tokens=40, reasoning_budget=7)
    whole = served.ask(MESSAGES, **body)
    assert blocks_of(served.stream(MESSAGES, **body)) == (whole["content"], whole["stop_reason"])
    assert [each["type"] for each in whole["content"]][-1] == ("text" if expected.text else "thinking")
    off = served.ask(MESSAGES, **body | {"thinking": {"type": "disabled"}})
    assert [each["type"] for each in off["content"]] == ["text"]
    past = {"role": "assistant", "content": whole["content"]}
    assert served.ask(MESSAGES, **body | {"messages": [*ASKED, past, *ASKED]})["content"]


BAD_FORMAT = {"type": "json_schema", "schema": {"type": "x"}}


def test_anthropic_s_names_stand_in_its_refusals(served: Served) -> None:
    body: dict[str, Any] = {"messages": ASKED, "max_tokens": 3}
    for wrong, param in [
        ({"thinking": {"type": "enabled", "budget_tokens": 2**40}}, "thinking.budget_tokens"),
        ({"output_config": {"format": BAD_FORMAT}}, "output_config.format.schema"),
        ({"thread": {"type": "create"}}, "thread"),
    ]:
        error = served.refusal(MESSAGES, **body | wrong)
        assert error["param"] == param
        assert "thinking_token_budget" not in error["message"]
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
