"""Answers of `/v1/responses` with reasoning, a message and calls, whole or as numbered events."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, final

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace as replace_fields

from infer.outputs import GenerationResult, ToolCall
from infer.serving.protocols.api_errors import ApiError
from infer.serving.protocols.events import (
    FINISH_REASONS,
    Accepted,
    Count,
    Delta,
    Json,
    Output,
    Scored,
    Shape,
    event,
    extension,
    with_warnings,
)
from infer.serving.protocols.responses.ask import ResponseBody, name_in

Status = Literal["in_progress", "completed", "incomplete"]
_ABSENT: Json = {"description": None, "parameters": None, "strict": False}  # OpenAI shows all fields of a tool


class OutputTextPart(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Json]
    logprobs: list[Json]


class ReasoningPart(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(Struct, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"]
    status: Status
    content: list[OutputTextPart]


class OutputReasoning(Struct, tag_field="type", tag="reasoning"):
    id: str
    summary: list[Json]
    content: list[ReasoningPart]
    status: Status


class OutputCall(Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status
    namespace: str | UnsetType = UNSET


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputDetails(Struct):
    cached_tokens: Count
    cache_write_tokens: Count


class OutputDetails(Struct):
    reasoning_tokens: Count


class ResponseUsage(Struct):
    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: OutputDetails
    total_tokens: Count


class ResponseOutput(Output, kw_only=True, tag_field="object", tag="response"):
    """A response. It is not stored, so no later request can refer to it."""

    id: str
    created_at: Count
    model: str
    status: Status | Literal["failed"]
    error: Json | None = None
    incomplete_details: Json | None = None
    output: list[OutputItem]
    usage: ResponseUsage | UnsetType = UNSET
    instructions: str | None
    max_output_tokens: int | None
    metadata: Json
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    temperature: float
    text: Json
    tool_choice: str | Json
    tools: list[Json]
    top_logprobs: Count
    top_p: float
    truncation: str


@final
class ResponseShape(Shape):
    """The answer, whole or as events with numbers. Its items are the reasoning, one message with one text, and calls.

    One item of a stream is open at a time. It is closed when the next item begins, or at the end of the stream.
    """

    body, answer, last = ResponseBody, ResponseOutput, b""

    def __init__(self, accepted: Accepted, body: ResponseBody) -> None:
        head, params = accepted.head("resp_"), accepted.ask.params[0]
        self._id, self._warnings = head.id.removeprefix("resp_"), accepted.served.reading.warnings
        self._spelling = None if params.logprobs is None else accepted.spelling
        self._namespaces = {tool.name: tool.namespace for tool in body.tools or () if tool.namespace}
        self._num_events, self._index = 0, -1  # index of the open item
        self._open: OutputItem | None = None
        self._written = ""  # the part of its text or arguments that was sent
        self._logprobs: list[Json] = []
        asked = None if body.text is None else body.text.format
        self._begun = partial(
            ResponseOutput,
            id=head.id,
            created_at=head.created,
            model=head.model,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=None,
            store=False,
            temperature=params.temperature,
            text={"format": {"type": "text"} if asked is None else msgspec.to_builtins(asked)},
            tool_choice="auto" if body.tool_choice is None else msgspec.to_builtins(body.tool_choice),
            tools=[{**_ABSENT, **each} for each in msgspec.to_builtins(body.tools or [])],
            top_logprobs=body.top_logprobs or 0,
            top_p=params.top_p,
            truncation=body.truncation or "disabled",
        )

    def whole(self, results: Sequence[GenerationResult]) -> ResponseOutput:
        (result,) = results
        is_cut = FINISH_REASONS[result.finish_reason] == "length"
        status: Status = "incomplete" if is_cut else "completed"
        return self._begun(
            status=status,
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            output=self._items(result, status),
            usage=_usage(result),
            infer=extension([(0, result)]),
        )

    def _items(self, result: GenerationResult, status: Status) -> list[OutputItem]:
        found = list[OutputItem]()
        if result.reasoning is not None:
            found.append(self._reasoning("completed", [ReasoningPart(result.reasoning)]))
        if result.text or not (result.reasoning or result.tool_calls):
            found.append(self._message("completed", [OutputTextPart(result.text, [], self._entries(result))]))
        found += [self._call("completed", index, call) for index, call in enumerate(result.tool_calls)]
        found[-1].status = status
        return found

    def _reasoning(self, status: Status, content: list[ReasoningPart]) -> OutputReasoning:
        return OutputReasoning(f"rs_{self._id}", [], content, status)

    def _message(self, status: Status, content: list[OutputTextPart]) -> OutputMessage:
        return OutputMessage(f"msg_{self._id}", "assistant", status, content)

    def _call(self, status: Status, index: int, call: ToolCall) -> OutputCall:
        found = OutputCall(f"fc_{self._id}_{index}", call.id, call.name, call.arguments, status)
        if namespace := self._namespaces.get(call.name):
            found.name, found.namespace = call.name.removeprefix(name_in(namespace, "")), namespace
        return found

    def _entries(self, scored: Scored) -> list[Json]:
        entries = [] if self._spelling is None else self._spelling.chat_entries(scored)
        for entry in (each for outer in entries for each in (outer, *outer["top_logprobs"])):
            entry["bytes"] = entry["bytes"] or []  # the Responses API allows no null here
        return entries

    def opening(self) -> list[Json]:
        begun = self._begun(status="in_progress", output=[])
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=begun) for kind in kinds]

    def chunks(self, part: Delta) -> list[Json]:
        return self._deltas(part) + ([] if part.result is None else self._end(part.result))

    def fail(self, error: ApiError) -> bytes:
        told = {"code": "server_error", "message": error.message}
        failed = self._event("response.failed", response=self._begun(status="failed", error=told, output=[]))
        return event(failed)

    def _deltas(self, part: Delta) -> list[Json]:
        """Return the events of a part: reasoning first, then text, then calls."""
        found = list[Json]()
        if part.reasoning:
            found += self._begin(self._reasoning("in_progress", []))
            found.append(self._delta("response.reasoning_text.delta", part.reasoning, content_index=0))
        entries = self._entries(part)
        if part.text or (entries and not (part.reasoning or part.calls)):
            found += self._begin(self._message("in_progress", []))
            self._logprobs += entries
            found.append(self._delta("response.output_text.delta", part.text, content_index=0, logprobs=entries))
        for delta in part.calls:
            if delta.id is not None:
                call = ToolCall(delta.id, delta.name or "", "")
                found += self._begin(self._call("in_progress", delta.index, call))
            if delta.arguments:
                found.append(self._delta("response.function_call_arguments.delta", delta.arguments))
        return found

    def _begin(self, item: OutputItem) -> list[Json]:
        """Return the events that close the open item and begin another, or none if it is already open."""
        if self._open is not None and self._open.id == item.id:
            return []
        found = self._close("completed")
        self._index += 1
        self._open, self._written = item, ""
        found.append(self._event("response.output_item.added", output_index=self._index, item=item))
        if not isinstance(item, OutputCall):
            part = OutputTextPart("", [], []) if isinstance(item, OutputMessage) else ReasoningPart("")
            found.append(self._event("response.content_part.added", **self._place, content_index=0, part=part))
        return found

    def _close(self, status: Status) -> list[Json]:
        if (item := self._open) is None:
            return []
        place = self._place
        if isinstance(item, OutputCall):
            item = replace_fields(item, arguments=self._written, status=status)
            done = [("function_call_arguments.done", {"arguments": self._written, "name": item.name})]
        else:
            place |= {"content_index": 0}
            text: Json = {"text": self._written}
            if isinstance(item, OutputMessage):
                kind, text["logprobs"] = "output_text", self._logprobs
                part: Any = OutputTextPart(self._written, [], self._logprobs)
            else:
                kind, part = "reasoning_text", ReasoningPart(self._written)
            item = replace_fields(item, content=[part], status=status)
            done = [(f"{kind}.done", text), ("content_part.done", {"part": part})]
        self._open = None
        found = [self._event(f"response.{name}", **place, **fields) for name, fields in done]
        return [*found, self._event("response.output_item.done", output_index=self._index, item=item)]

    def _end(self, result: GenerationResult) -> list[Json]:
        whole = self.whole([result])
        found = [] if self._index >= 0 else self._begin(self._message("in_progress", []))
        found += self._close("incomplete" if whole.status == "incomplete" else "completed")
        return [*found, self._event(f"response.{whole.status}", response=with_warnings(whole, self._warnings))]

    @property
    def _place(self) -> Json:
        assert self._open is not None
        return {"item_id": self._open.id, "output_index": self._index}

    def _delta(self, name: str, text: str, **fields: Any) -> Json:
        self._written += text
        return self._event(name, **self._place, delta=text, **fields)

    def _event(self, kind: str, /, **fields: Any) -> Json:
        found = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return found


def _usage(result: GenerationResult) -> ResponseUsage:
    return ResponseUsage(
        result.prompt_tokens,
        InputDetails(result.reused_tokens, 0),
        result.generated_tokens,
        OutputDetails(result.reasoning_tokens),
        result.prompt_tokens + result.generated_tokens,
    )


class ResponseInputTokens(Output, tag_field="object", tag="response.input_tokens"):
    input_tokens: Count
