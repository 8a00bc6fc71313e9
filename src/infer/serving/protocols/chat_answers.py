"""The parts of an answer in OpenAI's format: its message, its finish reason, and the deltas of a stream."""

import json
from collections.abc import Iterable
from typing import Any

from infer.outputs import GenerationResult, ReasoningDelta, ToolCall, ToolCallDelta

Json = dict[str, Any]
Delta = ReasoningDelta | ToolCallDelta
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "abort": "length"}  # aborted: its timeout expired


def finish_reason_of(result: GenerationResult) -> str:
    """Return OpenAI's name of the finish reason."""
    reason = FINISH_REASONS[result.finish_reason]
    return "tool_calls" if reason == "stop" and result.tool_calls else reason


def message_of(result: GenerationResult) -> dict[str, Any]:
    """Return the answer as OpenAI's message. Its content is None if the answer has only calls."""
    message = result.to_message() | {"refusal": None}
    return message | {"content": None} if result.tool_calls and not result.text else message


def delta_fields(deltas: Iterable[Delta]) -> Json:
    """Return the fields of a chunk's delta, with one entry per call.

    A call has its id and name only in the chunk where it begins.
    """
    reasoning, calls = "", dict[int, Json]()
    for delta in deltas:
        if isinstance(delta, ReasoningDelta):
            reasoning += delta.text
            continue
        call = calls.setdefault(delta.index, {"index": delta.index, "function": {"arguments": ""}})
        if delta.id is not None:
            call |= {"id": delta.id, "type": "function"}
            call["function"] = {"name": delta.name, "arguments": ""}
        call["function"]["arguments"] += delta.arguments
    fields: Json = {"reasoning_content": reasoning} if reasoning else {}
    return fields | ({"tool_calls": list(calls.values())} if calls else {})


def call_values(call: ToolCall) -> Json:
    """Return the arguments of a call as an object, or {} if the call was cut off."""
    try:
        return call.parsed()
    except json.JSONDecodeError:
        return {}


def reasoning_and_calls(result: GenerationResult) -> Json:
    """Return the reasoning and the calls of the answer's message, if it has them."""
    message = result.to_message()
    return {name: message[name] for name in ("reasoning_content", "tool_calls") if name in message}
