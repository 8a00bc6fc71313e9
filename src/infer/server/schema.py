"""The bodies of requests as Structs. Null means absent, and unknown keys follow the rule of `unknown_fields`."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, final

from msgspec import Meta, Struct

from infer.engine.fair_queueing import MAX_PRIORITY
from infer.engine.model_settings import Overflow, Speculation
from infer.engine.request_options import MAX_BUDGET, ReasoningPlace
from infer.sampling_params import MAX_LOGPROBS
from infer.server.foreign import FOREIGN
from infer.server.response_items import InputItem, ReasoningSettings, ResponseToolChoice, ResponseTools
from infer.server.unknown_fields import Parameters, ToolKeys
from infer.speculation.ngram import MAX_DRAFT_TOKENS
from infer.toolcalls.tools import MAX_TOOLS

MOST_TOKENS = 2**31 - 1
_MOST_STOPS = 64
_Text = Annotated[str, Meta(min_length=1)]
_Count = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
_Limit = Annotated[int, Meta(ge=-1, le=MOST_TOKENS)]  # of an answer's tokens: -1 is the end of the context, 0 none
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Choices = Annotated[int, Meta(ge=1, le=128)]
_Alternatives = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
_TokenIds = list[Annotated[int, Meta(ge=0)]]


class Body(Parameters, kw_only=True):
    """The fields of all bodies: the model's name, and the user, which is not used."""

    model: str | None = None
    user: str | None = None


# Messages, which other programs wrote


@final
class TextPart(Struct):
    type: Literal["text"]
    text: str


class _AnswerPart(Struct, tag_field="type"):
    pass


@final
class AnswerText(_AnswerPart, tag="text"):
    text: str


@final
class RefusalPart(_AnswerPart, tag="refusal"):
    refusal: str


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
class ToolCall(Struct, kw_only=True):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


@final
class AssistantMessage(_Message, tag="assistant", kw_only=True):
    """An earlier answer of this server or another."""

    content: str | list[AnswerText | RefusalPart] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


@final
class ToolMessage(_Message, tag="tool", kw_only=True):
    content: _Content
    tool_call_id: str | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


# What an answer is held to


def note_on_name(name: object) -> str | None:
    """Return a warning about a schema's name that OpenAI's servers would refuse."""
    if isinstance(name, str) and re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name):
        return None
    return ".name should have 1 to 64 characters of a-z, A-Z, 0-9, _ and -"


class _Format(Parameters, tag_field="type"):
    pass


@final
class TextFormat(_Format, tag="text"):
    pass


@final
class JsonObjectFormat(_Format, tag="json_object"):
    """A JSON object. `schema` is llama.cpp's field."""

    schema: dict[str, Any] | None = None


@final
class JsonSchema(Parameters, kw_only=True):
    """A schema that constrains the answer, with `strict` or without."""

    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None

    @classmethod
    def note_on(cls, given: Mapping[str, Any]) -> str | None:
        return note_on_name(given.get("name"))


@final
class JsonSchemaFormat(_Format, tag="json_schema"):
    json_schema: JsonSchema


Format = TextFormat | JsonObjectFormat | JsonSchemaFormat


# Tools


@final
class Function(ToolKeys, kw_only=True):
    """A function. With `strict`, a schema that cannot be built is refused; without it, the part is left out."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


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


# What is generated


@final
class StreamOptions(Parameters):
    """Options of a stream. With `continuous_usage_stats`, every chunk has the usage so far. Chunks are never padded."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GeneratingBody(Body, kw_only=True):
    """The parameters of all routes that generate: OpenAI's names first, then vLLM's and our own."""

    foreign = FOREIGN

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stream: bool | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    repetition_window: Annotated[int, Meta(ge=0)] | None = None
    temperature_last: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: _TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: Annotated[_TokenIds, Meta(min_length=1)] | None = None
    regex: _Text | None = None
    grammar: _Text | None = None
    choice: Annotated[list[_Text], Meta(min_length=1)] | None = None
    cache_salt: str | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    overflow: Overflow | None = None
    speculation: Speculation | None = None
    num_draft_tokens: Annotated[int, Meta(ge=1, le=MAX_DRAFT_TOKENS)] | None = None


class CompletingBody(GeneratingBody, kw_only=True):
    """The parameters of both completion routes."""

    n: _Choices | None = None
    stop: str | Annotated[list[str], Meta(max_length=_MOST_STOPS)] | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    logit_bias: dict[str, float] | None = None
    response_format: Format | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: _Alternatives | None = None
    return_token_ids: bool | None = None


class ConversationBody(CompletingBody, kw_only=True):
    """The parameters that belong to messages: variables of the template, tools and reasoning."""

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    tool_format: str | None = None
    reasoning_effort: Effort | None = None
    reasoning_format: ReasoningPlace | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0, le=MAX_BUDGET)] | None = None


@final
class ChatBody(ConversationBody, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: _Limit | None = None
    max_completion_tokens: _Limit | None = None
    logprobs: bool | None = None
    top_logprobs: _Alternatives | None = None


@final
class CompletionBody(CompletingBody, kw_only=True):
    """A request to continue `prompt`: a text, ids, or a list of either. `suffix` is the text after the continuation."""

    prompt: str | list[Any]
    suffix: str | None = None
    max_tokens: _Limit | None = None
    logprobs: _Alternatives | None = None
    echo: bool | None = None


# Responses


@final
class NamedSchemaFormat(_Format, tag="json_schema", kw_only=True):
    """The fields of `JsonSchemaFormat` without its inner object."""

    name: str | None = None
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None

    @classmethod
    def note_on(cls, given: Mapping[str, Any]) -> str | None:
        return note_on_name(given.get("name"))


@final
class TextSettings(Parameters):
    """Settings of the answer's text. `verbosity` is a hint."""

    format: TextFormat | JsonObjectFormat | NamedSchemaFormat | None = None
    verbosity: str | None = None


@final
class ResponseStreamOptions(Parameters):
    include_obfuscation: bool | None = None


@final
class ResponseBody(GeneratingBody, kw_only=True):
    """A request for a response. Nothing is stored, whatever `store` says.

    Except for log-probabilities, `include` asks for items that no answer has.
    """

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: _Limit | None = None
    text: TextSettings | None = None
    include: list[str] | None = None
    top_logprobs: _Alternatives | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, Any] | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    tools: ResponseTools | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    tool_format: str | None = None
    reasoning: ReasoningSettings | None = None
    reasoning_format: ReasoningPlace | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0, le=MAX_BUDGET)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
