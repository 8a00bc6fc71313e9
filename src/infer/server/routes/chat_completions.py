"""`/v1/chat/completions`: answer conversations, whole or in chunks."""

from collections.abc import Mapping, Sequence
from typing import Any, final

from starlette.requests import Request
from starlette.responses import Response

from infer.batch_file.openai_logprobs import Spelling, chat_entries, without_end
from infer.batch_file.result_line import finish_reason_of, message_of
from infer.outputs import FinishReason, GenerationResult, TokenLogprob
from infer.server.answer_types import (
    Head,
    Json,
    extension,
    logprobs_of,
    prompt_logprobs_of,
    token_columns,
    usage_of_choices,
)
from infer.server.asked import make_params, messages_of, sampling_values, seeds_of
from infer.server.asking import read_request
from infer.server.chat_history import complete_chat
from infer.server.choices import Asked, Part, accept
from infer.server.endpoint import ApiRoute
from infer.server.refusals import refuse
from infer.server.replies import Scores, StreamUsage, json_response, make_head, reply, score_prompts
from infer.server.routes.served_models import answer_any_model
from infer.server.schema import ChatBody
from infer.server.server_state import ServerState
from infer.server.tool_fields import conversation_options, conversation_variables, delta_fields


async def chat(request: Request, state: ServerState) -> Response:
    llm = state.llm().llm
    body = await read_request(request, state, ChatBody, complete_chat)
    answer_any_model(request, state, body.model)
    choices = await accept(request, state, ask(body, llm.sampling_defaults, llm.tokenizer.chat_template))
    scores = await score_prompts(request, state, choices.prompt_ids, body.prompt_logprobs)
    head = make_head("chatcmpl-", request, state)
    shape = ChatShape(head, body, Spelling.of(llm.tokenizer), choices.prompt_ids[0], scores[0])
    return await reply(request, state, choices, shape, is_streamed=bool(body.stream))


def ask(body: ChatBody, defaults: Mapping[str, Any], template: str | None = None) -> Asked:
    """Return what the body asks for, over the model's own `defaults` and for its chat template. Raises ApiError."""
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        message = f"max_tokens is {body.max_tokens} and max_completion_tokens {body.max_completion_tokens}: give one"
        raise refuse(message, "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise refuse("top_logprobs needs logprobs: true", "top_logprobs")
    values = sampling_values(body)
    if body.logprobs:
        values["logprobs"] = body.top_logprobs or 0
    params = make_params(values, defaults, seeds_of(body.seed, body.n or 1), "messages")
    variables = conversation_variables(body, template)
    is_answered = 0 not in (body.max_tokens, body.max_completion_tokens)
    options = conversation_options(body)
    return Asked([messages_of(body.messages)], params, options, "messages", variables, is_answered=is_answered)


@final
class ChatShape:
    def __init__(
        self,
        head: Head,
        body: ChatBody,
        spelling: Spelling,
        prompt_ids: Sequence[int],
        scores: Scores,
    ) -> None:
        self._head, self._body, self._spelling, self._usage = head, body, spelling, StreamUsage.of(body)
        self._num_prompt_tokens, self._num_tokens = len(prompt_ids), 0
        self._of_prompt: Json = {"prompt_token_ids": list(prompt_ids)} if body.return_token_ids else {}
        if scores:
            self._of_prompt["prompt_logprobs"] = prompt_logprobs_of(scores, spelling)

    def whole(self, results: Sequence[GenerationResult]) -> Json:
        choices = [
            {
                "index": index,
                "message": message_of(result),
                "logprobs": self._logprobs(result.logprobs or (), result.finish_reason),
                "finish_reason": finish_reason_of(result),
                **self._token_ids(result.token_ids),
            }
            for index, result in enumerate(results)
        ]
        return {
            **self._head.to_json("chat.completion"),
            "choices": choices,
            "usage": usage_of_choices(results, len(results)),
            "infer": extension(dict(enumerate(results))),
            **self._of_prompt,
        }

    def opening(self) -> list[Json]:
        delta = {"role": "assistant", "content": None if self._body.tools else ""}
        first, *others = [self._chunk([self._choice(index, delta)]) for index in range(self._body.n or 1)]
        return [first | self._of_prompt, *others]

    def chunk(self, part: Part) -> Json | None:
        self._num_tokens += len(part.pieces)
        delta = delta_fields(part.deltas) | ({"content": part.text} if part.text else {})
        if part.result is not None:
            reason = finish_reason_of(part.result)
            choice = self._choice(part.choice, delta, finish_reason=reason)
            return self._chunk([choice]) | {"infer": extension({part.choice: part.result})}
        logprobs = self._logprobs(logprobs_of(part.pieces), part.pieces[-1].finish_reason)
        ids = token_columns(part.pieces, self._spelling.token_bytes) if self._body.return_token_ids else {}
        if not (delta or ids or (logprobs and logprobs["content"])):
            return None
        return self._chunk([self._choice(part.choice, delta, logprobs) | ids])

    def closing(self, results: Sequence[GenerationResult]) -> list[Json]:
        if not self._usage.is_last:
            return []
        return [self._chunk([]) | {"usage": usage_of_choices(results, len(results))}]

    def _chunk(self, choices: list[Json]) -> Json:
        usage = self._usage.field(self._num_prompt_tokens, self._num_tokens)
        return {**self._head.to_json("chat.completion.chunk"), "choices": choices, **usage}

    def _choice(
        self, index: int, delta: Json, logprobs: Json | None = None, *, finish_reason: str | None = None
    ) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, logprobs: Sequence[TokenLogprob], finish_reason: FinishReason | None) -> Json | None:
        if not self._body.logprobs:
            return None
        return {"content": chat_entries(without_end(logprobs, finish_reason), self._spelling), "refusal": None}

    def _token_ids(self, token_ids: Sequence[int]) -> Json:
        return {"token_ids": list(token_ids)} if self._body.return_token_ids else {}


async def list_chats(request: Request, state: ServerState) -> Response:
    """Answer with the list of stored chats, which is empty because nothing is stored."""
    return json_response({"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False})


ROUTES = [
    ApiRoute("POST", "/v1/chat/completions", chat, operation="chat"),
    ApiRoute("GET", "/v1/chat/completions", list_chats),
]
