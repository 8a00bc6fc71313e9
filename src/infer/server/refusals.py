"""Refusals of bodies: status 400, the field's path, and a message that names the value, the rule and the fix."""

from typing import Any

from infer.server.errors import ApiError


def refuse(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def shown(value: Any) -> str:
    """Return a JSON value as text for a message, without long contents."""
    match value:
        case dict():
            return "an object"
        case list():
            return f"a list of {len(value)}"
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
    return f"{value!r:.80}"
