"""What a turn of `/v1/messages` is made of, its tools, and both as the library takes them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, final

from msgspec import Meta, Struct

from infer.server.unknown_fields import Parameters, ToolKeys
from infer.toolcalls.tools import MAX_TOOLS


@final
class CacheControl(Struct, kw_only=True):
    """A hint that is not needed: what prompts begin with is kept anyway."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(Struct, kw_only=True, tag_field="type"):
    cache_control: CacheControl | None = None


@final
class TextBlock(_Block, tag="text"):
    text: str
    citations: None = None


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


@final
class RedactedBlock(_Block, tag="redacted_thinking"):
    data: str


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedBlock


@final
class Turn(Struct, kw_only=True):
    role: Literal["user", "assistant"]
    content: str | list[Block]


@final
class MessagesTool(ToolKeys, kw_only=True):
    """`strict` or not, a call is held to the schema."""

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
class ToolChoice(_Choice, tag="tool"):
    name: str


@final
class NoChoice(Parameters, tag_field="type", tag="none"):
    pass


Choice = AutoChoice | AnyChoice | ToolChoice | NoChoice
MessagesTools = Annotated[list[MessagesTool], Meta(max_length=MAX_TOOLS)]


class _Thinking(Struct, kw_only=True, tag_field="type"):
    pass


@final
class ThinkingOff(_Thinking, tag="disabled"):
    pass


@final
class ThinkingOn(_Thinking, tag="enabled"):
    budget_tokens: Annotated[int, Meta(ge=1)]


@final
class ThinkingFreely(_Thinking, tag="adaptive"):
    pass


Thinking = ThinkingOff | ThinkingOn | ThinkingFreely


def tool_fields(tools: MessagesTools | None, choice: Choice | None, thinking: Thinking | None) -> dict[str, Any]:
    """Fields of RequestOptions."""
    found: dict[str, Any] = {}
    if tools:
        found["tools"] = [
            {"name": each.name, "description": each.description, "parameters": each.input_schema} for each in tools
        ]
    match choice:
        case AnyChoice():
            found["tool_choice"] = "required"
        case ToolChoice(name=name):
            found["tool_choice"] = {"type": "function", "function": {"name": name}}
        case NoChoice():
            found["tool_choice"] = "none"
    if isinstance(choice, _Choice) and choice.disable_parallel_tool_use:
        found["parallel_tool_calls"] = False
    match thinking:
        case ThinkingOff():
            found["reasoning_budget"] = 0
        case ThinkingOn(budget_tokens=budget):
            found["reasoning_budget"] = budget
    return found


def messages_of(turns: Sequence[Turn], system: str | list[TextBlock] | None) -> list[dict[str, Any]]:
    """As templates take them: the system first, results of calls as messages of their own, and texts of one role after
    another as one.
    """
    found: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": text_of(system)}]
    for turn in turns:
        for message in _messages_of_turn(turn):
            if found and set(found[-1]) == set(message) == {"role", "content"} and found[-1]["role"] == turn.role:
                found[-1] = {"role": turn.role, "content": f"{found[-1]['content']}\n{message['content']}"}
            else:
                found.append(message)
    return found


def _messages_of_turn(turn: Turn) -> list[dict[str, Any]]:
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results = [each for each in turn.content if isinstance(each, ToolResultBlock)]
    found = [
        {"role": "tool", "tool_call_id": each.tool_use_id, "content": text_of(each.content or "")} for each in results
    ]
    texts = [each for each in turn.content if isinstance(each, TextBlock)]
    message: dict[str, Any] = {"role": turn.role, "content": text_of(texts)}
    if thoughts := [each.thinking for each in turn.content if isinstance(each, ThinkingBlock)]:
        message["reasoning_content"] = "".join(thoughts)
    if calls := [each for each in turn.content if isinstance(each, ToolUseBlock)]:
        message["tool_calls"] = [
            {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.input}}
            for each in calls
        ]
    return found if found and not texts else [*found, message]


def text_of(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)
