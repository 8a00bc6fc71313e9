"""How a route of OpenAI's answers: the whole at its end, or a stream of chunks. What they look like is its `Shape`."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from infer.outputs import GenerationResult, TokenLogprob
from infer.server.asking import while_connected
from infer.server.call import call_of
from infer.server.choices import Choices, Part
from infer.server.refusals import refuse
from infer.server.schema import CompletingBody, ResponseBody, StreamOptions
from infer.server.shapes import Head, Json
from infer.server.sse import DONE, EventStream, event
from infer.server.state import ServerState

Scores = Sequence[TokenLogprob | None]  # of a prompt's tokens


class Shape(Protocol):
    """Pure, but that `chunk` counts what it was given."""

    def whole(self, results: Sequence[GenerationResult]) -> Json: ...

    def opening(self) -> list[Json]:
        """The chunks before anything is generated."""

    def chunk(self, part: Part) -> Json | None:
        """None where there is nothing to tell yet."""

    def closing(self, results: Sequence[GenerationResult]) -> list[Json]:
        """The chunks after all have ended."""


async def reply(request: Request, state: ServerState, choices: Choices, shape: Shape, *, is_streamed: bool) -> Response:
    if is_streamed:
        return EventStream(_events(choices, shape), comment_seconds=state.settings.comment_seconds)
    results = await while_connected(request, choices.results())
    return json_response(shape.whole(results))


def make_head(prefix: str, request: Request, state: ServerState) -> Head:
    """Its id is the request's, which the log has too."""
    call, loaded = call_of(request), state.loaded
    assert loaded is not None
    number, fingerprint = call.id.removeprefix("req-"), loaded.llm.system_fingerprint
    return Head(prefix + number, call.created, call.model, fingerprint)


def json_response(body: Json) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


async def score_prompts(
    request: Request, state: ServerState, prompts: Sequence[Sequence[int]], num: int | None
) -> list[Scores]:
    """How likely each token of each prompt is, beside the `num` likeliest; nothing where that is None."""
    if num is None:
        return [() for _ in prompts]
    llm = state.llm()
    return [await while_connected(request, llm.prompt_logprobs(prompt, num=num)) for prompt in prompts]


def check_stream_options(body: CompletingBody | ResponseBody) -> bool:
    """Whether usage is asked for apart. Raises ApiError."""
    if (options := body.stream_options) is None:
        return False
    if not body.stream:
        message = "stream_options is for streams: leave it out or set stream to true"
        raise refuse(message, "stream_options")
    if options.include_obfuscation:
        param = "stream_options.include_obfuscation"
        raise refuse(f"{param} must not be true: chunks are not padded", param, "unsupported_value")
    return isinstance(options, StreamOptions) and bool(options.include_usage)


async def _events(choices: Choices, shape: Shape) -> AsyncGenerator[bytes, None]:
    results: dict[int, GenerationResult] = {}
    for chunk in shape.opening():
        yield _event(chunk)
    async with aclosing(choices.parts()) as parts:
        async for part in parts:
            if part.result is not None:
                results[part.choice] = part.result
            if (found := shape.chunk(part)) is not None:
                yield _event(found)
    for chunk in shape.closing([results[index] for index in sorted(results)]):
        yield _event(chunk)
    yield DONE


def _event(chunk: Any) -> bytes:
    return event(msgspec.json.encode(chunk))
