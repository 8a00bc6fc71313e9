"""Convert a body to the library's sampling parameters, options and messages, as plain values."""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from infer.batch_file.row import seed_of
from infer.engine.request_options import RequestOptions
from infer.errors import ContextLengthError, InvalidRequestError
from infer.grammar.grammar import not_strict
from infer.sampling.defaults import default_params
from infer.sampling_params import ALIASES, PARAMETER_NAMES, SEED_BITS, SamplingParams
from infer.server.errors import ApiError
from infer.server.refusals import refuse, shown
from infer.server.response_items import OutputRefusal
from infer.server.schema import (
    AssistantMessage,
    CompletingBody,
    DeveloperMessage,
    Format,
    GeneratingBody,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    NamedSchemaFormat,
    RefusalPart,
    ToolMessage,
)

_MOST_BIAS = 100
# Fields of a body that go to SamplingParams by another name, and those that go by their own.
_RENAMED = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
}
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("repetition_window", "temperature_last", "ignore_eos", "stop", "stop_token_ids", "include_stop_str_in_output"),
    *("allowed_token_ids", "regex", "grammar", "choice"),
)
_OPTIONS = ("cache_salt", "priority", "overflow", "speculation", "num_draft_tokens")
_SHOWN = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "answer_prefix": "answer_token_ids"}
_OF_TOOLS = {name: name for name in ("tools", "tool_choice", "tool_format")} | {
    "reasoning_budget": "thinking_token_budget"
}
# How a message of the library begins, and what of a body it is about; of /v1/responses, where that differs.
_PLACES = (
    _SHOWN
    | _OF_TOOLS
    | {"json_schema": "response_format.json_schema.schema", "unknown keyword": "chat_template_kwargs"}
)
_PLACES_OF_RESPONSES = {"max_new_tokens": "max_output_tokens", "json_schema": "text.format.schema"}
_NOT_FOR_TEMPLATES = frozenset(
    {"messages", "chat_template", "allow_special", "tools", "add_generation_prompt", "continue_final_message"}
)


def sampling_values(body: GeneratingBody) -> dict[str, Any]:
    """Return the fields of SamplingParams that the body names, except the seed and log-probabilities."""
    names = {name: name for name in _SAME} | _RENAMED
    given = {name: getattr(body, name, None) for name in names}
    values = {names[name]: value for name, value in given.items() if value is not None}
    if "max_new_tokens" in values:
        values["max_new_tokens"] = token_limit(values["max_new_tokens"])
    if "stop" in values:
        values["stop"] = stops_of(values["stop"])
    if isinstance(body, CompletingBody):
        values |= constraint_of(body.response_format)
        if body.logit_bias:
            values["logit_bias"] = {_bias_id(key, value): value for key, value in body.logit_bias.items() if value}
    return values


def token_limit(given: int) -> int | None:
    """Return the maximum number of tokens of an answer, at least 1. -1 gives None: up to the end of the context."""
    return None if given < 0 else max(given, 1)


def stops_of(given: str | Sequence[str]) -> list[str]:
    """Return the stop strings that are not empty."""
    return [each for each in ([given] if isinstance(given, str) else given) if each]


def constraint_of(asked: Format | NamedSchemaFormat | None) -> dict[str, Any]:
    """Return the constraint that a format puts on an answer, as a field of SamplingParams; {} if there is none."""
    match asked:
        case JsonObjectFormat(schema=schema):
            return {"json_schema": {"type": "object"} if schema is None else schema}
        case JsonSchemaFormat(json_schema=JsonSchema(schema=schema, strict=strict)):
            return _schema({"type": "object"} if schema is None else schema, strict)
        case NamedSchemaFormat(schema=schema, strict=strict):
            return _schema(schema, strict)
    return {}


def _schema(schema: dict[str, Any], strict: bool | None) -> dict[str, Any]:
    return {"json_schema": schema if strict else not_strict(schema)}


def make_params(
    values: Mapping[str, Any], defaults: Mapping[str, Any], seeds: Sequence[int], prompt_name: str
) -> list[SamplingParams]:
    """Return one SamplingParams per seed, over the model's own defaults. Raises ApiError.

    If `prompt_name` is "prompt", the defaults for texts apply, else the defaults for chats.
    """
    try:
        first = default_params(defaults, is_chat=prompt_name != "prompt", **values)
        return [replace(first, seed=seed) for seed in seeds]
    except InvalidRequestError as error:
        raise refusal(error, prompt_name) from error


