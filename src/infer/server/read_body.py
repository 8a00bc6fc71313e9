"""Read the bytes of a body as its Struct: tolerant of what other programs send, exact about broken rules."""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from infer.server.errors import ApiError
from infer.server.refusals import refuse, shown
from infer.server.unknown_fields import Reading, Step, flat, path_of, settle, type_info

_Body = TypeVar("_Body", bound=msgspec.Struct)
_PLACE = re.compile(r"(?:`key` in )?`\$(?P<path>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_EXPECTED = re.compile(r"Expected `(?P<types>.+?)`(?P<bound>.*?)(?:, got `.*`)?", re.DOTALL)
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")
_ESCAPE = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<half>\\u[dD][89a-fA-F]..)|\\.")
_TYPES = {"int": "an integer", "float": "a number", "str": "a string", "bool": "true or false", "array": "a list",
          "object": "an object"}  # fmt: skip
_BOUNDS = {" of length >= ": " with at least ", " of length <= ": " with at most ", " >= ": " of at least ",
           " <= ": " of at most ", " > ": " above ", " < ": " below ", " matching regex ": " like "}  # fmt: skip

Complete = Callable[[Any, Reading], Any]


def as_given(given: Any, reading: Reading) -> Any:
    return given


def read_body(
    content: bytes, kind: type[_Body], complete: Complete = as_given, reading: Reading | None = None
) -> _Body:
    """Return the body as a `kind`. Raises ApiError 400.

    Before that, `complete` converts what other programs send to what is read here.
    """
    reading = reading or Reading()
    try:
        given = msgspec.json.decode(content)
    except RecursionError:
        raise refuse("the body is nested too deep", None, "invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise refuse(f"the body is not JSON: {_why_not_json(content, error)}", None, "invalid_json") from None
    given = settle(complete(given, reading), kind, reading)
    try:
        body = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), given, kind, reading.given_names) from None
    _check_tags(given, body, [])
    return body


def _why_not_json(content: bytes, error: Exception) -> str:
    """Return the place of the fault in the body's text, or msgspec's message if the text is valid."""
    try:
        content.decode()
    except UnicodeDecodeError as fault:
        return f"byte {fault.start} (0x{content[fault.start]:02x}) is not UTF-8"
    for found in _ESCAPE.finditer(content):
        if half := found["half"]:
            return f"{half.decode()} at byte {found.start()} is half of a surrogate pair, such as a cut emoji"
    return str(error)


def _check_tags(given: Any, found: Any, steps: list[Step]) -> None:
    """Raise ApiError 400 for a missing tag. msgspec requires a tag only if several types are allowed at a place."""
    if isinstance(found, msgspec.Struct) and isinstance(given, dict):
        config = found.__struct_config__
        if config.tag is not None and config.tag_field not in given:
            raise _missing([*steps, str(config.tag_field)])
        for name in found.__struct_fields__:
            _check_tags(given.get(name), getattr(found, name), [*steps, name])
    elif isinstance(found, list) and found and isinstance(found[0], msgspec.Struct):
        for index, each in enumerate(found):
            _check_tags(given[index], each, [*steps, index])


def _missing(steps: list[Step]) -> ApiError:
    name = path_of(steps)
    return refuse(f"{name} is missing: it is required", name, "missing_required_parameter")


def _refusal(message: str, given: Any, kind: type, given_names: Mapping[str, str]) -> ApiError:
    """Return the refusal for msgspec's message, which ends in the place if it names one."""
    problem, _, tail = message.rpartition(" - at ")
    place = _PLACE.fullmatch(tail)
    problem, path = (problem, place["path"]) if place else (message, "")
    steps = [name or int(index) for name, index in _STEP.findall(path) if name != "..."]
    if missing := _MISSING.fullmatch(problem):
        return _missing([*steps, missing[1]])
    if steps and (alias := given_names.get(str(steps[0]))):
        message = f"{alias} is read as {steps[0]}: {path_of(steps)} must not be {shown(_value_at(given, steps))}"
        return refuse(message, alias)
    name, is_inside = path_of(steps), path.endswith("[...]")  # of a value inside an object msgspec tells no name
    whose = f"a value of {name}" if is_inside else name or "the body"
    found = "" if is_inside else f", got {shown(_value_at(given, steps))}"
    if expected := _EXPECTED.fullmatch(problem):
        is_type = "got `" in problem
        rule = _rule(expected["types"], expected["bound"])
    else:
        is_type, rule = False, " or ".join(f"'{each}'" for each in _choices_at(kind, steps, given))
    code = "invalid_type" if is_type else "invalid_value"
    return refuse(f"{whose} must be {rule}{found}", name or None, code)


def _rule(types: str, bound: str) -> str:
    """Return the expected types and their bound in words, from msgspec's names."""
    names = [_TYPES.get(each, each) for each in types.split(" | ") if each != "null"]
    for found, words in _BOUNDS.items():
        if bound.startswith(found):
            is_length = "length" in found
            number, unit = bound.removeprefix(found).removesuffix(".0"), " character" if types == "str" else " element"
            return " or ".join(names) + words + number + (unit + "s" * (number != "1") if is_length else "")
    return " or ".join(names) or "null"


def _value_at(given: Any, steps: list[Step]) -> Any:
    for step in steps:
        given = given.get(step) if isinstance(given, dict) else given[step]
    return given


# The types of a place


def _types_at(kind: type, steps: list[Step], given: Any) -> list[inspect.Type]:
    """Return the types that are allowed at a place. Of tagged Structs, only the one with the given tag is followed."""
    found = list(flat(type_info(kind)))
    for step in steps:
        inner = list[inspect.Type]()
        for each in found:
            if isinstance(each, inspect.ListType):
                inner += flat(each.item_type)
            elif isinstance(each, inspect.StructType) and _has_tag(each, given):
                inner += [one for field in each.fields if field.name == step for one in flat(field.type)]
        found, given = inner, _value_at(given, [step])
    return found


def _has_tag(found: inspect.StructType, given: Any) -> bool:
    return found.tag_field is None or given.get(found.tag_field) == found.tag


def _choices_at(kind: type, steps: list[Step], given: Any) -> list[Any]:
    """Return the values of an enumeration, or the tags that are allowed at a place."""
    values = [v for each in _types_at(kind, steps, given) if isinstance(each, inspect.LiteralType) for v in each.values]
    around = _types_at(kind, steps[:-1], given)
    tags = [each.tag for each in around if isinstance(each, inspect.StructType) and each.tag_field == steps[-1]]
    return values or tags
