"""Convert bodies of `/v1/responses` to messages, parameters and options of the library.

Before that, items and tools of other programs become those that this server reads.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, final

import msgspec
from msgspec import Meta, Struct

from infer.engine.requests.ask import Ask
from infer.request_limits import MAX_TOOLS
from infer.serving.protocols.bodies import (
    Arguments,
    OutputRefusal,
    Served,
    call_of_message,
    effort_variables,
    own_tools,
    past_arguments,
    text_of,
    text_parts,
    with_roles,
)
from infer.serving.protocols.fields import Parameters, Reading, declares, refuse
from infer.serving.protocols.openai.ask import (
    Alternatives,
    Budget,
    Function,
    GeneratingBody,
    JsonObjectFormat,
    NamedSchemaFormat,
    TextFormat,
    TokenLimit,
    constraint_of,
    conversation_options,
)

_SEPARATOR = "__"  # between a namespace and a tool's name
_LOGPROBS = "message.output_text.logprobs"
_LOADING = ("additional_tools", "tool_search_output")  # items with tools
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")
# Kinds of calls, with the field of their arguments and the name of a tool without a name.
_CALLS = {
    "function_call": ("arguments", ""),
    "custom_tool_call": ("input", "custom_tool"),
    "local_shell_call": ("action", "local_shell"),
    "shell_call": ("action", "shell"),
    "apply_patch_call": ("operation", "apply_patch"),
    "mcp_call": ("arguments", "mcp_tool"),
}


@final
class InputText(Struct, tag_field="type", tag="input_text"):
    text: str


@final
class OutputText(Struct, tag_field="type", tag="output_text"):
    """A text of an answer. A client can send it back unchanged."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


@final
class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class _Item(Struct, kw_only=True, tag_field="type"):
    id: str | None = None
    status: str | None = None


@final
class InputMessage(_Item, tag="message"):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText | OutputText | OutputRefusal]
    phase: str | None = None


@final
class CallItem(_Item, tag="function_call"):
    call_id: str
    name: str
    arguments: Arguments


@final
class ResultItem(_Item, tag="function_call_output"):
    call_id: str
    output: str | list[InputText]


@final
class ReasoningItem(_Item, tag="reasoning"):
    summary: list[Any] | None = None
    content: list[ReasoningText] | None = None


InputItem = InputMessage | CallItem | ResultItem | ReasoningItem


@final
class ResponseTool(Function, kw_only=True, tag_field="type", tag="function"):
    """A function. With `strict`, a schema that no grammar can enforce is refused; without it, that part is left out.

    A `namespace` is put before the names of its tools. In the answer, namespace and name of a call are separate.
    """

    namespace: str | None = None


@final
class NamedTool(Parameters, tag_field="type", tag="function", kw_only=True):
    name: str


@final
class AllowedNames(Parameters, tag_field="type", tag="allowed_tools", kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


ResponseTools = Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)]
ResponseToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedNames


@final
class ReasoningSettings(Parameters):
    """Hints about reasoning. Reasoning is not summarised."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


@final
class TextSettings(Parameters):
    """Settings of the answer's text. `verbosity` is a hint."""

    format: TextFormat | JsonObjectFormat | NamedSchemaFormat | None = None
    verbosity: str | None = None


@final
class ResponseStreamOptions(Parameters):
    include_obfuscation: bool | None = None


def complete_response(given: dict[str, Any], reading: Reading) -> dict[str, Any]:
    """Return the body whose items, tools and tool choice have only known kinds.

    Raises BodyError for an image or a file in the user's last message, unless it has already been answered.
    """
    if isinstance(items := given.get("input"), list):
        items, last = with_roles(items)
        if isinstance(tools := given.get("tools") or [], list):
            given["tools"] = tools + [each for item in items for each in _loaded(item)] or None
        if any(map(_is_answer, items[last + 1 :])):
            last = -1
        given["input"] = [
            kept
            for index, item in enumerate(items)
            for kept in _items(item, f"input[{index}]", reading, is_last=index == last)
        ]
    if isinstance(tools := given.get("tools"), list):
        given["tools"] = own_tools(tools, reading, expand=partial(_functions, reading=reading))
    if isinstance(choice := given.get("tool_choice"), dict):
        given["tool_choice"] = _choice(choice, reading)
    if isinstance(include := given.get("include"), list):
        for each in include:
            if isinstance(each, str) and each not in _INCLUDED:
                reading.warn(f"include: {each!r:.60} was ignored: answers do not have it")
    return given


