"""`/tokenize`, `/detokenize` and `/apply-template`, in the formats of llama.cpp and vLLM.

A body with `content` is in llama.cpp's format, and so is its answer. A body with `prompt` or `messages` is in vLLM's
format. Fields of both have different names: `add_special` and `with_pieces` in llama.cpp's format,
`add_special_tokens` and `return_token_strs` in vLLM's.
"""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.responses import Response

from infer.engine.requests.ask import Ask
from infer.engine.step.request_options import RequestOptions
from infer.serving.protocols.events import Bytes, Count, Output
from infer.serving.protocols.fields import TokenId, refuse
from infer.serving.protocols.openai.ask import Body, Message, Tools, complete_chat, messages_of, template_variables
from infer.serving.server.endpoint import ApiRequest, json_response, post

_FIELDS = {
    "content": frozenset({"add_special", "parse_special", "with_pieces"}),
    "prompt": frozenset({"add_special_tokens", "return_token_strs"}),
    "messages": frozenset(
        {"return_token_strs", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"}
    ),
}


class _TemplateBody(Body, kw_only=True):
    complete = complete_chat

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None

    def ask(self, messages: Sequence[Message]) -> Ask:
        """Return the conversation of a chat completion. Raises BodyError for a name that cannot be a variable."""
        options = RequestOptions(tools=msgspec.to_builtins(self.tools))
        return Ask([messages_of(messages)], options=options, variables=template_variables(self))


@final
class TokenizeBody(_TemplateBody, kw_only=True):
    """One of `content`, `prompt` and `messages`, with the fields that belong to it."""

    content: str | None = None
    add_special: bool | None = None  # the default is false
    parse_special: bool | None = None  # the default is true
    with_pieces: bool | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None  # the default is true
    return_token_strs: bool | None = None


@final
class DetokenizeBody(Body, kw_only=True):
    tokens: list[TokenId]


@final
class ApplyTemplateBody(_TemplateBody, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]


class TokenPiece(Struct):
    """A token and its text. If the text is not valid UTF-8 by itself, the piece is its bytes."""

    id: Count
    piece: str | Bytes


class Tokens(Output, kw_only=True):
    """The ids of a text or a conversation, with the text of each id if requested.

    An answer in llama.cpp's format has only `tokens`. An answer in vLLM's format has the counts, too.
    """

    count: Count | UnsetType = UNSET
    max_model_len: Count | UnsetType = UNSET
    tokens: list[Count | TokenPiece]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizedText(Output):
    """The text under both names, llama.cpp's and vLLM's."""

    content: str
    prompt: str


class RenderedTemplate(Output):
    prompt: str


async def tokenize(request: ApiRequest, body: TokenizeBody) -> Response:
    request.check_model(body.model)
    kind, host = _kind_of(body), request.server.host()
    tokenizer = host.tokenizer

    def answer() -> Response:
        if body.content is not None:
            is_parsed = body.parse_special is not False
            ids = tokenizer.encode(body.content, body.add_special is True, parse_special=is_parsed)
            pieces = [TokenPiece(each, _piece(tokenizer.token_bytes[each])) for each in ids if body.with_pieces]
            return json_response(Tokens(tokens=[*(pieces or ids)]), request.call)
        if body.messages is not None:
            ids = encoded(host, body.ask(body.messages))
        else:
            ids = tokenizer.encode(body.prompt or "", body.add_special_tokens is not False)
        tokens = Tokens(count=len(ids), max_model_len=host.model.max_seq_len, tokens=[*ids])
        if body.return_token_strs:
            tokens.token_strs = [tokenizer.token_bytes[each].decode(errors="backslashreplace") for each in ids]
        return json_response(tokens, request.call)

    return await request.prepared(answer, kind)


async def detokenize(request: ApiRequest, body: DetokenizeBody) -> DetokenizedText:
    """Answer with the text, which includes special tokens."""
    host = request.server.host()
    request.check_model(body.model)
    if (most := host.tokenizer.vocab_size - 1) < max(body.tokens, default=0):
        index = next(at for at, each in enumerate(body.tokens) if each > most)
        path = f"tokens[{index}]"
        raise refuse(f"{path} must be an id from 0 to {most}, got {body.tokens[index]}", path)
    text = await request.prepared(lambda: host.tokenizer.decode(body.tokens, False), "tokens")
    return DetokenizedText(text, text)


async def apply_template(request: ApiRequest, body: ApplyTemplateBody) -> RenderedTemplate:
    """Answer with the text from which a chat completion of these messages is computed."""
    host = request.server.host()
    request.check_model(body.model)

    def render() -> str:
        asked = body.ask(body.messages)
        messages, variables = _conversation(host, asked).shown(list(asked.prompts[0]))
        return str(host.tokenizer.render_chat_template(messages, **variables))

    return RenderedTemplate(await request.prepared(render, "messages"))


async def count_prompt(request: ApiRequest, asked: Ask) -> int:
    """Return the number of tokens of a conversation's prompt. Raises an ApiError that names the prompt's field."""
    return len(await request.prepared(partial(encoded, request.server.host(), asked), asked.prompt_name))


def encoded(host: Any, asked: Ask) -> list[int]:
    """Return the ids of a conversation's prompt. Raises InvalidRequestError."""
    ids: list[int] = _conversation(host, asked).encode(asked.prompts[0])
    return ids


def _conversation(host: Any, asked: Ask) -> Any:
    return host.requests.conversation(asked.prompts[0], asked.options, dict(asked.variables or {}))


def _kind_of(body: TokenizeBody) -> str:
    """Return the field to tokenise. Raises ApiError unless exactly one is given, with only its own fields."""
    kinds = [name for name in _FIELDS if getattr(body, name) is not None]
    if len(kinds) != 1:
        code = "invalid_value" if kinds else "missing_required_parameter"
        raise refuse("give one of content, prompt and messages", kinds[1] if kinds else "content", code)
    for field in sorted(frozenset().union(*_FIELDS.values()) - _FIELDS[kinds[0]]):
        if getattr(body, field) is not None:
            owners = " or ".join(name for name, fields in _FIELDS.items() if field in fields)
            raise refuse(f"{field} belongs to {owners}, not to {kinds[0]}: leave it out", field)
    return kinds[0]


def _piece(spelling: bytes) -> str | list[int]:
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return list(spelling)


ROUTES = [
    post("/tokenize", tokenize, "Convert a text or a conversation to token ids", TokenizeBody, Tokens),
    post("/apply-template", apply_template, "Render a conversation", ApplyTemplateBody, RenderedTemplate),
    post("/detokenize", detokenize, "Convert token ids to a text", DetokenizeBody, DetokenizedText),
]