def make_options(body: GeneratingBody) -> RequestOptions:
    given = {name: getattr(body, name) for name in _OPTIONS}
    return RequestOptions(**{name: value for name, value in given.items() if value is not None})


def seeds_of(seed: int | None, num_choices: int) -> list[int]:
    """Return one seed per choice. The first is `seed` modulo 2⁶⁴, or random if it is None.

    The other seeds are hashes of the first one and the choice's index.
    """
    first = secrets.randbits(SEED_BITS) if seed is None else seed % 2**64
    others = [seed_of(first, str(index)) >> (64 - SEED_BITS) for index in range(1, num_choices)]
    return [first, *others]


def messages_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages as chat templates expect them.

    Each message has one text. The developer's role becomes system, and the arguments of calls become objects.
    """
    return [_message(message) for message in messages]


def check_template_variables(variables: Mapping[str, Any]) -> None:
    """Raise ApiError if a name is reserved or is a sampling parameter, so that it cannot be a template's variable."""
    for name in variables:
        param = f"chat_template_kwargs.{name}"
        if name in _NOT_FOR_TEMPLATES:
            raise refuse(f"{param} cannot be given: leave it out", param)
        if name in PARAMETER_NAMES or name in ALIASES:
            raise refuse(f"{param} says how an answer is sampled: give it beside chat_template_kwargs", param)


def template_variables(
    given: Mapping[str, Any] | None, add_generation_prompt: bool | None, continue_final_message: bool | None
) -> dict[str, Any]:
    """Return the template's variables, with both flags if they were given. Raises ApiError if a name cannot be a
    variable.
    """
    check_template_variables(given or {})
    own = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    return {**(given or {}), **{name: value for name, value in own.items() if value is not None}}


def refusal(error: InvalidRequestError, prompt_name: str) -> ApiError:
    """Return the library's error with the names of a body's fields. `prompt_name` is the field with the prompt."""
    message = str(error)
    if isinstance(error, ContextLengthError):
        return refuse(message, prompt_name, "context_length_exceeded")
    found = re.match(r"at most one of .* and (\w+)$|(unknown keyword|\w+)", message)
    name = (found[1] or found[2]) if found else ""
    places = _PLACES | _PLACES_OF_RESPONSES if prompt_name == "input" else _PLACES
    param = places.get(name, name if name in (*_SAME, "logit_bias") else prompt_name)
    for theirs, ours in (_SHOWN | _OF_TOOLS).items():
        message = message.replace(theirs, ours)
    return refuse(message, param)


def _bias_id(key: str, value: float) -> int:
    param = f"logit_bias.{key}"[:80]
    if not (key.isascii() and key.isdecimal()):
        raise refuse(f"logit_bias must have token ids as its keys, got {shown(key)}", param)
    if abs(value) > _MOST_BIAS:
        raise refuse(f"{param} must be a number from -100 to 100, got {value:g}", param)
    return int(key)


def _message(message: Message) -> dict[str, Any]:
    role = "system" if isinstance(message, DeveloperMessage) else message.__struct_config__.tag
    found: dict[str, Any] = {"role": role, "content": text_of(message.content)}
    if message.name is not None:
        found["name"] = message.name
    if isinstance(message, ToolMessage) and message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        if message.content is None:
            found["content"] = message.refusal or ""
        if (reasoning := message.reasoning_content or message.reasoning) is not None:
            found["reasoning_content"] = reasoning
        if message.tool_calls:
            found["tool_calls"] = [
                call_of_message(call.id, call.function.name, call.function.arguments) for call in message.tool_calls
            ]
    return found


def call_of_message(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a past call with its arguments as values, because templates serialize them themselves.

    `arguments` is a JSON object.
    """
    values = msgspec.json.decode(arguments, type=dict[str, Any])
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": values}}


def text_of(content: Any) -> str:
    """Return the text of a content. The texts of parts are joined; no content is an empty text."""
    if not isinstance(content, list):
        return content or ""
    return "".join(part.refusal if isinstance(part, RefusalPart | OutputRefusal) else part.text for part in content)
