"""Past calls with their arguments as values, because chat templates write the arguments themselves.

Clients send a call back as they received it, and a truncated answer has only a part of its arguments.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from infer.system.json_limits import JsonLimitError, check_limits, refuse_constant

Message = Mapping[str, Any]
INVALID = "INVALID_JSON"


def past_arguments(given: Any) -> tuple[dict[str, Any], str | None]:
    """Return the arguments of a past call as an object, and a warning if they are not a JSON object.

    An empty text, null and an empty list, which is PHP's empty object, are `{}`. Some clients encode an object twice.
    Anything else becomes `{"INVALID_JSON": text}`.
    """
    if isinstance(given, dict):
        return given, None
    try:
        values = _decoded(_decoded(given))
        if isinstance(values, dict):
            json.dumps(values, ensure_ascii=False, allow_nan=False).encode()  # a lone surrogate is not text
            return values, None
        problem = f"they are {_written(values):.40}"
    except JsonLimitError as error:
        problem = f"they are {error}"
    except UnicodeEncodeError:
        problem = "they contain a lone surrogate"
    except ValueError as error:
        problem = str(error)
    text = given if isinstance(given, str) else _written(given)
    return {INVALID: text}, f'the arguments are not a JSON object ({problem:.120}): shown as {{"{INVALID}": …}}'


def _decoded(value: Any) -> Any:
    """Return the value of a JSON text, or the value itself; {} for a value that means an empty object."""
    if isinstance(value, str):
        check_limits(value)
        value = json.loads(value, parse_constant=refuse_constant) if value.strip() else None
    return {} if value in (None, []) else value


def with_values(messages: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """Return the messages with every call's arguments as an object, and a warning for each that is not one."""
    found, warnings = list[Any](), list[str]()
    for index, message in enumerate(messages):
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        if not isinstance(calls, list | tuple):
            found.append(message)
            continue
        shown = list[Any]()
        for number, call in enumerate(calls):
            call, warning = _call_with_values(call)
            shown.append(call)
            if warning is not None:
                warnings.append(f"messages[{index}].tool_calls[{number}]: {warning}")
        found.append({**message, "tool_calls": shown})
    return found, warnings


def _call_with_values(call: Any) -> tuple[Any, str | None]:
    match call:
        case {"function": Mapping() as function}:
            values, warning = past_arguments(function.get("arguments"))
            return {**call, "function": {**function, "arguments": values}}, warning
    return call, None


def _written(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return repr(value)
