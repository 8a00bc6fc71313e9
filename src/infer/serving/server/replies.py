"""Answers of all protocols: whole at the end, or as a stream of chunks. A `ReplyFormat` defines their format."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from infer.outputs import GenerationResult, TokenLogprob
from infer.serving.protocols.bodies import CompletingBody
from infer.serving.server.answer_types import Answer, AnswerHead, Extension, Json, Usage
from infer.serving.server.asking import while_connected
from infer.serving.server.call import Call, call_of
from infer.serving.server.choices import ChoicePart, Choices
from infer.serving.server.endpoint import EVENTS
from infer.serving.server.http_errors import ApiError
from infer.serving.server.server_state import ServerState
from infer.serving.server.sse import DONE, EventStream, event, failure_events

_Answer = TypeVar("_Answer", bound=Answer)
Scores = Sequence[TokenLogprob | None]  # one entry per token of a prompt


class StreamUsage(NamedTuple):
    """The chunks of a stream that contain the usage: an additional last one, or every chunk."""

    is_last: bool = False
    is_in_each: bool = False

    @classmethod
    def of(cls, body: CompletingBody) -> "StreamUsage":
        if (options := body.stream_options) is None:
            return cls()
        return cls(bool(options.include_usage), bool(options.continuous_usage_stats))

    def after(self, num_prompt_tokens: int, num_completion_tokens: int) -> Usage | UnsetType | None:
        """Return the usage field of a chunk after this many tokens."""
        if not self.is_in_each:
            return None if self.is_last else UNSET
        return Usage(num_prompt_tokens, num_completion_tokens, num_prompt_tokens + num_completion_tokens)


Chunk = Answer | Json  # a dict is an event whose `type` is also its name


class ReplyFormat(ABC):
    """The format of an answer and of its stream, which has this media type. `last` ends a stream."""

    last, media_type = DONE, EVENTS

    @abstractmethod
    def whole(self, results: Sequence[GenerationResult]) -> Answer | Sequence[Answer]: ...

    @abstractmethod
    def chunks(self, part: ChoicePart) -> Sequence[Chunk]:
        """Return the chunks of a part. They may depend on the parts before it."""

    def opening(self) -> Sequence[Chunk]:
        """Return the chunks that precede all generated parts."""
        return ()

    def closing(self, results: Sequence[GenerationResult]) -> Sequence[Chunk]:
        """Return the chunks that follow after all choices have ended."""
        return ()

    def event(self, chunk: Chunk) -> bytes:
        """Return the bytes of a chunk in the stream."""
        return event(msgspec.json.encode(chunk), chunk["type"] if isinstance(chunk, dict) else "")

    def fail(self, error: ApiError) -> bytes:
        """Return the last events of a stream that fails."""
        return failure_events(error)


async def reply(
    request: Request, state: ServerState, choices: Choices, shape: ReplyFormat, *, is_streamed: bool | None
) -> Response:
    call = call_of(request)
    if is_streamed:
        events = _events(choices, shape, call)
        seconds = state.settings.comment_seconds
        return EventStream(events, comment_seconds=seconds, fail=shape.fail, media_type=shape.media_type)
    results = await while_connected(request, choices.results())
    return json_response(shape.whole(results), call)


def make_head(prefix: str, request: Request, state: ServerState) -> AnswerHead:
    """Return the head of an answer. Its id is the request's id, which also appears in the log."""
    call, loaded = call_of(request), state.loaded
    assert loaded is not None
    number, fingerprint = call.id.removeprefix("req-"), loaded.llm.system_fingerprint
    return AnswerHead(prefix + number, call.created, call.model, fingerprint)


def json_response(answer: Any, call: Call | None = None, status: int = 200) -> Response:
    """Return the answer as JSON. With a call, it must be an `Answer`, which gets the call's warnings, or a list."""
    found = answer if call is None or isinstance(answer, list) else with_warnings(answer, call)
    return Response(msgspec.json.encode(found), status, media_type="application/json")


def with_warnings(answer: _Answer, call: Call) -> _Answer:
    """Add the call's warnings, if any, to the answer, and return it."""
    if call.warnings:
        answer.infer = Extension() if answer.infer is UNSET else answer.infer
        answer.infer.warnings = call.warnings
    return answer


async def score_prompts(
    request: Request, state: ServerState, prompts: Sequence[Sequence[int]], num: int | None
) -> list[Scores]:
    """Return the log-probability of each token of each prompt, with the `num` likeliest tokens.

    If `num` is None, the scores are empty.
    """
    if num is None:
        return [() for _ in prompts]
    llm = state.llm()
    return [await while_connected(request, llm.prompt_logprobs(prompt, num=num)) for prompt in prompts]


async def _events(choices: Choices, shape: ReplyFormat, call: Call) -> AsyncGenerator[bytes, None]:
    results: dict[int, GenerationResult] = {}
    for chunk in shape.opening():
        yield shape.event(chunk)
    async with aclosing(choices.parts()) as parts:
        async for part in parts:
            for chunk in shape.chunks(part):
                yield shape.event(chunk if part.result is None else _warned(chunk, call))
            if part.result is not None:
                results[part.choice] = part.result
    for chunk in shape.closing([results[index] for index in sorted(results)]):
        yield shape.event(_warned(chunk, call))
    if shape.last:
        yield shape.last


def _warned(chunk: Chunk, call: Call) -> Chunk:
    """Add the call's warnings, if any, to a chunk that can hold them, and return it."""
    return chunk if isinstance(chunk, dict) else with_warnings(chunk, call)