def name_in(namespace: Any, name: Any) -> Any:
    """Return the name by which the model calls a tool of a namespace."""
    return f"{namespace}{_SEPARATOR}{name}" if isinstance(namespace, str) and namespace else name


def _is_answer(item: Any) -> bool:
    return isinstance(item, dict) and (item.get("role") == "assistant" or str(item.get("type", "")).endswith("_call"))


def _loaded(item: Any) -> list[Any]:
    """Return the tools that an item adds to those of the body. Codex sends some of its tools so."""
    tools = item.get("tools") if isinstance(item, dict) and item.get("type") in _LOADING else None
    return tools if isinstance(tools, list) else []


def _items(item: Any, path: str, reading: Reading, *, is_last: bool) -> list[Any]:
    """Return the items that replace one item, or none if it has nothing that a model can read. Raises BodyError."""
    if not isinstance(item, dict):
        return [item]
    kind = item.get("type", "message")
    match kind:
        case "message":
            return [_message({**item, "type": "message"}, path, reading, is_last=is_last)]
        case "function_call_output":
            return [{**item, "output": _output(item.get("output"), f"{path}.output", reading)}]
        case "reasoning":
            return _reasoning(item, path, reading)
        case str() if kind in _CALLS:
            return _call(item, kind, path, reading)
        case str() if kind.removesuffix("_output") in _CALLS:
            output = _output(item.get("output"), f"{path}.output", reading)
            return [{"type": "function_call_output", "call_id": _id_of(item), "output": output}]
        case str():
            if kind not in _LOADING:
                reading.warn(f"{path} was left out: items of type {kind!r:.40} are unknown")
            return []
    return [item]


def _message(item: dict[str, Any], path: str, reading: Reading, *, is_last: bool) -> dict[str, Any]:
    content = item.get("content")
    if isinstance(content, list):
        return {**item, "content": text_parts(content, f"{path}.content", reading, "input_text", is_last=is_last)}
    return {**item, "content": ""} if content is None and "content" in item else item


def _call(item: dict[str, Any], kind: str, path: str, reading: Reading) -> list[Any]:
    field, name = _CALLS[kind]
    given = item.get(field)
    if kind == "custom_tool_call":
        given = {"input": given}
    found = {
        "type": "function_call",
        "call_id": _id_of(item),
        "name": name_in(item.get("namespace"), item.get("name") or name),
        "arguments": past_arguments(given, f"{path}.{field}", reading),
    }
    if kind != "mcp_call":
        return [found]
    output = _output(item.get("output") or item.get("error"), f"{path}.output", reading)
    return [found, {"type": "function_call_output", "call_id": found["call_id"], "output": output}]


def _id_of(item: Mapping[str, Any]) -> Any:
    """Return the id that links a call and its result."""
    return item.get("call_id") or item.get("id") or ""


def _output(given: Any, path: str, reading: Reading) -> Any:
    match given:
        case None:
            return ""
        case str():
            return given
        case [*parts] if all(isinstance(part, dict) and "type" in part for part in parts):
            return text_parts(parts, path, reading, "input_text", is_last=False)
    return msgspec.json.encode(given).decode()


def _reasoning(item: dict[str, Any], path: str, reading: Reading) -> list[Any]:
    content = item.get("content")
    parts = content if isinstance(content, list) else []
    found = [
        {"type": "reasoning_text", "text": part["text"]}
        for part in parts
        if isinstance(part, dict) and isinstance(part.get("text"), str)
    ]
    if not found and item.get("encrypted_content") is not None:
        reading.warn(f"{path} was left out: its reasoning is encrypted for another provider")
        return []
    return [{"type": "reasoning", "content": found}]


