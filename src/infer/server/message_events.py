"""The answer of `/v1/messages`: its blocks, whole or as Anthropic's events."""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, final

import msgspec

from infer.outputs import GenerationResult, ReasoningDelta, ToolCall, ToolCallDelta
from infer.server.answer_types import Head, Json
from infer.server.choices import Choices, Part
from infer.server.sse import event

_STOP_REASONS = {"eos": "end_turn", "stop": "end_turn", "length": "max_tokens", "abort": "max_tokens"}


@final
@dataclass(frozen=True)
class Message:
    """The answer, whole or as the objects of its events.

    `stops` are the request's stop sequences. `warnings` are about its body.
    """

    head: Head
    stops: frozenset[str] = frozenset()
    warnings: Sequence[str] = ()

    def whole(self, result: GenerationResult) -> Json:
        blocks = list[Json]()
        if result.reasoning is not None:
            blocks.append(thinking_block(result.reasoning))
        if result.text or not (result.reasoning or result.tool_calls):
            blocks.append(text_block(result.text))
        blocks += [tool_block(call, _values(call)) for call in result.tool_calls]
        return self._object(blocks, _usage(result), self._stop(result))

    def start(self, num_prompt_tokens: int) -> Json:
        usage = {"input_tokens": num_prompt_tokens, "output_tokens": 0}
        stop = {"stop_reason": None, "stop_sequence": None}
        return {"type": "message_start", "message": self._object([], usage, stop)}

    def end(self, result: GenerationResult) -> Json:
        found: Json = {"type": "message_delta", "delta": self._stop(result), "usage": _usage(result)}
        return found | ({"infer": {"warnings": list(self.warnings)}} if self.warnings else {})

    def _object(self, content: list[Any], usage: Mapping[str, int], stop: Mapping[str, Any]) -> Json:
        named = {"id": self.head.id, "type": "message", "role": "assistant", "model": self.head.model}
        return {**named, "content": content, **stop, "usage": usage}

    def _stop(self, result: GenerationResult) -> Json:
        reason = _STOP_REASONS[result.finish_reason]
        sequence = result.stop_reason if result.finish_reason == "stop" and result.stop_reason in self.stops else None
        if sequence is not None:
            reason = "stop_sequence"
        elif result.finish_reason == "length" and result.stop_reason == "context":
            reason = "model_context_window_exceeded"
        elif reason == "end_turn" and result.tool_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}


@final
class MessageEvents:
    """The events of a stream. At most one block is open at a time."""

    def __init__(self, answer: Message) -> None:
        self._answer = answer
        self._index = -1  # of the open block
        self._open: str | None = None  # what it is
        self._has_begun = False

    async def of(self, choices: Choices) -> AsyncGenerator[bytes, None]:
        yield _event(self._answer.start(len(choices.prompt_ids[0])))
        async with aclosing(choices.parts()) as parts:
            async for part in parts:
                for each in self._deltas(part):
                    yield each
                if part.result is not None:
                    begun = b"" if self._index >= 0 else self._begin("text", text_block(""))
                    yield begun + self._close() + _event(self._answer.end(part.result))
        yield _event({"type": "message_stop"})

    def _deltas(self, part: Part) -> list[bytes]:
        """Return the events of a part: reasoning first, then text, then calls."""
        found = list[bytes]()
        for delta in part.deltas:
            if isinstance(delta, ReasoningDelta):
                found.append(self._begin("thinking", thinking_block("")))
                found.append(self._delta({"type": "thinking_delta", "thinking": delta.text}))
        if part.text:
            found.append(self._begin("text", text_block("")))
            found.append(self._delta({"type": "text_delta", "text": part.text}))
        for delta in part.deltas:
            if isinstance(delta, ToolCallDelta):
                if delta.id is not None:
                    block = tool_block(ToolCall(delta.id, delta.name or "", ""), {})
                    found.append(self._begin(delta.id, block))
                if delta.arguments:
                    found.append(self._delta({"type": "input_json_delta", "partial_json": delta.arguments}))
        return found

    def _begin(self, what: str, block: Json) -> bytes:
        """Return the events that close the open block and begin another, or none if it is already open."""
        if self._open == what:
            return b""
        closed = self._close()
        self._index += 1
        self._open = what
        ping = b"" if self._has_begun else _event({"type": "ping"})
        self._has_begun = True
        return closed + _event({"type": "content_block_start", "index": self._index, "content_block": block}) + ping

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event({"type": "content_block_stop", "index": self._index})

    def _delta(self, delta: Json) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})


def text_block(text: str) -> Json:
    return {"type": "text", "text": text, "citations": None}


def thinking_block(text: str) -> Json:
    """Return a block of reasoning. Nothing is signed: a block that a client sends back is read as it is."""
    return {"type": "thinking", "thinking": text, "signature": ""}


def tool_block(call: ToolCall, values: Json) -> Json:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": values}


def _values(call: ToolCall) -> Json:
    """Return the arguments of a call, or {} if the call was cut off."""
    try:
        return call.parsed()
    except json.JSONDecodeError:
        return {}


def _usage(result: GenerationResult) -> dict[str, int]:
    """Return the numbers of tokens. Cached prompt tokens are counted separately from the prompt's other tokens."""
    return {
        "input_tokens": result.prompt_tokens - result.reused_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": result.reused_tokens,
        "output_tokens": result.generated_tokens,
    }


def _event(found: Json) -> bytes:
    return event(msgspec.json.encode(found), found["type"])
