"""What a body is refused with: 400, the field's path, and a message that names value, rule and fix."""

from typing import Any

from infer.server.errors import ApiError


def refuse(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def shown(value: Any) -> str:
    """A value of JSON in a message, which repeats nothing long."""
    match value:
        case dict():
            return "an object"
        case list():
            return f"a list of {len(value)}"
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
    return f"{value!r:.80}"
