"""Past calls with their arguments as values, because chat templates write the arguments themselves.

Clients send a call back as they received it, and a truncated answer has only a part of its arguments.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from infer.system.json_limits import JsonLimitError, check_limits, refuse_constant

Message = Mapping[str, Any]
INVALID = "INVALID_JSON"


def past_arguments(text: str | None) -> tuple[dict[str, Any], str | None]:
    """Return the arguments of a past call as an object, and a warning if the text is not a JSON object.

    An empty text or null is `{}`. Any other text that is not an object becomes `{"INVALID_JSON": text}`.
    """
    if text is None or not text.strip():
        return {}, None
    try:
        check_limits(text)
        found = json.loads(text, parse_constant=refuse_constant)
        if not isinstance(found, dict):
            problem = f"they are {json.dumps(found):.40}"
        else:
            json.dumps(found, ensure_ascii=False).encode()  # a lone surrogate is not text
            return found, None
    except JsonLimitError as error:
        problem = f"they are {error}"
    except UnicodeEncodeError:
        problem = "they contain a lone surrogate"
    except ValueError as error:
        problem = str(error)
    return {INVALID: text}, f'the arguments are not a JSON object ({problem:.120}): shown as {{"{INVALID}": …}}'


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
            arguments = function.get("arguments")
            if isinstance(arguments, Mapping):
                return call, None
            text = arguments if isinstance(arguments, str | None) else _written(arguments)
            values, warning = past_arguments(text)
            return {**call, "function": {**function, "arguments": values}}, warning
    return call, None


def _written(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return repr(value)
