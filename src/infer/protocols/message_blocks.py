"""The blocks and tools of `/v1/messages`, and their conversion to the library's messages and options."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, final

from msgspec import Meta, Struct

from infer.protocols.agent_prompts import AgentPrompts, TokenBudgets, is_billing
from infer.protocols.chat_messages import call_of_message, text_of
from infer.protocols.unknown_fields import Parameters, ToolKeys
from infer.request_limits import MAX_TOOLS


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
class Turn(Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


@final
class MessagesTool(ToolKeys, kw_only=True):
    """A tool. With `strict`, a schema that cannot be built is refused; without it, the part is left out."""

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


class _Thinking(Parameters, kw_only=True, tag_field="type"):
    display: str | None = None  # thinking is always shown


@final
class ThinkingOff(_Thinking, tag="disabled"):
    pass


@final
class ThinkingOn(_Thinking, tag="enabled"):
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None


@final
class ThinkingFreely(_Thinking, tag="adaptive"):
    pass


Thinking = ThinkingOff | ThinkingOn | ThinkingFreely


def tool_fields(tools: MessagesTools | None, choice: Choice | None) -> dict[str, Any]:
    """Return the tools and the choice as fields of RequestOptions."""
    found: dict[str, Any] = {}
    if tools:
        found["tools"] = [_tool(each) for each in tools]
    match choice:
        case AnyChoice():
            found["tool_choice"] = "required"
        case ToolChoice(name=name):
            found["tool_choice"] = {"type": "function", "function": {"name": name}}
        case NoChoice():
            found["tool_choice"] = "none"
    if isinstance(choice, _Choice) and choice.disable_parallel_tool_use:
        found["parallel_tool_calls"] = False
    return found


def _tool(given: MessagesTool) -> dict[str, Any]:
    found = {"name": given.name, "description": given.description, "parameters": given.input_schema}
    return found | ({"strict": True} if given.strict else {})


def budget_of(thinking: Thinking | None) -> int | None:
    """Return the maximum number of reasoning tokens, or None if there is no limit."""
    match thinking:
        case ThinkingOff():
            return 0
        case ThinkingOn(budget_tokens=budget):
            return budget
    return None


def messages_of(
    turns: Sequence[Turn], system: str | list[TextBlock] | None, prompts: AgentPrompts = "adapt"
) -> list[dict[str, Any]]:
    """Return messages for chat templates: the system prompt first, each tool result as its own message.

    Consecutive texts of one role become one message. Many templates accept a system message only in the first place. So
    a later one becomes a text of the user, in the frame that Claude Code uses for its reminders.
    """
    budgets = TokenBudgets(prompts)
    found = list[dict[str, Any]]()
    if system is not None:
        blocks = [TextBlock(text=system)] if isinstance(system, str) else system
        texts = [budgets.taken_from(each.text) for each in blocks if not is_billing(each.text, prompts)]
        found.append({"role": "system", "content": "".join(texts)})
    for turn in turns:
        for message in _messages_of_turn(turn, budgets):
            if message["role"] == "system" and not message["content"]:
                continue
            if message["role"] == "system" and any(each["role"] != "system" for each in found):
                message = {"role": "user", "content": f"<system-reminder>\n{message['content']}\n</system-reminder>"}
            if found and set(found[-1]) == set(message) == {"role", "content"} and found[-1]["role"] == message["role"]:
                texts = [text for text in (found[-1]["content"], message["content"]) if text]
                found[-1] = {"role": message["role"], "content": "\n".join(texts)}
            else:
                found.append(message)
    found = found or [{"role": "user", "content": ""}]
    budgets.put_behind(found)
    return found


def _messages_of_turn(turn: Turn, budgets: TokenBudgets) -> list[dict[str, Any]]:
    if turn.role == "assistant":
        return [_answer(turn)]
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": budgets.taken_from(turn.content)}]
    found = [
        {"role": "tool", "tool_call_id": each.tool_use_id, "content": budgets.taken_from(text_of(each.content))}
        for each in turn.content
        if isinstance(each, ToolResultBlock)
    ]
    text = "".join(budgets.taken_from(each.text) for each in turn.content if isinstance(each, TextBlock))
    return found if found and not text else [*found, {"role": turn.role, "content": text}]


def _answer(turn: Turn) -> dict[str, Any]:
    """Return an earlier answer of the assistant as a message."""
    if isinstance(turn.content, str):
        return {"role": "assistant", "content": turn.content}
    texts = [each for each in turn.content if isinstance(each, TextBlock)]
    message: dict[str, Any] = {"role": "assistant", "content": text_of(texts)}
    if thoughts := [each.thinking for each in turn.content if isinstance(each, ThinkingBlock)]:
        message["reasoning_content"] = "".join(thoughts)
    if calls := [each for each in turn.content if isinstance(each, ToolUseBlock)]:
        message["tool_calls"] = [call_of_message(each.id, each.name, each.input) for each in calls]
    return message
