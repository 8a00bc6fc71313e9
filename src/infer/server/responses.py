"""`/v1/responses`: a conversation answered as one message, whole or in named events. Nothing is kept."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from infer.batch_file.openai_logprobs import Spelling, chat_entries, without_end
from infer.outputs import FinishReason, GenerationResult, TokenLogprob
from infer.sampling_params import SamplingParams
from infer.server.asked import constraint_of, make_options, make_params, sampling_values, seeds_of, text_of
from infer.server.asking import while_connected
from infer.server.choices import Asked, Choices, Part, accept
from infer.server.endpoint import ApiRoute
from infer.server.errors import ApiError
from infer.server.models import check_model
from infer.server.read_body import read_body
from infer.server.refusals import refuse
from infer.server.replies import check_stream_options, json_response, make_head
from infer.server.schema import InputMessage, ResponseBody
from infer.server.shapes import FINISH_REASONS, Head, Json, extension, logprobs_of
from infer.server.sse import EventStream, event
from infer.server.state import ServerState

_LOGPROBS = "message.output_text.logprobs"


async def respond(request: Request, state: ServerState) -> Response:
    llm = state.llm().llm
    body = read_body(await request.body(), ResponseBody)
    check_model(request, state, body.model)
    asked = ask(body, llm.sampling_defaults)
    choices = await accept(request, state, asked)
    head = make_head("resp_", request, state)
    shape = ResponseShape(head, body, asked.params[0], Spelling.of(llm.tokenizer))
    if not body.stream:
        (result,) = await while_connected(request, choices.results())
        return json_response(shape.whole(result))
    events = ResponseEvents(shape)
    return EventStream(events.of(choices), comment_seconds=state.settings.comment_seconds, fail=events.fail)


def ask(body: ResponseBody, defaults: Mapping[str, Any]) -> Asked:
    """Over the model's own `defaults`. Raises ApiError."""
    check_stream_options(body)
    values, has_logprobs = sampling_values(body), _LOGPROBS in (body.include or ())
    if body.top_logprobs and not has_logprobs:
        raise refuse(f'top_logprobs needs include: ["{_LOGPROBS}"]', "top_logprobs")
    if has_logprobs:
        values["logprobs"] = body.top_logprobs or 0
    if body.text is not None:
        values |= constraint_of(body.text.format)
    options = make_options(body)
    if body.truncation == "auto":
        options = replace(options, overflow="truncate_left")
    params = make_params(values, defaults, seeds_of(body.seed, 1), "input")
    return Asked([messages_of(body)], params, options, "input", {})


def messages_of(body: ResponseBody) -> list[dict[str, str]]:
    """As templates take them: the instructions are the first."""
    given = [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    first = [] if body.instructions is None else [InputMessage(role="system", content=body.instructions)]
    roles = {"developer": "system"}
    return [{"role": roles.get(each.role, each.role), "content": text_of(each.content)} for each in (*first, *given)]


@final
class ResponseShape:
    """Its one item is a message, whose one part is a text."""

    def __init__(self, head: Head, body: ResponseBody, params: SamplingParams, spelling: Spelling) -> None:
        self.item_id = head.id.replace("resp_", "msg_")
        self._spelling = spelling
        self._settings: Json = {
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "model": head.model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": _format_of(body)},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
        }

    def whole(self, result: GenerationResult) -> Json:
        is_cut = FINISH_REASONS[result.finish_reason] == "length"
        status = "incomplete" if is_cut else "completed"
        logprobs = self.logprobs(result.logprobs or (), result.finish_reason)
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {}
        return {
            **self.begun(status),
            **details,
            "output": [self.item(status, [self.part(result.text, logprobs)])],
            "usage": _usage(result),
            "infer": extension({0: result}),
        }

    def begun(self, status: str) -> Json:
        return {**self._settings, "status": status, "error": None, "incomplete_details": None, "output": []}

    def item(self, status: str, content: list[Json]) -> Json:
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def part(self, text: str, logprobs: list[Json]) -> Json:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def logprobs(self, logprobs: Sequence[TokenLogprob], finish_reason: FinishReason | None) -> list[Json]:
        entries = chat_entries(without_end(logprobs, finish_reason), self._spelling)
        for entry in (each for outer in entries for each in (outer, *outer["top_logprobs"])):
            entry["bytes"] = entry["bytes"] or []  # here they may not be null
        return entries


@final
class ResponseEvents:
    """A stream's events, numbered."""

    def __init__(self, shape: ResponseShape) -> None:
        self._shape, self._number = shape, 0
        self._place = {"item_id": shape.item_id, "output_index": 0, "content_index": 0}

    async def of(self, choices: Choices) -> AsyncGenerator[bytes, None]:
        shape = self._shape
        yield self._event("response.created", response=shape.begun("in_progress"))
        yield self._event("response.in_progress", response=shape.begun("in_progress"))
        yield self._event("response.output_item.added", output_index=0, item=shape.item("in_progress", []))
        yield self._event("response.content_part.added", **self._place, part=shape.part("", []))
        async with aclosing(choices.parts()) as parts:
            async for part in parts:
                if (delta := self._delta(part)) is not None:
                    yield delta
                if part.result is not None:
                    for each in self._end(part.result):
                        yield each

    def fail(self, error: ApiError) -> bytes:
        failed = self._shape.begun("failed") | {"error": {"code": "server_error", "message": error.message}}
        return self._event("response.failed", response=failed)

    def _delta(self, part: Part) -> bytes | None:
        last = part.pieces[-1].finish_reason if part.pieces else None
        entries = self._shape.logprobs(logprobs_of(part.pieces), last)
        if not (part.text or entries):
            return None
        return self._event("response.output_text.delta", **self._place, delta=part.text, logprobs=entries)

    def _end(self, result: GenerationResult) -> list[bytes]:
        whole = self._shape.whole(result)
        (item,) = whole["output"]
        (part,) = item["content"]
        done = {"text": part["text"], "logprobs": part["logprobs"]}
        return [
            self._event("response.output_text.done", **self._place, **done),
            self._event("response.content_part.done", **self._place, part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{whole['status']}", response=whole),
        ]

    def _event(self, name: str, **fields: Any) -> bytes:
        body = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return event(msgspec.json.encode(body), name)


def _format_of(body: ResponseBody) -> Any:
    asked = None if body.text is None else body.text.format
    given = {"type": "text"} if asked is None else msgspec.to_builtins(asked)
    return {name: value for name, value in given.items() if value is not None}


def _usage(result: GenerationResult) -> Json:
    return {
        "input_tokens": result.prompt_tokens,
        "input_tokens_details": {"cached_tokens": result.reused_tokens, "cache_write_tokens": 0},
        "output_tokens": result.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": result.prompt_tokens + result.generated_tokens,
    }


ROUTES = [ApiRoute("POST", "/v1/responses", respond, operation="chat")]
