"""`/v1/trace`: a generated or given answer, and how each of its tokens was sampled, stage by stage."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, final

from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from infer.errors import InvalidRequestError
from infer.outputs import SampleTrace, TraceCandidate, TraceStage
from infer.request_limits import MAX_CANDIDATES, MAX_TOKENS, MAX_TRACED, NUM_CANDIDATES
from infer.serving.protocols.chat_answers import reasoning_and_calls
from infer.serving.protocols.chat_messages import complete_chat
from infer.serving.protocols.declared_fields import TokenId
from infer.serving.protocols.params import refusal
from infer.serving.protocols.refusals import refuse
from infer.serving.server.answer_types import Answer, Bytes, CalledTool, ChatFinishReason, Count, StopReason, Usage
from infer.serving.server.asking import while_connected
from infer.serving.server.call import call_of
from infer.serving.server.choices import accept
from infer.serving.server.endpoint import post
from infer.serving.server.replies import json_response
from infer.serving.server.routes.one_answer import OneAnswerBody, ask_one, end_of
from infer.serving.server.routes.served_models import answer_any_model
from infer.serving.server.server_state import ServerState


@final
class TraceBody(OneAnswerBody, kw_only=True):
    """A request for a trace.

    `answer_token_ids` is an existing answer, of which `num_tokens` tokens are traced from `position` on. It may differ
    from the tokens that the sampler would choose.
    """

    num_candidates: Annotated[int, Meta(ge=1, le=MAX_CANDIDATES)] | None = None  # the default is 10
    answer_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    position: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None  # the default is 0
    num_tokens: Annotated[int, Meta(ge=1, le=MAX_TRACED)] | None = None  # the default is all


class TracedToken(Struct):
    """The record of how one token was sampled. Its text may be a part of a character, so it has its bytes, too."""

    stages: Sequence[TraceStage]
    candidates: Sequence[TraceCandidate]
    token_id: Count
    position: Count
    step: Count
    seed: int | None
    bytes: Bytes


class Trace(Answer, kw_only=True, tag_field="object", tag="trace"):
    """The trace of an answer. The fields from `text` to `usage` exist only if the answer was generated."""

    model: str
    prompt_token_ids: list[Count]
    prompt_bytes: list[Bytes]
    tokens: list[TracedToken]
    text: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET
    token_ids: list[Count]
    seed: int | None
    finish_reason: ChatFinishReason | UnsetType = UNSET
    stop_reason: StopReason | UnsetType = UNSET
    usage: Usage | UnsetType = UNSET


async def trace(request: Request, state: ServerState, body: TraceBody) -> Response:
    llm, given = state.llm(), body.answer_token_ids
    answer_any_model(request, state, body.model)
    if body.stream:
        raise refuse("stream must not be true: a trace is not streamed", "stream", "unsupported_value")
    asked = ask_one(body, llm.llm.sampling_defaults, llm.llm.tokenizer.chat_template)
    part = _part_of(body)
    choices = await accept(request, state, asked if given is None else replace(asked, is_answered=False))
    (prompt_ids,) = choices.prompt_ids
    if given is None:
        (result,) = await while_connected(request, choices.results())
        answer, facts = result.token_ids, {"text": result.text, **reasoning_and_calls(result), **end_of(result)}
    else:
        answer, facts = given, {"seed": asked.params[0].seed}
        _check_answer(given, len(prompt_ids), llm.host.requests.limits.vocab_size, llm.host.model.max_seq_len)
    num = body.num_candidates or NUM_CANDIDATES
    try:
        tracing = llm.trace_answer(choices.first.sequence.request, answer, num_candidates=num, **part)
        traces = await while_connected(request, tracing)
    except InvalidRequestError as error:
        raise refusal(error, "answer_token_ids") from error
    call, spelling = call_of(request), llm.llm.tokenizer.token_bytes
    found = Trace(
        model=call.model,
        prompt_token_ids=prompt_ids,
        prompt_bytes=[list(spelling[each]) for each in prompt_ids],
        tokens=[_token(each, list(spelling[each.token_id])) for each in traces],
        token_ids=answer,
        **facts,
    )
    return json_response(found, call)


def _part_of(body: TraceBody) -> dict[str, Any]:
    """Return the part of the answer to trace, as arguments of `trace_answer`. Raises ApiError."""
    if body.answer_token_ids is None:
        for name in ("position", "num_tokens"):
            if getattr(body, name) is not None:
                raise refuse(f"{name} belongs to answer_token_ids: leave it out", name)
        if (body.max_tokens or 0) > MAX_TRACED:
            raise refuse(f"max_tokens must be at most {MAX_TRACED}, got {body.max_tokens}", "max_tokens")
        return {}
    position, length = body.position or 0, len(body.answer_token_ids)
    if position >= length:
        raise refuse(f"position must be below {length}, the length of answer_token_ids, got {position}", "position")
    last = min(position + (body.num_tokens or length), length)
    if last - position > MAX_TRACED:
        raise refuse(f"at most {MAX_TRACED} tokens can be traced: give num_tokens", "num_tokens")
    return {"first": position + 1, "last": last, "is_given": True}


def _check_answer(answer: Sequence[int], num_prompt_tokens: int, vocab_size: int, max_seq_len: int) -> None:
    """Raise ApiError for an id outside the vocabulary, or if prompt and answer exceed the context."""
    for index, token_id in enumerate(answer):
        if token_id >= vocab_size:
            param = f"answer_token_ids[{index}]"
            raise refuse(f"{param} must be an id from 0 to {vocab_size - 1}, got {token_id}", param)
    if num_prompt_tokens + len(answer) > max_seq_len:
        message = f"prompt and answer must have at most {max_seq_len} tokens, got {num_prompt_tokens} and {len(answer)}"
        raise refuse(message, "answer_token_ids", "context_length_exceeded")


def _token(each: SampleTrace, spelling: Bytes) -> TracedToken:
    return TracedToken(each.stages, each.candidates, each.token_id, each.position, each.step, each.seed, spelling)


ROUTES = [
    post("/v1/trace", trace, "Record how an answer is sampled", TraceBody, Trace, "trace", complete=complete_chat)
]
