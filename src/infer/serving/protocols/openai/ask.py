"""OpenAI's bodies of `/v1/chat/completions` and `/v1/completions`, and the `Ask` of each. Null means absent."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, final

import msgspec
from msgspec import Meta, Struct

from infer.engine.requests.ask import Ask
from infer.engine.step.request_options import OPTIONS, RequestOptions
from infer.request_limits import (
    MAX_ANSWERS,
    MAX_BIAS,
    MAX_BUDGET,
    MAX_CHOICES,
    MAX_KEYS,
    MAX_LOGPROBS,
    MAX_TOKENS,
    MAX_TOOLS,
    NUM_TOKENS_OF_COMPLETIONS,
)
from infer.sampling_params import ALIASES, PARAMETER_NAMES, PARAMETERS
from infer.serving.protocols.bodies import (
    Arguments,
    OutputRefusal,
    Served,
    complete_each,
    effort_variables,
    own_tools,
    past_arguments,
    prompts_of,
    refusing,
    text_parts,
)
from infer.serving.protocols.fields import Parameters, Reading, ToolKeys, declares, refuse, shown, values_of
from infer.serving.protocols.foreign import FOREIGN, Foreign
from infer.serving.protocols.structural_tags import StructuralTagFormat, lark_of
from infer.text.grammar.grammar import not_strict

_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_MOST_ID_DIGITS = 20
_FLAGS = ("add_generation_prompt", "continue_final_message")  # of templates
_NOT_FOR_TEMPLATES = {"messages", "chat_template", "allow_special", "tools", *_FLAGS}
_ROLES = {"function": "tool", "developer": "system"}  # "function" is of OpenAI's format before tools


def _of_schema(name: str) -> Foreign:
    return Foreign(becomes=lambda value: {"json_schema": {name: value}})


_FLAT = {name: _of_schema(name) for name in ("name", "schema", "description", "strict")}

TokenLimit = Annotated[int, Meta(ge=-1, le=MAX_TOKENS)]  # number of an answer's tokens; -1: to the end of the context
Budget = Annotated[int, Meta(ge=0, le=MAX_BUDGET)]
Alternatives = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


class Body(Parameters, kw_only=True):
    """The fields of all bodies: the model's name, and the user, which is ignored."""

    model: str | None = None
    user: str | None = None


# Messages, which other programs wrote


@final
class TextPart(Struct, omit_defaults=True):
    """A part of a content. `own` has its other keys, which some templates read."""

    type: Literal["text"]
    text: str
    own: dict[str, Any] = {}


@final
class AssistantText(Struct, tag_field="type", tag="text"):
    text: str


class _Message(Struct, kw_only=True, tag_field="role", omit_defaults=True):
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
    arguments: Arguments


@final
class ToolCallBody(Struct, kw_only=True):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


@final
class AssistantMessage(_Message, tag="assistant", kw_only=True):
    """An earlier answer of this server or another."""

    content: str | list[AssistantText | OutputRefusal] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallBody] | None = None


@final
class ToolMessage(_Message, tag="tool", kw_only=True):
    content: _Content
    tool_call_id: str | None = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


def complete_chat(given: dict[str, Any], reading: Reading) -> dict[str, Any]:
    """Return a chat's body whose messages and tools have only known kinds of parts and tools.

    Raises BodyError for an image, audio or a file in the user's last message.
    """
    if isinstance(messages := given.get("messages"), list):
        given["messages"] = complete_each(messages, reading, _message)
    if given.get("function_call") == "none":
        given.pop("functions", None)
    if isinstance(tools := given.get("tools"), list):
        given["tools"] = own_tools([_with_type(tool) for tool in tools], reading)
    return given


