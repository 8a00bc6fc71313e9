"""The bodies of requests as Structs. Null means absent; `unknown_fields` has the rules for unknown keys."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, final

from msgspec import Meta, Struct

from infer.request_limits import MAX_BUDGET, MAX_CHOICES, MAX_LOGPROBS, MAX_TOKENS, MAX_TOOLS
from infer.serving.protocols.body_fields import Parameters, ToolKeys, declares
from infer.serving.protocols.foreign import FOREIGN
from infer.serving.protocols.response_items import (
    Function,
    InputItem,
    OutputRefusal,
    ReasoningSettings,
    ResponseToolChoice,
    ResponseTools,
)

TokenLimit = Annotated[int, Meta(ge=-1, le=MAX_TOKENS)]  # number of an answer's tokens; -1: to the end of the context
_Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
_Budget = Annotated[int, Meta(ge=0, le=MAX_BUDGET)]
Alternatives = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


class Body(Parameters, kw_only=True):
    """The fields of all bodies: the model's name, and the user, which is ignored."""

    model: str | None = None
    user: str | None = None


# Messages, which other programs wrote


@final
class TextPart(Struct):
    """A part of a content. `own` has its other keys, which some templates read."""

    type: Literal["text"]
    text: str
    own: dict[str, Any] = {}


@final
class AnswerText(Struct, tag_field="type", tag="text"):
    text: str


class _Message(Struct, kw_only=True, tag_field="role"):
    name: str | None = None


_Content = str | list[TextPart] | None


@final
class SystemMessage(_Message, tag="system", kw_only=True):
    content: _Content


@final
class DeveloperMessage(_Message, tag="developer", kw_only=True):
    content: _Content


@final
class UserMessage(_Message, tag="user", kw_only=True):
    content: _Content


@final
class FunctionCall(Struct):
    name: str
    arguments: str


@final
class ToolCallBody(Struct, kw_only=True):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


@final
class AssistantMessage(_Message, tag="assistant", kw_only=True):
    """An earlier answer of this server or another."""

    content: str | list[AnswerText | OutputRefusal] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallBody] | None = None


@final
class ToolMessage(_Message, tag="tool", kw_only=True):
    content: _Content
    tool_call_id: str | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


# Constraints on the answer


class _Format(Parameters, tag_field="type"):
    pass


@final
class TextFormat(_Format, tag="text"):
    pass


@final
class JsonObjectFormat(_Format, tag="json_object"):
    """A JSON object. `schema` is llama.cpp's field."""

    schema: dict[str, Any] | None = None


class JsonSchema(Parameters, kw_only=True):
    """A schema that constrains the answer, with `strict` or without."""

    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None

    @classmethod
    def note_on(cls, given: Mapping[str, Any]) -> str | None:
        """Return a warning about a name that OpenAI's servers would refuse."""
        name = given.get("name")
        if isinstance(name, str) and re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name):
            return None
        return ".name should have 1 to 64 characters of a-z, A-Z, 0-9, _ and -"


@final
class JsonSchemaFormat(_Format, tag="json_schema"):
    json_schema: JsonSchema


Format = TextFormat | JsonObjectFormat | JsonSchemaFormat


# Tools


@final
class FunctionTool(ToolKeys, tag_field="type", tag="function"):
    misplaced = dict.fromkeys(("strict", "parameters", "name", "description"), "function")

    function: Function


class _Choice(Parameters, tag_field="type"):
    pass


@final
class FunctionName(Parameters):
    name: str


@final
class NamedFunction(_Choice, tag="function"):
    function: FunctionName


@final
class Allowed(Parameters):
    mode: Literal["auto", "required"]
    tools: list[NamedFunction]


@final
class AllowedTools(_Choice, tag="allowed_tools"):
    allowed_tools: Allowed


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Tools = Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)]


# Parameters of an answer


@final
class StreamOptions(Parameters):
    """Options of a stream. With `continuous_usage_stats`, every chunk has the usage so far. Chunks are never padded."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


@declares("generating")
class GeneratingBody(Body, kw_only=True):
    """The parameters of all routes that generate: OpenAI's, vLLM's and our own."""

    foreign = FOREIGN

    stream: bool | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None


@declares("completions")
class CompletingBody(GeneratingBody, kw_only=True):
    """The parameters of both completion routes."""

    n: _Choices | None = None
    response_format: Format | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Alternatives | None = None
    return_token_ids: bool | None = None


@declares("conversations")
class ConversationBody(CompletingBody, kw_only=True):
    """The parameters that belong to messages: variables of the template, tools and reasoning."""

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    thinking_token_budget: _Budget | None = None
    reasoning_effort: Effort | None = None


@final
class ChatBody(ConversationBody, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None


@final
class CompletionBody(CompletingBody, kw_only=True):
    """A request to continue `prompt`: a text, ids, or a list of either. `suffix` is the text after the continuation."""

    prompt: str | list[Any]
    suffix: str | None = None
    max_tokens: TokenLimit | None = None
    logprobs: Alternatives | None = None
    echo: bool | None = None


# Responses


@final
class NamedSchemaFormat(JsonSchema, tag_field="type", tag="json_schema", kw_only=True):
    """The fields of `JsonSchemaFormat` without its inner object."""

    schema: dict[str, Any]


@final
class TextSettings(Parameters):
    """Settings of the answer's text. `verbosity` is a hint."""

    format: TextFormat | JsonObjectFormat | NamedSchemaFormat | None = None
    verbosity: str | None = None


@final
class ResponseStreamOptions(Parameters):
    include_obfuscation: bool | None = None


@declares("conversations")
class ResponseBody(GeneratingBody, kw_only=True):
    """A request for a response. Nothing is stored, even with `store`.

    Except for log-probabilities, `include` asks for items that no answer has.
    """

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: TokenLimit | None = None
    text: TextSettings | None = None
    include: list[str] | None = None
    top_logprobs: Alternatives | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, Any] | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    tools: ResponseTools | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    thinking_token_budget: _Budget | None = None
    reasoning: ReasoningSettings | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
