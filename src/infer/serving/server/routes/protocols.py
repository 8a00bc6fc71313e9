"""The routes that generate answers and count prompts: one row for each, with the `Shape` of its protocol."""

from functools import partial
from typing import Any

from msgspec import Struct

from infer.serving.protocols.anthropic.ask import CountTokensBody, ask_prompt
from infer.serving.protocols.anthropic.events import InputTokens, MessageShape
from infer.serving.protocols.events import AskOf, Shape
from infer.serving.protocols.llamacpp import ContinuationShape, InfillShape
from infer.serving.protocols.ollama.ask import OllamaChatShape, OllamaGenerateShape
from infer.serving.protocols.openai.events import ChatShape, CompletionShape, StoredChats
from infer.serving.protocols.responses.events import ResponseInputTokens, ResponseShape
from infer.serving.server.choices import answer_body, served_by
from infer.serving.server.endpoint import ApiRequest, ApiRoute, get, post
from infer.serving.server.routes.tokens import count_prompt


def answering(path: str, summary: str, shape: type[Shape], operation: str) -> ApiRoute:
    """Return the route of a body that asks for an answer, whole or streamed."""
    row = post(path, partial(answer_body, shape=shape), summary, shape.body, shape.answer, operation, streams=True)
    return row._replace(complete=shape.complete, shape=shape)


def counting(
    path: str, shape: type[Shape], answer: Any, body: type[Struct] | None = None, ask: AskOf | None = None
) -> ApiRoute:
    """Return the route that counts the tokens of a conversation's prompt. A body of its own has its own `ask`."""

    async def count(request: ApiRequest, body: Any) -> Any:
        asked: Any = (ask or shape.ask)(body, served_by(request, body))
        return answer(await count_prompt(request, asked))

    row = post(path, count, "Count a conversation's tokens", body or shape.body, answer)
    return row._replace(complete=shape.complete, shape=shape)


async def list_chats(request: ApiRequest) -> StoredChats:
    return StoredChats([], None, None, False)


_TALK, _TEXT, _INFILL = "Answer a conversation", "Continue a text", "Write the text between two texts"
ROUTES = [
    answering("/v1/chat/completions", _TALK, ChatShape, "chat"),
    get("/v1/chat/completions", list_chats, "List the stored chats: none", answer=StoredChats),
    answering("/v1/completions", _TEXT, CompletionShape, "text_completion"),
    answering("/v1/responses", _TALK, ResponseShape, "chat"),
    counting("/v1/responses/input_tokens", ResponseShape, ResponseInputTokens),
    answering("/v1/messages", _TALK, MessageShape, "messages"),
    counting("/v1/messages/count_tokens", MessageShape, InputTokens, CountTokensBody, ask_prompt),
    answering("/api/chat", _TALK, OllamaChatShape, "chat"),
    answering("/api/generate", "Answer a prompt", OllamaGenerateShape, "text_completion"),
    answering("/completion", _TEXT, ContinuationShape, "text_completion"),
    answering("/infill", _INFILL, InfillShape, "text_completion"),
]
