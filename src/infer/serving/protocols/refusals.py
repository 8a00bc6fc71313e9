"""Refusals of bodies: the field's path, and a message that names the value, the rule and the fix."""

from typing import Any, final

from infer.errors import InvalidRequestError


@final
class BodyError(InvalidRequestError):
    """A body breaks a rule. `param` is the path of the field in the body, `code` one of OpenAI's."""

    def __init__(self, message: str, param: str | None, code: str = "invalid_value") -> None:
        super().__init__(message, param=param)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.param, self.code)


def refuse(message: str, param: str | None, code: str = "invalid_value") -> BodyError:
    return BodyError(message, param, code)


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
