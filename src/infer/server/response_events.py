"""The answer of `/v1/responses`: its items, whole or as numbered events."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, final

import msgspec

from infer.batch_file.openai_logprobs import Spelling, chat_entries, without_end
from infer.batch_file.result_line import FINISH_REASONS
from infer.outputs import FinishReason, GenerationResult, ReasoningDelta, TokenLogprob, ToolCall, ToolCallDelta
from infer.sampling_params import SamplingParams
from infer.server.answer_types import Head, Json, extension, logprobs_of
from infer.server.call import Call
from infer.server.choices import Choices, Part
from infer.server.errors import ApiError
from infer.server.replies import with_warnings
from infer.server.response_history import name_apart
from infer.server.schema import ResponseBody
from infer.server.sse import event


@final
class ResponseShape:
    """The format of an answer. Its items are reasoning, a message with one text, and calls, as far as there are any."""

    def __init__(self, head: Head, body: ResponseBody, params: SamplingParams, spelling: Spelling) -> None:
        self._number = head.id.removeprefix("resp_")
        self._spelling = spelling
        self._namespaces = {tool.name: tool.namespace for tool in body.tools or () if tool.namespace}
        self._settings: Json = {
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "model": head.model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": _format_of(body)},
            "tool_choice": "auto" if body.tool_choice is None else msgspec.to_builtins(body.tool_choice),
            "tools": [_tool(each) for each in msgspec.to_builtins(body.tools or [])],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
        }

    def whole(self, result: GenerationResult) -> Json:
        is_cut = FINISH_REASONS[result.finish_reason] == "length"
        status = "incomplete" if is_cut else "completed"
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {}
        return {
            **self.begun(status),
            **details,
            "output": self._items(result, status),
            "usage": _usage(result),
            "infer": extension({0: result}),
        }

    def begun(self, status: str) -> Json:
        return {**self._settings, "status": status, "error": None, "incomplete_details": None, "output": []}

    def _items(self, result: GenerationResult, status: str) -> list[Json]:
        found = list[Json]()
        if result.reasoning is not None:
            found.append(self.reasoning("completed", result.reasoning))
        if result.text or not (result.reasoning or result.tool_calls):
            logprobs = self.logprobs(result.logprobs or (), result.finish_reason)
            found.append(self.message(status, [self.part(result.text, logprobs)]))
        found += [self.call("completed", index, call) for index, call in enumerate(result.tool_calls)]
        found[-1]["status"] = status
        return found

    def reasoning(self, status: str, text: str | None) -> Json:
        content = [] if text is None else [{"type": "reasoning_text", "text": text}]
        return {"id": f"rs_{self._number}", "type": "reasoning", "summary": [], "content": content, "status": status}

    def message(self, status: str, content: list[Json]) -> Json:
        named = {"id": f"msg_{self._number}", "type": "message", "role": "assistant"}
        return {**named, "status": status, "content": content}

    def call(self, status: str, index: int, call: ToolCall) -> Json:
        named: Json = {"id": f"fc_{self._number}_{index}", "type": "function_call", "call_id": call.id}
        if namespace := self._namespaces.get(call.name):
            named |= {"name": name_apart(call.name, namespace), "namespace": namespace}
        else:
            named["name"] = call.name
        return {**named, "arguments": call.arguments, "status": status}

    def part(self, text: str, logprobs: list[Json]) -> Json:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def logprobs(self, logprobs: Sequence[TokenLogprob], finish_reason: FinishReason | None) -> list[Json]:
        entries = chat_entries(without_end(logprobs, finish_reason), self._spelling)
        for entry in (each for outer in entries for each in (outer, *outer["top_logprobs"])):
            entry["bytes"] = entry["bytes"] or []  # here they may not be null
        return entries


@final
class ResponseEvents:
    """The events of a stream, with their numbers.

    One item is open at a time. It is closed when the next item begins, or at the end of the stream.
    """

    def __init__(self, shape: ResponseShape, call: Call) -> None:
        self._shape, self._call, self._number = shape, call, 0
        self._index = -1  # of the open item
        self._open: Json | None = None
        self._written = ""  # of its text, or arguments
        self._logprobs: list[Json] = []

    async def of(self, choices: Choices) -> AsyncGenerator[bytes, None]:
        yield self._event("response.created", response=self._shape.begun("in_progress"))
        yield self._event("response.in_progress", response=self._shape.begun("in_progress"))
        async with aclosing(choices.parts()) as parts:
            async for part in parts:
                for each in self._deltas(part):
                    yield each
                if part.result is not None:
                    for each in self._end(part.result):
                        yield each

    def fail(self, error: ApiError) -> bytes:
        failed = self._shape.begun("failed") | {"error": {"code": "server_error", "message": error.message}}
        return self._event("response.failed", response=failed)

    def _deltas(self, part: Part) -> list[bytes]:
        """Return the events of a part: reasoning first, then text, then calls."""
        found = list[bytes]()
        deltas = part.deltas
        for delta in deltas:
            if isinstance(delta, ReasoningDelta):
                found += self._begin(self._shape.reasoning("in_progress", None))
                found.append(self._delta("response.reasoning_text.delta", delta.text, content_index=0))
        last = part.pieces[-1].finish_reason if part.pieces else None
        entries = self._shape.logprobs(logprobs_of(part.pieces), last)
        if part.text or (entries and not deltas):
            found += self._begin(self._shape.message("in_progress", []))
            found.append(self._text_delta(part.text, entries))
        for delta in deltas:
            if isinstance(delta, ToolCallDelta):
                if delta.id is not None:
                    call = ToolCall(delta.id, delta.name or "", "")
                    found += self._begin(self._shape.call("in_progress", delta.index, call))
                if delta.arguments:
                    found.append(self._delta("response.function_call_arguments.delta", delta.arguments))
        return found

    def _text_delta(self, text: str, entries: list[Json]) -> bytes:
        self._logprobs += entries
        return self._delta("response.output_text.delta", text, content_index=0, logprobs=entries)

    def _begin(self, item: Json) -> list[bytes]:
        """Return the events that close the open item and begin another, or none if it is already open."""
        if self._open is not None and self._open["id"] == item["id"]:
            return []
        found = self._close("completed")
        self._index += 1
        self._open, self._written = item, ""
        found.append(self._event("response.output_item.added", output_index=self._index, item=item))
        if item["type"] != "function_call":
            part = self._part("")
            found.append(self._event("response.content_part.added", **self._place, content_index=0, part=part))
        return found

    def _close(self, status: str) -> list[bytes]:
        if (item := self._open) is None:
            return []
        found, text = list[bytes](), self._written
        if item["type"] == "function_call":
            item |= {"arguments": text}
            done = {"arguments": text, "name": item["name"]}
            found.append(self._event("response.function_call_arguments.done", **self._place, **done))
        else:
            part = self._part(text)
            item |= {"content": [part]}
            kind, logprobs = (
                ("output", {"logprobs": self._logprobs}) if item["type"] == "message" else ("reasoning", {})
            )
            place = self._place | {"content_index": 0}
            found.append(self._event(f"response.{kind}_text.done", **place, text=text, **logprobs))
            found.append(self._event("response.content_part.done", **place, part=part))
        self._open = None
        done_item = item | {"status": status}
        return [*found, self._event("response.output_item.done", output_index=self._index, item=done_item)]

    def _end(self, result: GenerationResult) -> list[bytes]:
        whole = self._shape.whole(result)
        found = [] if self._index >= 0 else self._begin(self._shape.message("in_progress", []))
        found += self._close(whole["status"])
        return [*found, self._event(f"response.{whole['status']}", response=with_warnings(whole, self._call))]

    def _part(self, text: str) -> Json:
        assert self._open is not None
        if self._open["type"] == "message":
            return self._shape.part(text, list(self._logprobs) if text or self._logprobs else [])
        return {"type": "reasoning_text", "text": text}

    @property
    def _place(self) -> Json:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": self._index}

    def _delta(self, name: str, text: str, **fields: Any) -> bytes:
        self._written += text
        return self._event(name, **self._place, delta=text, **fields)

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event(msgspec.json.encode(body), kind)


def _tool(given: Json) -> Json:
    """Return a tool as OpenAI shows it, with all of its fields."""
    return {
        "description": None,
        "parameters": None,
        "strict": False,
        **{k: v for k, v in given.items() if v is not None},
    }


def _format_of(body: ResponseBody) -> Any:
    asked = None if body.text is None else body.text.format
    given = {"type": "text"} if asked is None else msgspec.to_builtins(asked)
    return {name: value for name, value in given.items() if value is not None}


def _usage(result: GenerationResult) -> Json:
    return {
        "input_tokens": result.prompt_tokens,
        "input_tokens_details": {"cached_tokens": result.reused_tokens, "cache_write_tokens": 0},
        "output_tokens": result.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": result.reasoning_tokens},
        "total_tokens": result.prompt_tokens + result.generated_tokens,
    }