def _message(message: dict[str, Any], path: str, reading: Reading, *, is_last: bool) -> dict[str, Any]:
    """Return a message as chat templates expect it. Values of wrong types are kept, and refused later."""
    found = dict(message)
    role = found.get("role")
    if isinstance(role, str):
        role = found["role"] = _ROLES.get(role, role)
    content = found.get("content")
    if isinstance(content, list):
        parts = text_parts(content, f"{path}.content", reading, "text", is_last=is_last)
        found["content"] = parts if role in ("system", "user") else _joined(parts, is_answer=role == "assistant")
    elif content is None and "content" in found:
        found["content"] = ""
    if role == "assistant":
        if isinstance(refused := found.get("refusal"), str | None):
            found |= {"content": refused or "" if content is None else found["content"], "refusal": None}
        if isinstance(thoughts := found.get("reasoning"), str | None):
            found["reasoning"] = None
            if found.get("reasoning_content") in (None, ""):
                found["reasoning_content"] = thoughts
    calls = found.pop("tool_calls", None)
    if isinstance(call := found.get("function_call"), dict) and not calls:  # OpenAI's format before tools
        calls = [{"function": call}]
    if isinstance(calls, list):
        calls = [
            _call(each, f"{path}.tool_calls[{index}]", reading) if isinstance(each, dict) else each
            for index, each in enumerate(calls)
        ]
    return found if calls in (None, []) else {**found, "tool_calls": calls}


def _joined(parts: list[Any], *, is_answer: bool) -> Any:
    """Return the text of the parts, or the parts if one of them has none."""
    kinds = ("text", "refusal") if is_answer else ("text",)
    texts = [part.get(part["type"]) for part in parts if isinstance(part, dict) and part.get("type") in kinds]
    return "".join(map(str, texts)) if len(texts) == len(parts) and set(map(type, texts)) <= {str} else parts


def _call(call: dict[str, Any], path: str, reading: Reading) -> dict[str, Any]:
    found = {name: value for name, value in call.items() if value is not None}
    if found.get("type") == "custom" and isinstance(custom := found.get("custom"), dict):
        arguments = {"input": custom.get("input")}
        return {**found, "type": "function", "function": {"name": custom.get("name"), "arguments": arguments}}
    if isinstance(function := found.get("function"), dict):
        place = f"{path}.function.arguments"
        found["function"] = {**function, "arguments": past_arguments(function.get("arguments"), place, reading)}
    return found


def _with_type(tool: Any) -> Any:
    """Return a tool of a chat with its type, which some clients leave out."""
    return {"type": "function", **tool} if isinstance(tool, dict) and "function" in tool else tool


# Constraints on the answer


@final
class TextFormat(Parameters, tag_field="type", tag="text"):
    pass


@final
class JsonObjectFormat(Parameters, tag_field="type", tag="json_object"):
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
        if isinstance(name := given.get("name"), str) and re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name):
            return None
        return ".name should have 1 to 64 characters of a-z, A-Z, 0-9, _ and -"


@final
class JsonSchemaFormat(Parameters, tag_field="type", tag="json_schema"):
    """A schema with its name. llama.cpp and `/v1/responses` have its fields beside the type."""

    foreign = _FLAT

    json_schema: JsonSchema


Format = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


