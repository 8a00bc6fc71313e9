"""`/v1/trace` and `/v1/branch`: how the tokens of one answer were sampled, and an answer that goes on from one of them.

A trace shows a generated or given answer, and how each of its tokens was sampled, stage by stage. A branch continues an
answer from one of its tokens, or with another token in its place. With the answer's own parameters and seed, it equals
the answer bit by bit up to that place. Without another token, it equals the whole answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, final

from msgspec import UNSET, Meta, Struct, UnsetType

from infer.engine.requests.ask import Ask
from infer.outputs import GenerationResult, SampleTrace, TraceCandidate, TraceStage
from infer.request_limits import MAX_CANDIDATES, MAX_TOKENS, MAX_TRACED, NUM_CANDIDATES, NUM_TOKENS_OF_COMPLETIONS
from infer.serving.protocols.bodies import Served, refuse_unless_neutral, refusing
from infer.serving.protocols.events import Accepted, Bytes, Count, Delta, Json, Output, Shape, StopReason
from infer.serving.protocols.fields import TokenId, refuse
from infer.serving.protocols.openai.ask import (
    CompletingBody,
    ConversationBody,
    Message,
    conversation_options,
    messages_of,
    template_variables,
)
from infer.serving.protocols.openai.events import (
    CalledTool,
    ChatFinishReason,
    HeadedOutput,
    Usage,
    finish_reason_of,
    usage_of,
)
from infer.serving.server.endpoint import ApiRequest, post
from infer.serving.server.routes.protocols import accept, answering, served_by

# Fields of the completions that have no meaning here, with their neutral values.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {"n": (1,), "prompt_logprobs": (), "return_token_ids": (True,)}


_OF_MESSAGES = [name for name in ConversationBody.__struct_fields__ if name not in CompletingBody.__struct_fields__]


class OneChoiceBody(ConversationBody, kw_only=True):
    """A request for one answer: either `prompt` or `messages`, with the fields that belong to it."""

    prompt: str | list[TokenId] | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None


def ask_one(body: OneChoiceBody, served: Served, answer_prefix: tuple[int, ...] = ()) -> Ask:
    """Return what a body asks. Raises BodyError."""
    refuse_unless_neutral(body, _NEUTRAL)
    prompt_name, values = "prompt" if body.messages is None else "messages", body.sampling_values()
    params = served.params(values, body.seed, prompt_name, max_new_tokens=NUM_TOKENS_OF_COMPLETIONS)
    options = conversation_options(body, body.reasoning_effort, answer_prefix=answer_prefix)
    if (body.prompt is None) == (body.messages is None):
        code = "missing_required_parameter" if body.prompt is None else "invalid_value"
        raise refuse("give one of prompt and messages", "prompt", code)
    if body.messages is not None:
        variables = template_variables(body, served.llm.tokenizer.chat_template)
        return Ask([messages_of(body.messages)], params, options, variables=variables, prompt_name="messages")
    for name in _OF_MESSAGES:
        if getattr(body, name) is not None:
            raise refuse(f"{name} belongs to messages: leave it out", name)
    return Ask([body.prompt], params, options)


def end_of(result: GenerationResult) -> Json:
    """Return the fields of an answer, or of its last chunk, that are known at its end."""
    return {
        "finish_reason": finish_reason_of(result),
        "stop_reason": result.stop_reason,
        "seed": result.seed,
        "usage": usage_of([result], 1),
    }


def reasoning_and_calls(result: GenerationResult) -> Json:
    """Return the reasoning and the calls of the answer's message, if it has them."""
    message = result.to_message()
    return {name: message[name] for name in ("reasoning_content", "tool_calls") if name in message}


@final
class TraceBody(OneChoiceBody, kw_only=True):
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


class Trace(Output, kw_only=True, tag_field="object", tag="trace"):
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


