"""The turns, blocks and tools of `/v1/messages`."""

from typing import Annotated, Any, Literal, final

from msgspec import Meta, Struct

from infer.request_limits import MAX_TOKENS, MAX_TOOLS
from infer.serving.protocols.unknown_fields import Parameters, ToolKeys


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
