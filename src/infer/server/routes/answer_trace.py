"""`/v1/trace`: a generated or given answer, and how each of its tokens was sampled, stage by stage."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, final

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from infer.batch_file.result_line import finish_reason_of
from infer.errors import InvalidRequestError
from infer.outputs import GenerationResult, SampleTrace
from infer.server.answer_types import Json, usage_of_choices
from infer.server.asked import refusal
from infer.server.asking import read_request, while_connected
from infer.server.call import call_of
from infer.server.chat_history import complete_chat
from infer.server.choices import Asked, accept
from infer.server.endpoint import ApiRoute
from infer.server.refusals import refuse
from infer.server.replies import json_response
from infer.server.routes.one_answer import OneAnswerBody, ask_one
from infer.server.routes.served_models import answer_any_model
from infer.server.routes.tokens import TokenId
from infer.server.server_state import ServerState
from infer.server.tool_fields import reasoning_and_calls

_MAX_TOKENS, _MAX_CANDIDATES = 256, 64
_NUM_CANDIDATES = 10  # unless asked for others


@final
class TraceBody(OneAnswerBody, kw_only=True):
    """A request for a trace.

    `answer_token_ids` is an existing answer, of which `num_tokens` tokens are traced from `position` on. It may differ
    from what the sampler gives.
    """

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    num_candidates: Annotated[int, Meta(ge=1, le=_MAX_CANDIDATES)] | None = None  # 10 unless given
    answer_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    position: Annotated[int, Meta(ge=0)] | None = None  # 0 unless given
    num_tokens: Annotated[int, Meta(ge=1, le=_MAX_TOKENS)] | None = None  # all unless given


async def trace(request: Request, state: ServerState) -> Response:
    body, llm = await read_request(request, state, TraceBody, complete_chat), state.llm()
    answer_any_model(request, state, body.model)
    if body.stream:
        raise refuse("stream must not be true: a trace is answered whole", "stream", "unsupported_value")
    asked = ask_one(body, llm.llm.sampling_defaults, llm.llm.tokenizer.chat_template)
    if body.answer_token_ids is None:
        return await _trace_generated(request, state, asked, body)
    return await _trace_given(request, state, asked, body, body.answer_token_ids)


async def _trace_generated(request: Request, state: ServerState, asked: Asked, body: TraceBody) -> Response:
    for name in ("position", "num_tokens"):
        if getattr(body, name) is not None:
            raise refuse(f"{name} belongs to answer_token_ids: leave it out", name)
    if (body.max_tokens or 0) > _MAX_TOKENS:
        raise refuse(f"max_tokens must be at most {_MAX_TOKENS}, got {body.max_tokens}", "max_tokens")
    llm, choices = state.llm(), await accept(request, state, asked)
    (result,), (prompt_ids,) = await while_connected(request, choices.results()), choices.prompt_ids
    num = body.num_candidates or _NUM_CANDIDATES
    tracing = llm.trace_answer(choices.first.sequence.request, result.token_ids, num_candidates=num)
    traces = await while_connected(request, tracing)
    found = trace_object(call_of(request).model, prompt_ids, traces, llm.llm.tokenizer.token_bytes)
    return json_response(found | _ended(result), call_of(request))


async def _trace_given(
    request: Request, state: ServerState, asked: Asked, body: TraceBody, answer: Sequence[int]
) -> Response:
    llm, position = state.llm(), body.position or 0
    if position >= len(answer):
        rule = f"below {len(answer)}, the length of answer_token_ids"
        raise refuse(f"position must be {rule}, got {position}", "position")
    last = min(position + (body.num_tokens or len(answer)), len(answer))
    if last - position > _MAX_TOKENS:
        raise refuse(f"at most {_MAX_TOKENS} tokens are traced at once: give num_tokens", "num_tokens")
    choices = await accept(request, state, replace(asked, is_answered=False))
    (prompt_ids,) = choices.prompt_ids
    _check_answer(answer, len(prompt_ids), llm.host.vocab_size, llm.host.model.max_seq_len)
    tracing = llm.trace_answer(
        choices.first.sequence.request,
        answer,
        first=position + 1,
        last=last,
        num_candidates=body.num_candidates or _NUM_CANDIDATES,
        is_given=True,
    )
    try:
        traces = await while_connected(request, tracing)
    except InvalidRequestError as error:
        raise refusal(error, "answer_token_ids") from error
    found = trace_object(call_of(request).model, prompt_ids, traces, llm.llm.tokenizer.token_bytes)
    return json_response(found | {"token_ids": list(answer), "seed": asked.params[0].seed}, call_of(request))


def _check_answer(answer: Sequence[int], num_prompt_tokens: int, vocab_size: int, max_seq_len: int) -> None:
    """Raise ApiError for an id outside the vocabulary, or if prompt and answer exceed the context."""
    for index, token_id in enumerate(answer):
        if token_id >= vocab_size:
            param = f"answer_token_ids[{index}]"
            raise refuse(f"{param} must be an id from 0 to {vocab_size - 1}, got {token_id}", param)
    if num_prompt_tokens + len(answer) > max_seq_len:
        message = f"the prompt's {num_prompt_tokens} tokens and the answer's {len(answer)} exceed {max_seq_len}"
        raise refuse(message, "answer_token_ids", "context_length_exceeded")


def trace_object(
    model: str, prompt_ids: Sequence[int], traces: Sequence[SampleTrace], spelling: Sequence[bytes]
) -> Json:
    """Return the trace.

    `prompt_bytes` and `bytes` are the bytes of tokens, because one character may span several tokens.
    """
    tokens = [
        {name: value for name, value in each.to_json().items() if name != "text_before"}
        | {"bytes": list(spelling[each.token_id])}
        for each in traces
    ]
    return {
        "object": "trace",
        "model": model,
        "prompt_token_ids": list(prompt_ids),
        "prompt_bytes": [list(spelling[each]) for each in prompt_ids],
        "tokens": tokens,
    }


def _ended(result: GenerationResult) -> Json:
    return {
        "text": result.text,
        **reasoning_and_calls(result),
        "token_ids": result.token_ids,
        "seed": result.seed,
        "finish_reason": finish_reason_of(result),
        "stop_reason": result.stop_reason,
        "usage": usage_of_choices([result], 1),
    }


ROUTES = [ApiRoute("POST", "/v1/trace", trace, operation="trace")]
