"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, Anthropic's Messages API: turns, blocks and tools."""

from typing import Annotated, Any, Literal, final

from msgspec import Meta, Struct

from infer.request_limits import MAX_STOPS, MAX_TOKENS, MAX_TOOLS
from infer.serving.protocols.body_fields import Parameters, ToolKeys
from infer.serving.protocols.foreign import Foreign

_FOREIGN = {
    "thread": Foreign("answers are not stored: send all messages"),
    "container": Foreign("no code is run here: leave it out"),
    "mcp_servers": Foreign("no tools are run here: leave it out", ([],)),
    "context_management": Foreign(is_hint=True),
    "speed": Foreign(is_hint=True),
    "inference_geo": Foreign(is_hint=True),
    "betas": Foreign(is_hint=True),
    "max_completion_tokens": Foreign("use max_tokens", same_as=("max_tokens",)),
    "output_format": Foreign("use output_config.format", becomes=lambda value: {"output_config": {"format": value}}),
    "reasoning_effort": Foreign("use output_config.effort", becomes=lambda value: {"output_config": {"effort": value}}),
    "response_format": Foreign("use output_config.format", ({"type": "text"},)),
    "stop": Foreign("use stop_sequences", same_as=("stop_sequences",)),
}
_FOREIGN_OUTPUT = {"task_budget": Foreign(is_hint=True)}
_OF_ANSWERS = (
    *("max_tokens", "metadata", "service_tier", "stop_sequences", "stream"),
    *("temperature", "top_k", "top_p", "seed"),
)


@final
class CacheControl(Struct, kw_only=True):
    """A hint without effect: prefixes of prompts are always cached."""

    type: str | None = None
    ttl: str | None = None


class _Block(Struct, kw_only=True, tag_field="type"):
    cache_control: CacheControl | None = None


@final
class TextBlock(_Block, tag="text"):
    text: str
    citations: Any = None


@final
class ToolUseBlock(_Block, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


@final
class ToolResultBlock(_Block, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


@final
class ThinkingBlock(_Block, tag="thinking"):
    thinking: str
    signature: str | None = None


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock


@final
class MessageTurn(Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


@final
class MessagesTool(ToolKeys, kw_only=True):
    """A tool. With `strict`, a schema that no grammar can enforce is refused; without it, that part is left out."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class _Choice(Parameters, kw_only=True, tag_field="type"):
    disable_parallel_tool_use: bool | None = None


@final
class AutoChoice(_Choice, tag="auto"):
    pass


@final
class AnyChoice(_Choice, tag="any"):
    pass


@final
class ToolByName(_Choice, tag="tool"):
    name: str


@final
class NoChoice(Parameters, tag_field="type", tag="none"):
    pass


Choice = AutoChoice | AnyChoice | ToolByName | NoChoice
MessagesTools = Annotated[list[MessagesTool], Meta(max_length=MAX_TOOLS)]


class _Thinking(Parameters, kw_only=True, tag_field="type"):
    display: str | None = None  # thinking is always shown


@final
class ThinkingOff(_Thinking, tag="disabled"):
    pass


@final
class ThinkingOn(_Thinking, tag="enabled"):
    budget_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None


@final
class ThinkingFreely(_Thinking, tag="adaptive"):
    pass


Thinking = ThinkingOff | ThinkingOn | ThinkingFreely


class _Part(Parameters):
    pass


@final
class JsonOutput(_Part, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


@final
class OutputConfig(_Part, kw_only=True):
    """The format of an answer. `effort` is a hint."""

    foreign = _FOREIGN_OUTPUT

    effort: str | None = None
    format: JsonOutput | None = None


class PromptBody(_Part, kw_only=True):
    """The fields that both routes have."""

    foreign = _FOREIGN

    model: str | None = None
    messages: Annotated[list[MessageTurn], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    thinking: Thinking | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    tools: MessagesTools | None = None
    tool_choice: Choice | None = None


@final
class CountTokensBody(PromptBody, kw_only=True):
    """The prompt to count. The fields of a request for an answer are accepted, because clients send them too."""

    foreign = _FOREIGN | dict.fromkeys(_OF_ANSWERS, Foreign(is_hint=True))


@final
class MessagesBody(PromptBody, kw_only=True):
    """A request for an answer.

    `seed` is not in Anthropic's API. Without `max_tokens`, an answer may fill the context.
    """

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