def _functions(tool: Any, path: str, reading: Reading) -> list[Any]:
    """Return the functions of a namespace, each named by both, or the tool itself."""
    match tool:
        case {"type": "namespace", "name": str(namespace), "tools": [*inner]}:
            found = [each for each in inner if isinstance(each, dict) and each.get("type") == "function"]
            if len(found) < len(inner):
                reading.warn(f"{path}: tools of {namespace!r:.60} that are not functions were left out")
            return [{**each, "name": name_in(namespace, each.get("name")), "namespace": namespace} for each in found]
        case {"type": "function"}:
            return [{name: value for name, value in tool.items() if name != "namespace"}]
    return [tool]


def _choice(choice: dict[str, Any], reading: Reading) -> dict[str, Any]:
    """Return the choice with the names that the model sees. Allowed tools that are not functions are left out."""
    if choice.get("type") == "function":
        return {"type": "function", "name": name_in(choice.get("namespace"), choice.get("name"))}
    tools = choice.get("tools")
    if choice.get("type") != "allowed_tools" or not isinstance(tools, list):
        return choice
    kept = own_tools(tools, reading)
    return {**choice, "tools": [_choice(each, reading) if isinstance(each, dict) else each for each in kept]}


@declares("conversations")
class ResponseBody(GeneratingBody, kw_only=True):
    """A request for a response. Nothing is stored, even with `store`.

    Except for log-probabilities, `include` asks for items that no answer has.
    """

    complete = complete_response

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
    thinking_token_budget: Budget | None = None
    reasoning: ReasoningSettings | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def ask(self, served: Served) -> Ask:
        """Return what the body asks. Raises BodyError."""
        values, has_logprobs = self.sampling_values(), _LOGPROBS in (self.include or ())
        if self.top_logprobs and not has_logprobs:
            raise refuse(f'top_logprobs needs include: ["{_LOGPROBS}"]', "top_logprobs")
        if self.max_output_tokens is None and "max_new_tokens" not in served.llm.sampling_defaults:
            values["max_new_tokens"] = None  # OpenAI's default; Codex treats a cut answer as a failed turn
        if has_logprobs:
            values["logprobs"] = self.top_logprobs or 0
        if self.text is not None:
            values |= constraint_of(self.text.format)
        effort = None if self.reasoning is None else self.reasoning.effort
        variables = effort_variables(effort, served.llm.tokenizer.chat_template)
        params = served.params(values, self.seed, "input")
        options = conversation_options(self, effort, "input")
        if self.truncation == "auto":
            options = replace(options, overflow="truncate_left")
        return Ask([messages_of(self)], params, options, variables=variables, prompt_name="input")


def messages_of(body: ResponseBody) -> list[dict[str, Any]]:
    """Return messages for chat templates: the instructions first, then one message per turn.

    Clients send several consecutive items for one turn of the user or the assistant. But many templates require turns
    that alternate.
    """
    given = body.input if not isinstance(body.input, str) else [InputMessage(role="user", content=body.input)]
    found = list[dict[str, Any]]()
    if body.instructions:
        found.append({"role": "system", "content": body.instructions})
    for item in given:
        if isinstance(item, ResultItem):
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
        elif isinstance(item, InputMessage) and item.role != "assistant":
            _add_text(found, "system" if item.role == "developer" else item.role, text_of(item.content))
        else:
            _add_answer(found, item)
    return found


def _add_text(found: list[dict[str, Any]], role: str, text: str) -> None:
    if role != "system" and found and found[-1]["role"] == role:
        found[-1]["content"] += f"\n\n{text}"
    else:
        found.append({"role": role, "content": text})


def _add_answer(found: list[dict[str, Any]], item: InputItem) -> None:
    last = found[-1] if found and found[-1]["role"] == "assistant" else None
    if last is None or (isinstance(item, InputMessage) and last["content"]):
        last = {"role": "assistant", "content": ""}
        found.append(last)
    match item:
        case InputMessage():
            last["content"] = text_of(item.content)
        case CallItem():
            call = call_of_message(item.call_id, item.name, item.arguments)
            last.setdefault("tool_calls", []).append(call)
        case ReasoningItem(content=[_, *_] as parts):
            last["reasoning_content"] = "".join(part.text for part in parts)
