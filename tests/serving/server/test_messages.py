"""Anthropic's Messages: requests, answers and errors."""

import json
from pathlib import Path
from typing import Any

from cases import cases
from infer import LLM
from infer.serving.protocols.anthropic.message_bodies import MessagesBody
from infer.serving.protocols.anthropic.message_request import messages_of, variables_of
from infer.serving.protocols.read_body import read_body
from served import Served, serving

ASKED = {"model": "tiny", "max_tokens": 12, "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
EVENTS = ["message_start", "content_block_start", "ping", "content_block_delta", "content_block_stop", "message_delta",
          "message_stop"]  # fmt: skip


def read(**body: Any) -> MessagesBody:
    return read_body(json.dumps(ASKED | body).encode(), MessagesBody)


def test_a_system_is_a_string_or_blocks_and_turns_of_one_role_are_one() -> None:
    blocks = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    last = {"role": "assistant", "content": "d"}
    turns = [{"role": "user", "content": blocks}, {"role": "user", "content": "c"}, last]
    expected = [{"role": "system", "content": "ab"}, {"role": "user", "content": "ab\nc"}, last]
    for system, found in ((blocks, expected), ("ab", expected), (None, expected[1:])):
        body = read(system=system, messages=turns)
        assert messages_of(body.messages, body.system) == found
    assert variables_of(body, expected, None) == {"continue_final_message": True}
    assert variables_of(body, expected[:2], None) == {}


def test_a_message_is_the_library_s_answer(served: Served, llm: LLM) -> None:
    system = {"role": "system", "content": "be"}
    expected = llm.chat([system, *ASKED["messages"]], temperature=0, max_new_tokens=12)  # type: ignore[misc]
    found = served.ask("/v1/messages", **ASKED | {"system": "be"})
    assert found["content"] == [{"type": "text", "text": expected.text}]  # AI SDK 6 refuses null citations
    assert (found["stop_reason"], found["stop_sequence"]) == ("max_tokens", None)
    usage = found["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (expected.prompt_tokens, expected.generated_tokens)
    counted = {name: value for name, value in ASKED.items() if name in ("model", "messages")} | {"system": "be"}
    assert served.ask("/v1/messages/count_tokens", **counted) == {"input_tokens": expected.prompt_tokens}


def test_a_last_turn_of_the_assistant_is_gone_on_with(served: Served, llm: LLM) -> None:
    messages = [*ASKED["messages"], {"role": "assistant", "content": "abc"}]  # type: ignore[misc]
    expected = llm.chat(messages, temperature=0, max_new_tokens=12, continue_final_message=True)
    found = served.ask("/v1/messages", **ASKED | {"messages": messages})
    assert found["content"][0]["text"] == expected.text


def test_an_answer_is_held_to_a_schema(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    asked = ASKED | {"output_config": {"format": {"type": "json_schema", "schema": schema}}, "max_tokens": 99}
    found = served.ask("/v1/messages", **asked)
    assert json.loads(found["content"][0]["text"])["a"] in (1, 2)
    assert found["stop_reason"] in ("end_turn", "stop_sequence")


def test_a_stop_sequence_is_named(served: Served) -> None:
    text = served.ask("/v1/messages", **ASKED)["content"][0]["text"]
    found = served.ask("/v1/messages", **ASKED | {"stop_sequences": [text[-1], "zzz"]})
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", text[-1])


def test_a_stream_is_the_same_answer_in_anthropic_s_events(served: Served) -> None:
    whole = served.ask("/v1/messages", **ASKED)
    streamed = served.stream("/v1/messages", **ASKED)
    events = [event.split("\n") for event in streamed.strip().split("\n\n")]
    names = [event[0].removeprefix("event: ") for event in events]
    found = [json.loads(event[1].removeprefix("data: ")) for event in events]
    assert [each["type"] for each in found] == names
    assert list(dict.fromkeys(names)) == EVENTS
    deltas = (each["delta"]["text"] for each in found if each["type"] == "content_block_delta")
    assert "".join(deltas) == whole["content"][0]["text"]
    delta = {"stop_reason": "max_tokens", "stop_sequence": None}
    assert found[-2] == {"type": "message_delta", "delta": delta, "usage": whole["usage"]}


def test_both_events_with_usage_leave_out_cached_tokens(folder: Path) -> None:
    asked = ASKED | {"messages": [{"role": "user", "content": "a question " * 20}], "max_tokens": 4, "stream": True}
    with LLM(folder, reuse_prefixes=True) as llm, serving(llm) as served:
        for is_cached in (False, True):
            streamed = served.stream("/v1/messages", **asked).split("\n")
            found = [json.loads(line.removeprefix("data: ")) for line in streamed if line.startswith("data: ")]
            first, last = found[0]["message"]["usage"], found[-2]["usage"]
            assert first == last | {"output_tokens": 0}
            assert (first["cache_read_input_tokens"] > 0) == is_cached
            assert "citations" not in found[1]["content_block"]


@cases(
    "change param",
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"temperature": 1.5}, "temperature"),
    ({"max_token": 3}, "max_token"),
    ({"messages": [{"role": "user", "content": "a" * 900}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a" * 900}], "stream": True}, "messages"),
)
def test_refusals_have_anthropic_s_shape(served: Served, change: Any, param: str) -> None:
    answer = served.client.post("/v1/messages", json=ASKED | change)
    found = answer.json()
    assert (answer.status_code, found["type"], found["error"]["type"]) == (400, "error", "invalid_request_error")
    assert (found["error"]["param"], "message" in found["error"]) == (param, True)