class Function(ToolKeys, kw_only=True):
    """A function. With `strict`, a schema that no grammar can enforce is refused; without it, that part is left out."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


# Tools


@final
class FunctionTool(ToolKeys, tag_field="type", tag="function"):
    foreign: ClassVar[Mapping[str, Foreign]] = {
        name: Foreign(warning=f"{name} belongs to function") for name in ("strict", "parameters", "name", "description")
    }

    function: Function


@final
class FunctionName(Parameters):
    name: str


@final
class NamedFunction(Parameters, tag_field="type", tag="function"):
    function: FunctionName


@final
class Allowed(Parameters):
    mode: Literal["auto", "required"]
    tools: list[NamedFunction]


@final
class AllowedTools(Parameters, tag_field="type", tag="allowed_tools"):
    allowed_tools: Allowed


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
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

    def sampling_values(self) -> dict[str, Any]:
        """Return the fields of SamplingParams that the body names, except the seed and log-probabilities."""
        values = values_of(self, PARAMETERS)
        for name in _LENGTHS:
            if (length := getattr(self, name, None)) is not None:
                values["max_new_tokens"] = None if length < 0 else max(length, 1)  # None: to the end of the context
        if (stops := values.get("stop")) is not None:
            values["stop"] = [each for each in ([stops] if isinstance(stops, str) else stops) if each]
        if "logit_bias" in values:
            values["logit_bias"] = {_bias_id(key, bias): bias for key, bias in values["logit_bias"].items() if bias}
        return values


@declares("completions")
class CompletingBody(GeneratingBody, kw_only=True):
    """The parameters of both completion routes."""

    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    response_format: Format | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Alternatives | None = None
    return_token_ids: bool | None = None

    def sampling_values(self) -> dict[str, Any]:
        return super().sampling_values() | constraint_of(self.response_format)


@declares("conversations")
class ConversationBody(CompletingBody, kw_only=True):
    """The parameters that belong to messages: variables of the template, tools and reasoning."""

    complete = complete_chat

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    thinking_token_budget: Budget | None = None
    reasoning_effort: Effort | None = None


@final
class ChatBody(ConversationBody, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None

    def ask(self, served: Served) -> Ask:
        """Return what the body asks. Raises BodyError."""
        limits = self.max_tokens, self.max_completion_tokens
        if None not in limits and len({*limits}) == 2:
            raise refuse("max_tokens is {} and max_completion_tokens {}: give one".format(*limits), "max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs needs logprobs: true", "top_logprobs")
        values = self.sampling_values() | ({"logprobs": self.top_logprobs or 0} if self.logprobs else {})
        params = served.params(values, self.seed, "messages", self.n or 1)
        variables = template_variables(self, served.llm.tokenizer.chat_template)
        options = conversation_options(self, self.reasoning_effort)
        messages, is_answered = messages_of(self.messages), 0 not in limits
        return Ask([messages], params, options, variables=variables, prompt_name="messages", is_answered=is_answered)


class TextBody(CompletingBody, kw_only=True):
    """A request to continue `prompt`: a text, ids, or a list of either."""

    prompt: str | list[Any] | None = None
    max_tokens: TokenLimit | None = None
    logprobs: Alternatives | None = None


class CompletionBody(TextBody, kw_only=True):
    """A request to continue `prompt`. `suffix` is the text after the continuation."""

    prompt: str | list[Any]
    suffix: str | None = None
    echo: bool | None = None

    def ask(self, served: Served) -> Ask | Callable[[], Ask]:
        """Return what the body asks. A prompt with a suffix gets the marks of its model. Raises BodyError.

        If the model cannot fill in text, warn and continue the prompts.
        """
        asked = ask_text(self, served)
        if not self.suffix:
            return asked
        if served.llm.tokenizer.infill_marks is None:
            problem = "suffix: this model has no tokens to fill in text; the prompt is continued"
            if served.reading.policy == "refuse":
                raise refuse(f"{problem}: leave it out", "suffix")
            served.reading.warn(problem)
            return asked
        if self.echo:
            raise refuse("echo must not be given with suffix: leave out echo", "echo")
        if any(not isinstance(each, str) for each in asked.prompts):
            raise refuse("with suffix, prompts must be texts, got token ids: put the suffix into the ids", "prompt")

        def fill_in() -> Ask:
            with refusing("suffix"):
                prompts = [served.llm.tokenizer.encode_infill(each, self.suffix) for each in asked.prompts]
            return between(asked, prompts, served)

        return fill_in


# Responses


@final
class NamedSchemaFormat(JsonSchema, tag_field="type", tag="json_schema", kw_only=True):
    """The fields of `JsonSchemaFormat` without its inner object."""

    schema: dict[str, Any]


def messages_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages as chat templates expect them.

    The tokenizer gives each template the form of contents that it reads.
    """
    found: list[dict[str, Any]] = msgspec.to_builtins(messages)
    for message in found:
        if isinstance(parts := message["content"], list):
            message["content"] = [{**part.pop("own", {}), **part} for part in parts]
    return found


