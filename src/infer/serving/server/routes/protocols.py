"""The routes that generate answers and count prompts: one row for each, with what its protocol asks and shows.

A row names the Struct of the body, a function that makes an `Ask` of it, and the `Shape` of the answer.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from infer.engine.requests.ask import Ask
from infer.serving.protocols.anthropic.ask import (
    CountTokensBody,
    MessagesBody,
    ask_message,
    ask_prompt,
    complete_messages,
)
from infer.serving.protocols.anthropic.events import AnthropicMessage, InputTokens, MessageShape
from infer.serving.protocols.events import ErrorShape, Shape
from infer.serving.protocols.fields import Complete, as_given
from infer.serving.protocols.llamacpp import (
    InfillBody,
    LlamacppCompletion,
    LlamacppShape,
    ask_continuation,
    ask_infill,
    complete_llamacpp,
)
from infer.serving.protocols.ollama.ask import OllamaChatBody, OllamaGenerateBody, ask_conversation, ask_generation
from infer.serving.protocols.ollama.events import OllamaChat, OllamaGeneration, OllamaShape
from infer.serving.protocols.openai.ask import ChatBody, CompletionBody, ask_chat, ask_completion, complete_chat
from infer.serving.protocols.openai.events import ChatCompletion, ChatShape, Completion, CompletionShape, StoredChats
from infer.serving.protocols.params import AskOf, Served
from infer.serving.protocols.responses.ask import ResponseBody, ask_response, complete_response
from infer.serving.protocols.responses.events import ResponseAnswer, ResponseInputTokens, ResponseShape
from infer.serving.server.call import call_of
from infer.serving.server.choices import answer_body, served_by
from infer.serving.server.endpoint import ApiRoute, get, json_response, post
from infer.serving.server.routes.tokens import count_prompt
from infer.serving.server.server_state import ServerState


def answering(
    path: str,
    summary: str,
    body: type[Struct],
    answer: Any,
    ask: AskOf,
    shape: type[Shape],
    operation: str,
    complete: Complete = as_given,
) -> ApiRoute:
    """Return the route of a body that asks for an answer, whole or streamed."""
    handler = partial(answer_body, ask=ask, shape=shape)
    return post(path, handler, summary, body, answer, operation, streams=True, complete=complete, shape=shape)


def counting(
    path: str,
    body: type[Struct],
    answer: Any,
    ask: Callable[[Any, Served], Ask],
    complete: Complete,
    shape: type[ErrorShape] = ErrorShape,
) -> ApiRoute:
    """Return the route that counts the tokens of a conversation's prompt."""

    async def count(request: Request, state: ServerState, body: Any) -> Response:
        asked = ask(body, served_by(request, state, body))
        return json_response(answer(await count_prompt(request, state, asked)), call_of(request))

    return post(path, count, "Count a conversation's tokens", body, answer, complete=complete, shape=shape)


async def list_chats(request: Request, state: ServerState) -> Response:
    return json_response(StoredChats([], None, None, False))


_TALK, _TEXT, _INFILL = "Answer a conversation", "Continue a text", "Write the text between two texts"
_EITHER = LlamacppCompletion | list[LlamacppCompletion]
_chat = partial(answering, shape=ChatShape, operation="chat", complete=complete_chat)
_text = partial(answering, operation="text_completion")
_message, _llamacpp = partial(answering, complete=complete_messages), partial(_text, complete=complete_llamacpp)
_response, _count = partial(answering, complete=complete_response), partial(counting, complete=complete_response)
ROUTES = [
    _chat("/v1/chat/completions", _TALK, ChatBody, ChatCompletion, ask_chat),
    get("/v1/chat/completions", list_chats, "List the stored chats: none", answer=StoredChats),
    _text("/v1/completions", _TEXT, CompletionBody, Completion, ask_completion, CompletionShape),
    _response("/v1/responses", _TALK, ResponseBody, ResponseAnswer, ask_response, ResponseShape, operation="chat"),
    _count("/v1/responses/input_tokens", ResponseBody, ResponseInputTokens, ask_response),
    _message("/v1/messages", _TALK, MessagesBody, AnthropicMessage, ask_message, MessageShape, operation="messages"),
    counting("/v1/messages/count_tokens", CountTokensBody, InputTokens, ask_prompt, complete_messages, MessageShape),
    answering("/api/chat", _TALK, OllamaChatBody, OllamaChat, ask_conversation, OllamaShape, operation="chat"),
    _text("/api/generate", "Answer a prompt", OllamaGenerateBody, OllamaGeneration, ask_generation, OllamaShape),
    _llamacpp("/completion", _TEXT, CompletionBody, _EITHER, ask_continuation, LlamacppShape),
    _llamacpp("/infill", _INFILL, InfillBody, LlamacppCompletion, ask_infill, LlamacppShape),
]
