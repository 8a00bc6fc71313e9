"""`/v1/branch`: continue an answer from one of its tokens, or with another token in its place.

With the answer's own parameters and seed, the branch equals the answer bit by bit up to that place. Without another
token, it equals the whole answer.
"""

from collections.abc import Sequence
from typing import Annotated, final

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from infer.batch_file.result_line import finish_reason_of
from infer.outputs import GenerationResult
from infer.server.answer_types import Head, Json, token_columns, usage_of_choices
from infer.server.asking import read_request
from infer.server.chat_history import complete_chat
from infer.server.choices import Part, accept
from infer.server.endpoint import ApiRoute
from infer.server.refusals import refuse
from infer.server.replies import make_head, reply
from infer.server.routes.one_answer import OneAnswerBody, ask_one
from infer.server.routes.served_models import answer_any_model
from infer.server.routes.tokens import TokenId
from infer.server.server_state import ServerState
from infer.server.tool_fields import delta_fields, reasoning_and_calls


@final
class BranchBody(OneAnswerBody, kw_only=True):
    """The answer's tokens, the number of those that stay, and the next token. Without `token_id`, that is sampled."""

    answer_token_ids: list[TokenId]
    position: Annotated[int, Meta(ge=0)]
    token_id: TokenId | None = None


async def branch(request: Request, state: ServerState) -> Response:
    body, llm = await read_request(request, state, BranchBody, complete_chat), state.llm().llm
    answer_any_model(request, state, body.model)
    prefix = prefix_of(body)
    asked = ask_one(body, llm.sampling_defaults, llm.tokenizer.chat_template, prefix)
    choices = await accept(request, state, asked)
    shape = BranchShape(make_head("branch-", request, state), len(prefix), llm.tokenizer.token_bytes)
    return await reply(request, state, choices, shape, is_streamed=bool(body.stream))


def prefix_of(body: BranchBody) -> list[int]:
    """Return the ids with which the branch begins. Raises ApiError."""
    if body.position > len(body.answer_token_ids):
        rule = f"at most {len(body.answer_token_ids)}, the length of answer_token_ids"
        raise refuse(f"position must be {rule}, got {body.position}", "position")
    return body.answer_token_ids[: body.position] + ([] if body.token_id is None else [body.token_id])


@final
class BranchShape:
    """The text and the tokens of the whole branch; `num_given` of its tokens were not sampled."""

    def __init__(self, head: Head, num_given: int, spelling: Sequence[bytes]) -> None:
        self._head, self._num_given, self._spelling = head, num_given, spelling

    def whole(self, results: Sequence[GenerationResult]) -> Json:
        (result,) = results
        return {
            **self._head.to_json("branch"),
            "text": result.text,
            **reasoning_and_calls(result),
            "token_ids": result.token_ids,
            "token_bytes": [list(self._spelling[each]) for each in result.token_ids],
            "num_given": self._num_given,
            **_end(result),
        }

    def opening(self) -> list[Json]:
        return []

    def chunk(self, part: Part) -> Json | None:
        chunk = {
            **self._head.to_json("branch.chunk"),
            "text": part.text,
            **delta_fields(part.deltas),
            **token_columns(part.pieces, self._spelling),
            "num_given": self._num_given,
        }
        return chunk | ({"finish_reason": None} if part.result is None else _end(part.result))

    def closing(self, results: Sequence[GenerationResult]) -> list[Json]:
        return []


def _end(result: GenerationResult) -> Json:
    return {
        "finish_reason": finish_reason_of(result),
        "stop_reason": result.stop_reason,
        "seed": result.seed,
        "usage": usage_of_choices([result], 1),
    }


ROUTES = [ApiRoute("POST", "/v1/branch", branch, operation="branch")]
