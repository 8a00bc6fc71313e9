"""`/v1/branch`: continue an answer from one of its tokens, or with another token in its place.

With the answer's own parameters and seed, the branch equals the answer bit by bit up to that place. Without another
token, it equals the whole answer.
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, final

from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from infer.outputs import GenerationResult
from infer.request_limits import MAX_TOKENS
from infer.serving.protocols.chat_answers import delta_fields, reasoning_and_calls
from infer.serving.protocols.chat_messages import complete_chat
from infer.serving.protocols.declared_fields import TokenId
from infer.serving.protocols.refusals import refuse
from infer.serving.server.answer_types import (
    AnswerHead,
    Bytes,
    CalledTool,
    ChatFinishReason,
    Count,
    HeadedAnswer,
    Json,
    StopReason,
    Usage,
    token_columns,
)
from infer.serving.server.choices import ChoicePart, accept
from infer.serving.server.endpoint import post
from infer.serving.server.replies import ReplyFormat, make_head, reply
from infer.serving.server.routes.one_answer import OneAnswerBody, ask_one, end_of
from infer.serving.server.routes.served_models import answer_any_model
from infer.serving.server.server_state import ServerState


@final
class BranchBody(OneAnswerBody, kw_only=True):
    """The answer's tokens, the number of tokens to keep, and the next token, which is sampled if `token_id` is None."""

    answer_token_ids: list[TokenId]
    position: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    token_id: TokenId | None = None


async def branch(request: Request, state: ServerState, body: BranchBody) -> Response:
    llm = state.llm().llm
    answer_any_model(request, state, body.model)
    prefix = prefix_of(body)
    asked = ask_one(body, llm.sampling_defaults, llm.tokenizer.chat_template, prefix)
    choices = await accept(request, state, asked)
    shape = BranchShape(make_head("branch-", request, state), len(prefix), llm.tokenizer.token_bytes)
    return await reply(request, state, choices, shape, is_streamed=body.stream)


def prefix_of(body: BranchBody) -> list[int]:
    """Return the ids with which the branch begins. Raises ApiError."""
    if body.position > len(body.answer_token_ids):
        rule = f"at most {len(body.answer_token_ids)}, the length of answer_token_ids"
        raise refuse(f"position must be {rule}, got {body.position}", "position")
    return body.answer_token_ids[: body.position] + ([] if body.token_id is None else [body.token_id])


class BranchFields(HeadedAnswer, kw_only=True):
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
class BranchShape(ReplyFormat):
    """The text and the tokens of the whole branch; `num_given` of its tokens were not sampled."""

    def __init__(self, head: AnswerHead, num_given: int, spelling: Sequence[bytes]) -> None:
        self._fields = head._asdict() | {"num_given": num_given}
        self._spelling = spelling

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

    def chunks(self, part: ChoicePart) -> list[BranchChunk]:
        columns = token_columns(part.pieces, self._spelling)
        end = {} if part.result is None else end_of(part.result)
        return [BranchChunk(**self._fields, text=part.text, **delta_fields(part.deltas), **columns, **end)]


_of_chat = partial(post, complete=complete_chat)
ROUTES = [_of_chat("/v1/branch", branch, "Continue an answer from a token", BranchBody, Branch, "branch", streams=True)]