def between(asked: Ask, prompts: Sequence[Sequence[int]], served: Served) -> Ask:
    """Return the request with the encoded texts as its prompts. The answer also ends at the marks' end tokens."""
    marks = served.llm.tokenizer.infill_marks
    ends = () if marks is None else marks.ends
    params = [replace(each, stop_token_ids=[*(each.stop_token_ids or ()), *ends]) for each in asked.params]
    return replace(asked, prompts=prompts, params=params)


def ask_text(body: TextBody, served: Served) -> Ask:
    """Return what a body asks, without its suffix. Raises BodyError."""
    prompts, num_choices = prompts_of("" if body.prompt is None else body.prompt), body.n or 1
    if len(prompts) * num_choices > MAX_ANSWERS:
        message = f"prompts times n must be at most {MAX_ANSWERS}, got {len(prompts)} times {num_choices}: split it"
        raise refuse(message, "prompt")
    values = body.sampling_values() | ({} if body.logprobs is None else {"logprobs": body.logprobs})
    params = served.params(values, body.seed, "prompt", num_choices, max_new_tokens=NUM_TOKENS_OF_COMPLETIONS)
    return Ask(prompts, params, RequestOptions(**values_of(body, OPTIONS)), is_answered=body.max_tokens != 0)


def conversation_options(body: Any, effort: str | None, prompt_name: str = "messages", **others: Any) -> RequestOptions:
    """Return the options of a body, with its tools and the budget of its reasoning: 0 for the effort "none".

    Raises BodyError.
    """
    budget: int | None = body.thinking_token_budget
    if effort == "none" and budget:
        name = "thinking_token_budget"
        raise refuse(f"{name} is {budget}, but the effort of reasoning is none: give only one", name)
    with refusing(prompt_name):
        return RequestOptions(
            tools=msgspec.to_builtins(body.tools or None),
            tool_choice=msgspec.to_builtins(body.tool_choice),
            parallel_tool_calls=body.parallel_tool_calls,
            reasoning_budget=0 if effort == "none" else budget,
            **values_of(body, OPTIONS),
            **others,
        )


def template_variables(body: Any, template: str | None = None) -> dict[str, Any]:
    """Return the variables of the model's chat template, with both flags and the effort if they are given.

    Raises BodyError if a name is reserved or is a sampling parameter, so that it cannot be a template's variable.
    """
    given, place = body.chat_template_kwargs or {}, "chat_template_kwargs"
    if len(given) > MAX_KEYS:
        raise refuse(f"{place} must have at most {MAX_KEYS} fields, got {len(given)}", place)
    for name in given:
        param = f"{place}.{name}"
        if name in _NOT_FOR_TEMPLATES:
            raise refuse(f"{param} must not be given: leave it out", param)
        if name in PARAMETER_NAMES or name in ALIASES:
            raise refuse(f"{param} is a sampling parameter: move it out of {place}", param)
    flags = {name: value for name in _FLAGS if (value := getattr(body, name)) is not None}
    return {**effort_variables(getattr(body, "reasoning_effort", None), template), **given, **flags}


def constraint_of(asked: Format | NamedSchemaFormat | None) -> dict[str, Any]:
    """Return the constraint of a format as a field of SamplingParams, or {} if there is none."""
    match asked:
        case JsonObjectFormat(schema=schema):
            return {"json_schema": {"type": "object"} if schema is None else schema}
        case JsonSchemaFormat(json_schema=given) | (NamedSchemaFormat() as given):
            schema = {"type": "object"} if given.schema is None else given.schema
            return {"json_schema": schema if given.strict else not_strict(schema)}
        case StructuralTagFormat():
            return {"grammar": lark_of(asked)}
    return {}


def _bias_id(key: str, value: float) -> int:
    param = f"logit_bias.{key}"[:80]
    if not (key.isascii() and key.isdecimal() and len(key) <= _MOST_ID_DIGITS):
        raise refuse(f"logit_bias must have token ids as its keys, got {shown(key)}", param)
    if abs(value) > MAX_BIAS:
        raise refuse(f"{param} must be a number from -{MAX_BIAS} to {MAX_BIAS}, got {value:g}", param)
    return int(key)