async def trace(request: ApiRequest, body: TraceBody) -> Trace:
    llm, given = request.server.llm(), body.answer_token_ids
    served = served_by(request, body)
    if body.stream:
        raise refuse("stream must not be true: a trace is not streamed", "stream", "unsupported_value")
    asked = ask_one(body, served)
    part = _part_of(body)
    choices = await accept(request, asked if given is None else replace(asked, is_answered=False))
    prompted = choices.firsts[0].request
    prompt_ids = list(prompted.prompt_token_ids)
    if given is None:
        (result,) = await request.while_connected(choices.results())
        answer, facts = result.token_ids, {"text": result.text, **reasoning_and_calls(result), **end_of(result)}
    else:
        answer, facts = given, {"seed": asked.params[0].seed}
        _check_answer(given, len(prompt_ids), llm.host.requests.limits.vocab_size, llm.host.model.max_seq_len)
    num = body.num_candidates or NUM_CANDIDATES
    with refusing("answer_token_ids"):
        tracing = llm.trace_answer(prompted, answer, num_candidates=num, **part)
        traces = await request.while_connected(tracing)
    spelling = llm.llm.tokenizer.token_bytes
    return Trace(
        model=served.model,
        prompt_token_ids=prompt_ids,
        prompt_bytes=[list(spelling[each]) for each in prompt_ids],
        tokens=[_token(each, list(spelling[each.token_id])) for each in traces],
        token_ids=answer,
        **facts,
    )


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


@final
class BranchBody(OneChoiceBody, kw_only=True):
    """The answer's tokens, the number of tokens to keep, and the next token, which is sampled if `token_id` is None."""

    answer_token_ids: list[TokenId]
    position: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    token_id: TokenId | None = None

    def ask(self, served: Served) -> Ask:
        """Return what the body asks. Raises BodyError."""
        if self.position > len(self.answer_token_ids):
            rule = f"at most {len(self.answer_token_ids)}, the length of answer_token_ids"
            raise refuse(f"position must be {rule}, got {self.position}", "position")
        own = () if self.token_id is None else (self.token_id,)
        return ask_one(self, served, (*self.answer_token_ids[: self.position], *own))


class BranchFields(HeadedOutput, kw_only=True):
    """The fields of a branch and of its chunks. `num_given` of its tokens were not sampled."""

    text: str
    reasoning_content: str | UnsetType = UNSET
    token_ids: list[Count]
    token_bytes: list[Bytes]
    num_given: Count


class Branch(BranchFields, kw_only=True, tag_field="object", tag="branch"):
    """The whole branch."""

    tool_calls: list[CalledTool] | UnsetType = UNSET
    finish_reason: ChatFinishReason
    stop_reason: StopReason
    seed: int | None
    usage: Usage


class BranchChunk(BranchFields, kw_only=True, tag_field="object", tag="branch.chunk"):
    tool_calls: list[Json] | UnsetType = UNSET
    token_origins: list[str]
    finish_reason: ChatFinishReason | None = None
    stop_reason: StopReason | UnsetType = UNSET
    seed: int | UnsetType | None = UNSET
    usage: Usage | UnsetType = UNSET


@final
class BranchShape(Shape):
    """The text and the tokens of the whole branch; `num_given` of its tokens were not sampled."""

    body, answer = BranchBody, Branch

    def __init__(self, accepted: Accepted, body: BranchBody) -> None:
        self._fields = accepted.head("branch-")._asdict() | {"num_given": len(accepted.ask.options.answer_prefix)}
        self._spelling = accepted.served.llm.tokenizer.token_bytes

    def whole(self, results: Sequence[GenerationResult]) -> Branch:
        (result,) = results
        return Branch(
            **self._fields,
            text=result.text,
            **reasoning_and_calls(result),
            token_ids=result.token_ids,
            token_bytes=[list(self._spelling[each]) for each in result.token_ids],
            **end_of(result),
        )

    def chunks(self, part: Delta) -> list[BranchChunk]:
        columns = part.token_columns(self._spelling)
        end = {} if part.result is None else end_of(part.result)
        return [BranchChunk(**self._fields, text=part.text, **part.fields(), **columns, **end)]


ROUTES = [
    post("/v1/trace", trace, "Record how an answer is sampled", TraceBody, Trace, "trace"),
    answering("/v1/branch", "Continue an answer from a token", BranchShape, "branch"),
]
