"""Convert the body of an OpenAI request to a prompt and fields of `SamplingParams`. Nothing is ignored silently."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from infer.errors import InvalidRequestError
from infer.grammar.grammar import not_strict
from infer.sampling_params import ALIASES, PARAMETER_NAMES

# Fields that ask for nothing: any value, or the one that says so.
_ANYTHING = frozenset({"model", "user", "metadata", "safety_identifier", "prompt_cache_key"})
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,), "best_of": (1,), "stream": (False,), "stream_options": (), "store": (False,), "echo": (False,),
    "service_tier": ("auto", "default"), "modalities": (["text"],),
}  # fmt: skip
_PROMPTS = ("messages", "prompt")
_OWN = ("logprobs", "top_logprobs", "response_format")
# Fields of RequestOptions, and what OpenAI and vLLM call what is one by another name.
TOOL_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls", "tool_format", "reasoning_format", "reasoning_budget")
_OPTIONS = (*TOOL_OPTIONS[:-1], "thinking_token_budget", "reasoning_effort")


def prompt_of_body(body: Mapping[str, Any], *, is_chat: bool) -> str | Sequence[int] | Sequence[Mapping[str, Any]]:
    """Return the prompt. Raises InvalidRequestError if it is missing or has another type."""
    name, other = _PROMPTS if is_chat else _PROMPTS[::-1]
    found = body.get(name)
    if other in body:
        raise InvalidRequestError(f"{other} belongs to another url")
    if is_chat and found == []:
        raise InvalidRequestError("messages must hold at least one message, got none")
    if is_chat and isinstance(found, list):
        return [_message(each) for each in found]
    if not is_chat and isinstance(found, str | list):
        return found
    raise InvalidRequestError(f"body.{name} must be {'a list' if is_chat else 'a text or ids'}, got {found!r:.60}")


def params_of_body(body: Mapping[str, Any], *, is_chat: bool) -> dict[str, Any]:
    """Return the fields of SamplingParams. Null counts as absent.

    Raises InvalidRequestError for an unknown field, and for a value that is not built.
    """
    given = {name: value for name, value in body.items() if value is not None and name not in _PROMPTS}
    values = {}
    for name, value in given.items():
        if name in _ANYTHING or name in _OWN or (is_chat and name in _OPTIONS):
            continue
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise InvalidRequestError(f"{name} {value!r:.60} is not served here: leave it out")
        elif name in PARAMETER_NAMES or name in ALIASES:
            values[ALIASES.get(name, name)] = value
        else:
            raise InvalidRequestError(_unknown(name))
    return values | _log_probabilities(given, is_chat=is_chat) | _format(given.get("response_format"))


def options_of_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of RequestOptions. Raises InvalidRequestError."""
    given = {name: body[name] for name in _OPTIONS if body.get(name) is not None}
    budget, effort = given.pop("thinking_token_budget", None), given.pop("reasoning_effort", None)
    if effort not in (None, "none"):
        raise InvalidRequestError(f"reasoning_effort {effort!r:.60} is not served here: leave it out")
    if not given.get("tools"):
        given.pop("tools", None)
    budget = 0 if effort == "none" else budget
    return given if budget is None else given | {"reasoning_budget": budget}


def _message(message: object) -> Mapping[str, Any]:
    """Return the message with its text parts joined, because templates take one text. Raises InvalidRequestError."""
    if isinstance(message, dict) and isinstance(parts := message.get("content"), list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
            raise InvalidRequestError("a message's content may have parts of type text alone")
        return message | {"content": "".join(str(part.get("text", "")) for part in parts)}
    if not isinstance(message, dict):
        raise InvalidRequestError(f"a message must be an object with role and content, got {message!r:.60}")
    return message


def _log_probabilities(given: Mapping[str, Any], *, is_chat: bool) -> dict[str, Any]:
    asked, top = given.get("logprobs"), given.get("top_logprobs")
    if not is_chat:
        return {} if asked is None else {"logprobs": asked}
    if asked not in (None, True, False) or (top is not None and asked is not True):
        raise InvalidRequestError("logprobs must be true or false, and top_logprobs needs logprobs: true")
    return {"logprobs": top or 0} if asked else {}


def _format(asked: Any) -> dict[str, Any]:
    match asked:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"json_schema": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)} as given}:
            return {"json_schema": schema if given.get("strict") is True else not_strict(schema)}
    raise InvalidRequestError(f"response_format must be text, json_object or json_schema, got {asked!r:.80}")


def _unknown(name: str) -> str:
    known = [*PARAMETER_NAMES, *ALIASES, *_ANYTHING, *_NEUTRAL, *_OWN, *_OPTIONS]
    near = difflib.get_close_matches(name, known, n=1)
    return f"{name} is not known here" + (f": did you mean {near[0]}?" if near else "; leave it out")
