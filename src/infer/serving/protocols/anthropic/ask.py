"""Convert bodies of `/v1/messages` to messages, parameters and options of the library.

Before that, blocks and tools of other programs become those that this server reads. The parts of a coding agent's
prompt that change with each request are moved or dropped, so that prefixes are reused. Claude Code begins its system
prompt with a billing line, in which `cch=` differs for each request. It ends the system prompt and each tool result
with the number of tokens left in its context.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, final

import msgspec
from msgspec import Meta, Struct

from infer.engine.requests.ask import Ask
from infer.engine.step.request_options import RequestOptions
from infer.request_limits import MAX_STOPS, MAX_TOKENS, MAX_TOOLS
from infer.serving.protocols.bodies import (
    Served,
    call_of_message,
    complete_each,
    own_tools,
    past_arguments,
    placeholder,
    refusing,
    text_of,
)
from infer.serving.protocols.fields import Parameters, Reading, ToolKeys, refuse, without_nulls
from infer.serving.protocols.foreign import CACHE_PROMPT, HINT, Foreign
from infer.serving.server_settings import AgentPrompts
from infer.text.toolcalls.answer_format import reasoning_of

_KNOWN = ("text", "tool_use", "tool_result", "thinking")
_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*")
_MOST_BUDGET = 200  # the longest budget reminder with its frame, in characters
_BUDGET = re.compile(
    r"(?:<system-reminder>\s{0,4})?(?P<budget><total_tokens>[^<>\n]{1,60}</total_tokens>)(?:\s{0,4}</system-reminder>)?"
)

_FOREIGN = {
    "thread": Foreign("answers are not stored: send all messages"),
    "container": Foreign("no code is run here: leave it out"),
    "mcp_servers": Foreign("no tools are run here: leave it out", ([],)),
    **dict.fromkeys(("context_management", "speed", "inference_geo", "betas"), HINT),
    "cache_prompt": CACHE_PROMPT,
    "max_completion_tokens": Foreign("use max_tokens", same_as=("max_tokens",)),
    "output_format": Foreign("use output_config.format", becomes=lambda value: {"output_config": {"format": value}}),
    "reasoning_effort": Foreign("use output_config.effort", becomes=lambda value: {"output_config": {"effort": value}}),
    "response_format": Foreign("use output_config.format", ({"type": "text"},)),
    "stop": Foreign("use stop_sequences", same_as=("stop_sequences",)),
}


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


@final
class JsonOutput(Parameters, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


@final
class OutputConfig(Parameters, kw_only=True):
    """The format of an answer. `effort` is a hint."""

    foreign: ClassVar[Mapping[str, Foreign]] = {"task_budget": HINT}

    effort: str | None = None
    format: JsonOutput | None = None


def complete_messages(given: dict[str, Any], reading: Reading) -> dict[str, Any]:
    """Return the body whose messages and tools have only known kinds of blocks and tools.

    Raises BodyError for an image or a file in the user's last message, unless it answers a tool's call.
    """
    if isinstance(system := given.get("system"), list):
        given["system"] = _blocks(system, "system", reading, is_refused=False)
    if isinstance(turns := given.get("messages"), list):
        given["messages"] = complete_each(turns, reading, _turn)
    if isinstance(tools := given.get("tools"), list):
        given["tools"] = own_tools(tools, reading, "custom")  # Anthropic itself runs tools of the other kinds
    return given


def _turn(turn: dict[str, Any], path: str, reading: Reading, *, is_last: bool) -> dict[str, Any]:
    content = turn.get("content")
    if not isinstance(content, list):
        return {**turn, "content": ""} if content is None and "content" in turn else turn
    has_results = any(isinstance(each, dict) and each.get("type") == "tool_result" for each in content)
    blocks = _blocks(content, f"{path}.content", reading, is_refused=is_last and not has_results)
    return {**turn, "content": blocks}


def _blocks(given: list[Any], path: str, reading: Reading, *, is_refused: bool) -> list[Any]:
    found = list[Any]()
    for index, block in enumerate(given):
        if isinstance(block, str):
            found.append(_text(block))
        elif not isinstance(block, dict) or not isinstance(kind := block.get("type"), str):
            found.append(block)
        elif (kept := _block(block, kind, f"{path}[{index}]", reading, is_refused=is_refused)) is not None:
            found.append(kept)
    return found


def _block(block: dict[str, Any], kind: str, path: str, reading: Reading, *, is_refused: bool) -> dict[str, Any] | None:
    """Return the block in a known kind, or None if it must be left out. Raises BodyError."""
    match kind:
        case "text" if block.get("text") is None and "text" in block:
            return {**block, "text": ""}
        case "tool_use":
            return {**block, "input": past_arguments(block.get("input"), f"{path}.input", reading)}
        case "tool_result":
            return _result(block, path, reading)
        case "thinking" if not isinstance(block.get("thinking"), str):
            reading.warn(f"{path} was left out: its thinking cannot be read")
            return None
        case "tool_addition" | "tool_removal":  # all tools are shown at any time
            return None
        case "redacted_thinking":
            reading.warn(f"{path} was left out: its thinking is encrypted for another provider")
            return None
    if kind in _KNOWN:
        return block
    if (text := _readable(block, kind)) is not None:
        return _text(text)
    if is_refused and block.get("source") is None and kind not in ("image", "document", "container_upload"):
        raise refuse(f"{path} is of type {kind!r:.40}, which is not known here: leave it out", path)
    return _text(placeholder(kind, path, reading, is_refused=is_refused))


def _result(block: dict[str, Any], path: str, reading: Reading) -> dict[str, Any]:
    content = block.get("content")
    if isinstance(content, list):
        content = _blocks(content, f"{path}.content", reading, is_refused=False)
    elif isinstance(content, dict):
        content = msgspec.json.encode(content).decode()
    if not content and block.get("is_error") is True:
        content = "[error]"  # the tool returned nothing but the error flag
    return {**block, "content": content}


def _readable(block: dict[str, Any], kind: str) -> str | None:
    """Return the text of a document, a search result or a reference if it is plain text, else None."""
    match kind, block.get("source"):
        case "document", {"type": "text", "data": str(content)} | {"type": "content", "content": content}:
            pass
        case "search_result", _:
            content = block.get("content")
        case "tool_reference", _:  # the tool is shown with the others, though its loading was deferred
            return str(block.get("tool_name"))
        case _:
            return None
    if isinstance(content, list) and all(isinstance(each, dict) for each in content):
        texts = [each.get("text") for each in content]
        content = "".join(texts) if all(isinstance(each, str) for each in texts) else None
    if not isinstance(content, str):
        return None
    title = block.get("title")
    return f"{title}\n{content}" if isinstance(title, str) and title else content


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


class PromptBody(Parameters, kw_only=True):
    """The fields that both routes have. `cache_salt` is not in Anthropic's API."""

    foreign, complete = _FOREIGN, complete_messages

    model: str | None = None
    cache_salt: str | None = None
    messages: Annotated[list[MessageTurn], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    thinking: Thinking | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    tools: MessagesTools | None = None
    tool_choice: Choice | None = None

    def ask(self, served: Served) -> Ask:
        """Return the prompt of a body and its options, without parameters. Raises BodyError."""
        messages = messages_of(self.messages, self.system, served.agent_prompts)
        template = served.llm.tokenizer.chat_template
        # A thinking budget is an upper limit, so it is ignored if the template has no reasoning.
        budget = 0 if isinstance(self.thinking, ThinkingOff) else getattr(self.thinking, "budget_tokens", None)
        budget = None if reasoning_of(template or "") is None else budget
        with refusing("messages"):
            fields = tool_fields(self.tools, self.tool_choice)
            options = RequestOptions(**fields, reasoning_budget=budget, cache_salt=self.cache_salt or "")
        variables = variables_of(self, messages, template)
        return Ask([messages], options=options, variables=variables, prompt_name="messages")


@final
class MessagesBody(PromptBody, kw_only=True):
    """A request for an answer.

    `seed` is not in Anthropic's API. Without `max_tokens`, an answer may fill the context.
    """

    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None  # 0: only read the prompt into the cache
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None

    def ask(self, served: Served) -> Ask:
        """Return what the body asks. Raises BodyError."""
        values = without_nulls({name: getattr(self, name) for name in ("temperature", "top_k", "top_p")})
        values["max_tokens"] = 1 if self.max_tokens == 0 else self.max_tokens  # one token, so that the prompt is read
        if stops := [each for each in self.stop_sequences or () if each]:
            values["stop"] = stops
        if self.output_config is not None and self.output_config.format is not None:
            values["json_schema"] = self.output_config.format.schema
        if "json_schema" in values and self.messages[-1].role == "assistant":
            raise refuse("messages must not end with the assistant's if output_config.format is given", "messages")
        return replace(PromptBody.ask(self, served), params=served.params(values, self.seed, "messages"))


@final
class CountTokensBody(PromptBody, kw_only=True):
    """The prompt to count. The fields of a request for an answer are accepted, because clients send them too."""

    foreign = _FOREIGN | dict.fromkeys({*MessagesBody.__struct_fields__} - {*PromptBody.__struct_fields__}, HINT)


@final
class TokenBudgets:
    """The budget reminders of one prompt, which are removed from the ends of its texts.

    The newest one is appended after all messages.
    """

    def __init__(self, prompts: AgentPrompts) -> None:
        self._is_kept = prompts == "keep"
        self._newest: str | None = None

    def taken_from(self, text: str) -> str:
        """Return the text without a reminder at its end, and remember the reminder."""
        if self._is_kept:
            return text
        begin = max(0, len(text.rstrip()) - _MOST_BUDGET)
        for found in _BUDGET.finditer(text, begin):
            if not text[found.end() :].strip():
                self._newest = found["budget"]
                return text[: found.start()].rstrip()
        return text

    def put_behind(self, messages: list[dict[str, Any]]) -> None:
        """Append the newest reminder to the last message that the assistant did not write."""
        if self._newest is None:
            return
        for message in reversed(messages):
            if message["role"] != "assistant":
                message["content"] = "\n\n".join(filter(None, (message["content"], self._newest)))
                return


def variables_of(body: PromptBody, messages: list[dict[str, Any]], template: str | None) -> dict[str, Any]:
    """Return the template's variables. If the assistant has the last turn, that turn is continued."""
    found: dict[str, Any] = {"continue_final_message": True} if messages[-1]["role"] == "assistant" else {}
    effort = None if body.output_config is None else body.output_config.effort
    if effort is not None and (reasoning := reasoning_of(template or "")) is not None:
        found["reasoning_effort"] = reasoning.nearest_effort(effort)
    return found if body.thinking is None else found | {"enable_thinking": not isinstance(body.thinking, ThinkingOff)}


def tool_fields(tools: MessagesTools | None, choice: Choice | None) -> dict[str, Any]:
    """Return the tools and the tool choice as fields of RequestOptions."""
    found: dict[str, Any] = {}
    if tools:
        found["tools"] = [_tool(each) for each in tools]
    match choice:
        case AnyChoice():
            found["tool_choice"] = "required"
        case ToolByName(name=name):
            found["tool_choice"] = {"type": "function", "function": {"name": name}}
        case NoChoice():
            found["tool_choice"] = "none"
    if isinstance(choice, _Choice) and choice.disable_parallel_tool_use:
        found["parallel_tool_calls"] = False
    return found


def _tool(given: MessagesTool) -> dict[str, Any]:
    found = {"name": given.name, "description": given.description, "parameters": given.input_schema}
    return found | ({"strict": True} if given.strict else {})


def messages_of(
    turns: Sequence[MessageTurn], system: str | list[TextBlock] | None, prompts: AgentPrompts = "adapt"
) -> list[dict[str, Any]]:
    """Return messages for chat templates: the system prompt first, each tool result as its own message.

    Consecutive texts of the user or the assistant become one message.
    """
    budgets = TokenBudgets(prompts)
    found = list[dict[str, Any]]()
    if system is not None:
        given = [system] if isinstance(system, str) else [each.text for each in system]
        kept = [each for each in given if prompts == "keep" or not _BILLING.fullmatch(each.strip())]
        texts = map(budgets.taken_from, kept)
        found += [{"role": "system", "content": text}] if (text := "".join(texts)) else []
    for turn in turns:
        for message in _messages_of_turn(turn, budgets):
            if message["role"] == "system" and not message["content"]:
                continue
            is_turn = message["role"] != "system" and set(message) == {"role", "content"}
            if is_turn and found and set(found[-1]) == set(message) and found[-1]["role"] == message["role"]:
                both = found[-1]["content"], message["content"]
                found[-1]["content"] = "\n".join(filter(None, both))
            else:
                found.append(message)
    found = found or [{"role": "user", "content": ""}]
    budgets.put_behind(found)
    return found


def _messages_of_turn(turn: MessageTurn, budgets: TokenBudgets) -> list[dict[str, Any]]:
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


def _answer(turn: MessageTurn) -> dict[str, Any]:
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
