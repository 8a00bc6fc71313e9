"""Read the bytes of a body as its Struct: tolerant of other programs' formats, exact about broken rules."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from infer.serving.protocols.body_fields import BodyError, Reading, refuse, settle, shown
from infer.system.files.json_limits import JsonLimitError, check_limits

_Body = TypeVar("_Body", bound=msgspec.Struct)
_ESCAPE = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<half>\\u[dD][89a-fA-F]..)|\\.")

Complete = Callable[[Any, Reading], Any]


def as_given(given: Any, reading: Reading) -> Any:
    return given


def read_body(
    content: bytes, kind: type[_Body], complete: Complete = as_given, reading: Reading | None = None
) -> _Body:
    """Return the body as a `kind`. Raises BodyError.

    Before that, `complete` converts other programs' formats to known ones.
    """
    check_body(content)
    try:
        given = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise refuse(f"the body is not JSON: {_why_not_json(content, error)}", None, "invalid_json") from None
    return body_from(given, kind, complete, reading or Reading())


def check_body(content: bytes) -> None:
    """Check the limits of a body's JSON, before a parser reads it. Raises BodyError."""
    try:
        check_limits(content)
    except JsonLimitError as error:
        raise refuse(f"the body is {error}", None, "invalid_json") from None


def body_from(given: Any, kind: type[_Body], complete: Complete, reading: Reading) -> _Body:
    """Return the body of parsed JSON. Raises BodyError."""
    given = settle(complete(given, reading), kind, reading)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), given, reading) from None


def _why_not_json(content: bytes, error: Exception) -> str:
    """Return where the text of the body is wrong, or msgspec's message if the text is valid."""
    try:
        content.decode()
    except UnicodeDecodeError as fault:
        return f"byte {fault.start} (0x{content[fault.start]:02x}) is not UTF-8"
    for found in _ESCAPE.finditer(content):
        if half := found["half"]:
            return f"{half.decode()} at byte {found.start()} is half of a surrogate pair, for example of an emoji"
    return str(error)


def _refusal(message: str, given: Any, reading: Reading) -> BodyError:
    """Return the refusal for msgspec's message, which ends in the place of the value: "… - at `$.stop[0]`"."""
    problem, is_inside, place = message.rpartition(" - at `$")
    if not is_inside:
        problem, place = message, ""
    path = place.removesuffix("`").removeprefix(".")
    if problem.startswith("Object missing required field"):
        field = problem.split("`")[1]
        path = f"{path}.{field}" if path else field
        return refuse(f"{path} is missing: it is required", path, "missing_required_parameter")
    code = "invalid_type" if ", got `" in problem else "invalid_value"
    if path.endswith("[...]"):  # msgspec does not name the key of a value inside an object
        path, found = path.removesuffix("[...]"), ""
    else:
        found = f", got {shown(_value_at(given, path))}"
    rule = problem.partition(", got `")[0].replace("Expected ", "expected ")
    given_name = reading.given_names.get(path.partition(".")[0].partition("[")[0])
    whose = f"{given_name} is read as {path}" if given_name else path or "the body"
    return refuse(f"{whose}: {rule}{found}", given_name or path or None, code)


def _value_at(given: Any, path: str) -> Any:
    """Return the value at a path such as `messages[0].role`."""
    for step in path.replace("]", "").replace("[", ".").split("."):
        if step:
            given = given[int(step)] if isinstance(given, list) else given[step]
    return given
