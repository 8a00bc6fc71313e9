"""Answers on OpenAI's routes: whole at the end, or as a stream of chunks. A `Shape` defines their format."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from infer.outputs import GenerationResult, TokenLogprob
from infer.server.answer_types import Head, Json
from infer.server.asking import while_connected
from infer.server.call import Call, call_of
from infer.server.choices import Choices, Part
from infer.server.schema import CompletingBody
from infer.server.server_state import ServerState
from infer.server.sse import DONE, EventStream, event

Scores = Sequence[TokenLogprob | None]  # of a prompt's tokens


class StreamUsage(NamedTuple):
    """The chunks of a stream that hold the usage: an additional last one, or each chunk."""

    is_last: bool = False
    is_in_each: bool = False

    @classmethod
    def of(cls, body: CompletingBody) -> "StreamUsage":
        if (options := body.stream_options) is None:
            return cls()
        return cls(bool(options.include_usage), bool(options.continuous_usage_stats))

    def field(self, num_prompt_tokens: int, num_completion_tokens: int) -> Json:
        """Return the usage field of a chunk after this many tokens."""
        if not self.is_in_each:
            return {"usage": None} if self.is_last else {}
        total = num_prompt_tokens + num_completion_tokens
        counts = {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_completion_tokens}
        return {"usage": counts | {"total_tokens": total}}


class Shape(Protocol):
    """The format of an answer. Its methods have no side effects, except that `chunk` counts the tokens of its parts."""

    def whole(self, results: Sequence[GenerationResult]) -> Json: ...

    def opening(self) -> list[Json]:
        """Return the chunks that precede all generated parts."""

    def chunk(self, part: Part) -> Json | None:
        """Return the chunk of a part, or None if there is nothing to send yet."""

    def closing(self, results: Sequence[GenerationResult]) -> list[Json]:
        """Return the chunks that follow after all choices have ended."""


async def reply(request: Request, state: ServerState, choices: Choices, shape: Shape, *, is_streamed: bool) -> Response:
    call = call_of(request)
    if is_streamed:
        return EventStream(_events(choices, shape, call), comment_seconds=state.settings.comment_seconds)
    results = await while_connected(request, choices.results())
    return json_response(shape.whole(results), call)


def make_head(prefix: str, request: Request, state: ServerState) -> Head:
    """Return the head of an answer. Its id is the request's id, which also appears in the log."""
    call, loaded = call_of(request), state.loaded
    assert loaded is not None
    number, fingerprint = call.id.removeprefix("req-"), loaded.llm.system_fingerprint
    return Head(prefix + number, call.created, call.model, fingerprint)


def json_response(body: Json, call: Call | None = None) -> Response:
    """Return the body as JSON, with the warnings of its call."""
    return Response(msgspec.json.encode(with_warnings(body, call)), media_type="application/json")


def with_warnings(body: Json, call: Call | None) -> Json:
    """Return the body with the call's warnings, if any, under `infer`."""
    if call is None or not call.warnings:
        return body
    return body | {"infer": {**body.get("infer", {}), "warnings": call.warnings}}


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


async def _events(choices: Choices, shape: Shape, call: Call) -> AsyncGenerator[bytes, None]:
    results: dict[int, GenerationResult] = {}
    for chunk in shape.opening():
        yield _event(chunk)
    async with aclosing(choices.parts()) as parts:
        async for part in parts:
            if part.result is not None:
                results[part.choice] = part.result
            if (found := shape.chunk(part)) is not None:
                yield _event(found if part.result is None else with_warnings(found, call))
    for chunk in shape.closing([results[index] for index in sorted(results)]):
        yield _event(with_warnings(chunk, call))
    yield DONE


def _event(chunk: Any) -> bytes:
    return event(msgspec.json.encode(chunk))
