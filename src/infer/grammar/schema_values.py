"""The values of a schema's words that contain no schema: checked, and limited to values that a grammar represents."""

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from infer.errors import InvalidRequestError, SchemaError
from infer.grammar.pattern import check_pattern, encoded
from infer.grammar.schema_node import refuse
from infer.grammar.schema_pattern import PatternNotationError, translated

MAX_ENUM = 10_000
LARGEST = 10**18  # an upper bound above it is this
MAX_COUNT = 1_000_000  # a larger upper bound of a length or count bounds nothing that is ever written


def read_count(where: str, word: str, value: Any, pointer: str) -> int | None:
    """Return a count, or None for an upper bound that no written text reaches."""
    if not (_is_number(value) and value >= 0 and value == int(value)):
        refuse(where, pointer, f"{word!r} must be an integer from 0, got {value!r:.40}")
    return int(value) if word.startswith("min") or value <= MAX_COUNT else None


def read_number(where: str, word: str, value: Any, pointer: str) -> int | float:
    if not (_is_number(value) and (word != "multipleOf" or 0 < value < 1e300)):
        limit = " above 0" * (word == "multipleOf")
        refuse(where, pointer, f"{word!r} must be a finite number{limit}, got {value!r:.40}")
    return _within(value, word)


def read_constants(where: str, word: str, value: Any, pointer: str) -> Any:
    """Return the values of `enum` or `const` unchanged, after a check."""
    values = value if word == "enum" else [value]
    if not isinstance(values, list):
        refuse(where, pointer, f"'enum' must be a list, got {value!r:.40}")
    if len(values) > MAX_ENUM:
        refuse(where, pointer, f"'enum' may have {MAX_ENUM} values, got {len(values)}")
    _check_exact(where, values, pointer)
    return value


def read_names(where: str, word: str, value: Any, pointer: str) -> list[str]:
    """Return the names, each once."""
    if not isinstance(value, list):
        refuse(where, pointer, f"{word!r} must be a list, got {value!r:.40}")
    if not all(isinstance(name, str) for name in value):
        refuse(where, pointer, f"{word!r} must be a list of strings")
    check_texts(where, value, pointer)
    return list(dict.fromkeys(value))


def check_texts(where: str, texts: Iterable[str], pointer: str) -> None:
    for text in texts:
        if not text.isascii():
            _check_text(where, text, pointer)


def _check_text(where: str, text: str, pointer: str) -> None:
    place = f"{where} at {pointer or '/'}"
    try:
        encoded(text, place)
    except InvalidRequestError as error:
        raise SchemaError(str(error), pointer, str(error).removeprefix(f"{place}: ")) from None


def check_schema_pattern(where: str, pattern: str, pointer: str) -> None:
    try:
        check_pattern(pattern, "pattern")
    except InvalidRequestError as error:
        refuse(where, pointer, str(error))
    try:
        translated(pattern)
    except PatternNotationError as error:
        refuse(where, pointer, f"pattern, column {error.column}: {error}")


def _check_exact(where: str, values: list[Any], pointer: str) -> None:
    """Raise InvalidRequestError for lone surrogates, which JSON may spell, and for numbers that no float represents."""
    pending = list(values)
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            check_texts(where, [value], pointer)
        elif isinstance(value, Mapping):
            pending += [*value, *value.values()]
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, int) and abs(value) > 1 << 53 and (abs(value) >= 1e300 or int(float(value)) != value):
            refuse(where, pointer, f"the number {value} has more digits than a grammar can hold")


def _within(value: int | float, word: str) -> int | float:
    """Return a bound with more digits than a float has, moved inwards to one that a float represents."""
    is_upper = word.lower().endswith("maximum")
    if word != "multipleOf" and (value > LARGEST if is_upper else value < -LARGEST):
        return LARGEST if is_upper else -LARGEST  # llguidance writes no larger ranges
    if isinstance(value, float) or word == "multipleOf" or int(float(value)) == value:
        return value
    near = float(value)
    if (int(near) > value) == is_upper:
        near = math.nextafter(near, -math.inf if is_upper else math.inf)
    return int(near)


def _is_number(value: Any) -> bool:
    """Return True for a finite number, up to the largest float, which some schemas write for no bound at all."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
