"""`/v1/chat/completions`: answer conversations, whole or in chunks."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, final

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from infer.outputs import FinishReason, GenerationResult, TokenLogprob
from infer.serving.protocols.chat_answers import (
    Spelling,
    chat_entries,
    delta_fields,
    finish_reason_of,
    message_of,
    without_end,
)
from infer.serving.protocols.openai.ask import ChatBody, ask_chat, complete_chat
from infer.serving.server.answer_types import (
    AnswerHead,
    Bytes,
    CalledTool,
    ChatFinishReason,
    Count,
    HeadedAnswer,
    Json,
    ScoredChoice,
    Usage,
    extension,
    logprobs_of,
    prompt_logprobs_of,
    token_columns,
    usage_of,
)
from infer.serving.server.choices import ChoicePart, accept
from infer.serving.server.endpoint import answer_any_model, get, post
from infer.serving.server.replies import (
    ReplyFormat,
    Scores,
    StreamUsage,
    json_response,
    make_head,
    reply,
    score_prompts,
)
from infer.serving.server.server_state import ServerState


async def chat(request: Request, state: ServerState, body: ChatBody) -> Response:
    llm = answer_any_model(request, state, body.model)
    choices = await accept(request, state, ask_chat(body, llm.sampling_defaults, llm.tokenizer.chat_template))
    scores = await score_prompts(request, state, choices.prompt_ids, body.prompt_logprobs)
    head = make_head("chatcmpl-", request, state)
    shape = ChatShape(head, body, Spelling.of(llm.tokenizer), choices.prompt_ids[0], scores[0])
    return await reply(request, state, choices, shape, is_streamed=body.stream)


class ChatLogprobs(Struct):
    content: list[ScoredChoice]
    refusal: None


class ChatMessage(Struct, kw_only=True):
    """The answer as a message. Its content is null if the answer has only calls."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET
    refusal: None


class ChatChoice(Struct):
    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(HeadedAnswer, tag_field="object", tag="chat.completion"):
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Json | None] | UnsetType = UNSET


class ChunkChoice(Struct, kw_only=True):
    index: Count
    delta: Json
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    token_bytes: list[Bytes] | UnsetType = UNSET
    token_origins: list[str] | UnsetType = UNSET


class ChatChunk(HeadedAnswer, tag_field="object", tag="chat.completion.chunk"):
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[Json | None] | UnsetType = UNSET


class StoredChats(Struct, tag_field="object", tag="list"):
    """The list of stored chats, which is empty because nothing is stored."""

    data: list[ChatCompletion]
    first_id: str | None
    last_id: str | None
    has_more: bool


@final
class ChatShape(ReplyFormat):
    def __init__(
        self, head: AnswerHead, body: ChatBody, spelling: Spelling, prompt_ids: Sequence[int], scores: Scores
    ) -> None:
        self._head, self._body, self._spelling, self._usage = head, body, spelling, StreamUsage.of(body)
        self._num_prompt_tokens, self._num_tokens = len(prompt_ids), 0
        self._of_prompt: Json = {"prompt_token_ids": list(prompt_ids)} if body.return_token_ids else {}
        if scores:
            self._of_prompt["prompt_logprobs"] = prompt_logprobs_of(scores, spelling)

    def whole(self, results: Sequence[GenerationResult]) -> ChatCompletion:
        choices = [
            ChatChoice(
                index,
                ChatMessage(**message_of(result)),
                self._logprobs(result.logprobs or (), result.finish_reason),
                finish_reason_of(result),
                list(result.token_ids) if self._body.return_token_ids else UNSET,
            )
            for index, result in enumerate(results)
        ]
        usage, facts = usage_of(results, len(results)), extension(dict(enumerate(results)))
        return ChatCompletion(*self._head, choices, usage, **self._of_prompt, infer=facts)

    def opening(self) -> list[ChatChunk]:
        delta = {"role": "assistant", "content": None if self._body.tools else ""}
        chunks = [self._chunk(ChunkChoice(index=index, delta=delta)) for index in range(self._body.n or 1)]
        for name, value in self._of_prompt.items():
            setattr(chunks[0], name, value)
        return chunks

    def chunks(self, part: ChoicePart) -> list[ChatChunk]:
        self._num_tokens += len(part.pieces)
        delta = delta_fields(part.deltas) | ({"content": part.text} if part.text else {})
        if part.result is not None:
            reason = finish_reason_of(part.result)
            chunk = self._chunk(ChunkChoice(index=part.choice, delta=delta, finish_reason=reason))
            chunk.infer = extension({part.choice: part.result})
            return [chunk]
        logprobs = self._logprobs(logprobs_of(part.pieces), part.pieces[-1].finish_reason)
        ids = token_columns(part.pieces, self._spelling.token_bytes) if self._body.return_token_ids else {}
        if not (delta or ids or (logprobs and logprobs.content)):
            return []
        return [self._chunk(ChunkChoice(index=part.choice, delta=delta, logprobs=logprobs, **ids))]

    def closing(self, results: Sequence[GenerationResult]) -> list[ChatChunk]:
        return [ChatChunk(*self._head, [], usage_of(results, len(results)))] if self._usage.is_last else []

    def _chunk(self, choice: ChunkChoice) -> ChatChunk:
        return ChatChunk(*self._head, [choice], self._usage.after(self._num_prompt_tokens, self._num_tokens))

    def _logprobs(self, logprobs: Sequence[TokenLogprob], finish_reason: FinishReason | None) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        entries: Any = chat_entries(without_end(logprobs, finish_reason), self._spelling)  # dicts of these fields
        return ChatLogprobs(entries, None)


async def list_chats(request: Request, state: ServerState) -> Response:
    return json_response(StoredChats([], None, None, False))


_of_chat = partial(post, complete=complete_chat)
ROUTES = [
    _of_chat("/v1/chat/completions", chat, "Answer a conversation", ChatBody, ChatCompletion, "chat", streams=True),
    get("/v1/chat/completions", list_chats, "List the stored chats: none", answer=StoredChats),
]
