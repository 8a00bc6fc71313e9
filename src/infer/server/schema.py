"""The bodies of requests as Structs. A field that is not here is refused, null is absent, and what OpenAI has but
we do not is in `neutral`.
"""

from typing import Annotated, Any, Literal, final

from msgspec import Meta, Struct

from infer.engine.admission import MAX_PRIORITY
from infer.engine.model_settings import Overflow, Speculation
from infer.engine.request_options import MAX_BUDGET, ReasoningPlace
from infer.sampling_params import MAX_LOGPROBS
from infer.server.response_items import InputItem, ReasoningSettings, ResponseToolChoice, ResponseTools
from infer.speculation.ngram import MAX_DRAFT_TOKENS
from infer.toolcalls.tools import MAX_TOOLS

_Text = Annotated[str, Meta(min_length=1)]
_Count = Annotated[int, Meta(ge=1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Choices = Annotated[int, Meta(ge=1, le=128)]
_Alternatives = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
SchemaName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
_TokenIds = list[Annotated[int, Meta(ge=0)]]


class Body(Struct, forbid_unknown_fields=True, kw_only=True):
    """What all have: a model's name, and who asks, which is not used."""

    model: str | None = None
    user: str | None = None


# Messages


@final
class TextPart(Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class _AnswerPart(Struct, forbid_unknown_fields=True, tag_field="type"):
    pass


@final
class AnswerText(_AnswerPart, tag="text"):
    text: str


@final
class RefusalPart(_AnswerPart, tag="refusal"):
    refusal: str


class _Message(Struct, forbid_unknown_fields=True, kw_only=True, tag_field="role"):
    name: str | None = None


_Content = str | Annotated[list[TextPart], Meta(min_length=1)]


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
class FunctionCall(Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


@final
class ToolCall(Struct, forbid_unknown_fields=True):
    id: str
    type: Literal["function"]
    function: FunctionCall


@final
class AssistantMessage(_Message, tag="assistant", kw_only=True):
    """As an answer has it, so that it can be sent back."""

    content: str | Annotated[list[AnswerText | RefusalPart], Meta(min_length=1)] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


@final
class ToolMessage(_Message, tag="tool", kw_only=True):
    content: _Content
    tool_call_id: str


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


# What an answer is held to


class _Format(Struct, forbid_unknown_fields=True, tag_field="type"):
    pass


@final
class TextFormat(_Format, tag="text"):
    pass


@final
class JsonObjectFormat(_Format, tag="json_object"):
    pass


@final
class JsonSchema(Struct, forbid_unknown_fields=True, kw_only=True):
    """`strict` or not, the answer is held to the schema."""

    name: SchemaName
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


@final
class JsonSchemaFormat(_Format, tag="json_schema"):
    json_schema: JsonSchema


Format = TextFormat | JsonObjectFormat | JsonSchemaFormat


# Tools


@final
class Function(Struct, forbid_unknown_fields=True, kw_only=True):
    """`strict` or not, a call is held to the schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


@final
class FunctionTool(Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    function: Function


class _Choice(Struct, forbid_unknown_fields=True, tag_field="type"):
    pass


@final
class FunctionName(Struct, forbid_unknown_fields=True):
    name: str


@final
class NamedFunction(_Choice, tag="function"):
    function: FunctionName


@final
class Allowed(Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[NamedFunction]


@final
class AllowedTools(_Choice, tag="allowed_tools"):
    allowed_tools: Allowed


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Tools = Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)]


# What is generated


@final
class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GeneratingBody(Body, kw_only=True):
    """What all routes take that generate: OpenAI's names first, then vLLM's and our own."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
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
    """What both completions take."""

    n: _Choices | None = None
    stop: str | Annotated[list[_Text], Meta(max_length=4)] | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    logit_bias: dict[str, float] | None = None
    response_format: Format | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: _Alternatives | None = None
    return_token_ids: bool | None = None


class ConversationBody(CompletingBody, kw_only=True):
    """What belongs to messages: variables of the template, tools and reasoning."""

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
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: _Alternatives | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
    store: Any = None
    verbosity: Any = None
    web_search_options: Any = None


@final
class CompletionBody(CompletingBody, kw_only=True):
    """`prompt` is a text, ids, or a list of either."""

    prompt: str | list[Any]
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: Any = None
    suffix: Any = None


# Responses


@final
class NamedSchemaFormat(_Format, tag="json_schema", kw_only=True):
    """`JsonSchemaFormat` without its inner object."""

    name: SchemaName
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


@final
class TextSettings(Struct, forbid_unknown_fields=True):
    format: TextFormat | JsonObjectFormat | NamedSchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


@final
class ResponseStreamOptions(Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


@final
class ResponseBody(GeneratingBody, kw_only=True):
    """Without a store: nothing is kept, whatever `store` says. What is included beside log-probabilities is of items
    that no answer has.
    """

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: _Count | None = None
    text: TextSettings | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: _Alternatives | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
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
    background: Any = None
    context_management: Any = None
    conversation: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
