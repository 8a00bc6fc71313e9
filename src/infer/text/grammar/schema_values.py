"""Checks of a schema's keywords that contain no schema, and their values in a grammar's form."""

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from infer.errors import InvalidRequestError
from infer.text.grammar.pattern import check_pattern, encoded
from infer.text.grammar.schema_part import TYPES, refuse, refuse_malformed
from infer.text.grammar.schema_pattern import PatternNotationError, translated

MAX_ENUM = 10_000
LARGEST = 10**18  # replaces larger upper bounds
MAX_COUNT = 1_000_000  # a larger upper bound of a length or count is no limit for any written text

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_OF_FOUR = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    f"(?:{_YEAR}-(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|{_YEAR}-(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|{_YEAR}-02-(?:0[1-9]|1[0-9]|2[0-8])|(?:[0-9]{{2}}{_OF_FOUR}|{_OF_FOUR}00)-02-29)"
)
_FRACTION = r"(?:\.[0-9]+)?"
_TIME = (
    f"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{_FRACTION}(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    f"|23:59:60{_FRACTION}(?:[zZ]|[+-]00:00))"
)
_L = "[a-zA-Z0-9]"
_LABEL = (
    f"{_L}(?:{_L}|[a-zA-Z0-9-]{_L}|[a-zA-Z0-9-](?:{_L}{_L}|-{_L}|(?:{_L}[a-zA-Z0-9-]|-{_L})[a-zA-Z0-9-]{{0,58}}{_L}))?"
)
FORMATS: dict[str, dict[str, Any]] = {  # llguidance's own dates, times and host names allow too much
    "date": {"pattern": f"^(?:{_DATE})$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}[tT]{_TIME}$"},
    "hostname": {"pattern": rf"^{_LABEL}(?:\.{_LABEL})*$", "maxLength": 253},
    **{name: {"format": name} for name in ("duration", "email", "ipv4", "ipv6", "uuid", "uri")},
}


def read_count(where: str, word: str, value: Any, pointer: str) -> int | None:
    """Return a count, or None for an upper bound that no written text reaches."""
    if not (_is_number(value) and value >= 0 and value == int(value)):
        refuse_malformed(where, pointer, f"{word!r} must be an integer from 0, got {value!r:.40}")
    return int(value) if word.startswith("min") or value <= MAX_COUNT else None


def read_number(where: str, word: str, value: Any, pointer: str) -> int | float:
    if not (_is_number(value) and (word != "multipleOf" or 0 < value < 1e300)):
        limit = " above 0" * (word == "multipleOf")
        refuse_malformed(where, pointer, f"{word!r} must be a finite number{limit}, got {value!r:.40}")
    found = _within(value, word)
    if word != "multipleOf" and (-found if word.lower().endswith("maximum") else found) >= LARGEST:
        refuse(
            where,
            pointer,
            f"{word!r} leaves only numbers beyond 10^18, which no grammar can enforce, got {value!r:.40}",
        )
    return found


def read_types(where: str, value: Any, pointer: str) -> list[str]:
    """Return the names in `type`, each once."""
    names = value if isinstance(value, list) else [value]
    for name in names:
        if name not in TYPES:
            refuse_malformed(where, pointer, f"'type' must be one of {', '.join(TYPES)}, got {name!r:.40}")
    return list(dict.fromkeys(names))


def check_constants(where: str, values: list[Any], pointer: str) -> None:
    """Raise SchemaError for lone surrogates, which JSON may spell, and for numbers that no float represents."""
    if len(values) > MAX_ENUM:
        refuse(where, pointer, f"'enum' must have at most {MAX_ENUM} values, got {len(values)}")
    pending = list(values)
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            check_texts(where, [value], pointer)
        elif isinstance(value, Mapping):
            pending += [*value, *value.values()]
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, float) and not math.isfinite(value):
            refuse(where, pointer, "a number is larger than a float can be")
        elif isinstance(value, int) and abs(value) > 1 << 53 and (abs(value) >= 1e300 or int(float(value)) != value):
            refuse(where, pointer, f"the number {value} has more digits than a grammar can enforce")


def read_names(where: str, word: str, value: Any, pointer: str) -> list[str]:
    """Return the names, each once."""
    if not isinstance(value, list):
        refuse_malformed(where, pointer, f"{word!r} must be a list, got {value!r:.40}")
    if not all(isinstance(name, str) for name in value):
        refuse_malformed(where, pointer, f"{word!r} must be a list of strings")
    check_texts(where, value, pointer)
    return list(dict.fromkeys(value))


def read_pattern(where: str, pattern: str, pointer: str) -> str:
    """Return the pattern in the library's notation."""
    try:
        check_pattern(pattern, "pattern")
        return translated(pattern)
    except InvalidRequestError as error:
        refuse(where, pointer, str(error))
    except PatternNotationError as error:
        refuse(where, pointer, f"pattern, column {error.column}: {error}")


def check_texts(where: str, texts: Iterable[str], pointer: str) -> None:
    for text in texts:
        try:
            encoded(text, "a text")
        except InvalidRequestError as error:
            refuse(where, pointer, str(error))


def _within(value: int | float, word: str) -> int | float:
    """Return a bound with more digits than a float has, moved inwards to a number that a float represents."""
    is_upper = word.lower().endswith("maximum")
    if word != "multipleOf" and (value > LARGEST if is_upper else value < -LARGEST):
        return LARGEST if is_upper else -LARGEST  # the largest range of llguidance
    if isinstance(value, float) or word == "multipleOf" or int(float(value)) == value:
        return value
    near = float(value)
    if (int(near) > value) == is_upper:
        near = math.nextafter(near, -math.inf if is_upper else math.inf)
    return int(near)


def _is_number(value: Any) -> bool:
    """Return True for a finite number up to the largest float, which some schemas use as no bound at all."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
