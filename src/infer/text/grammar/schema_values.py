"""Values of a schema's keywords in a grammar's form, and the targets of its references.

A reference is a JSON pointer, or a name that `$id` or `$anchor` gives.
"""

import math
import sys
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, final
from urllib.parse import unquote

from infer.errors import InvalidRequestError
from infer.text.grammar.patterns import check_pattern, encoded, translated
from infer.text.grammar.schema_logic import TYPES, refuse, refuse_malformed

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


def properties_of(schema: Any) -> Mapping[str, Any]:
    """Return the value of `properties`, or {} if it is malformed or there is none."""
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def is_required(schema: Any) -> bool:
    """Return True if the schema of a property has the boolean of draft 3."""
    return isinstance(schema, Mapping) and schema.get("required") is True


def read_count(word: str, value: Any, pointer: str) -> int | None:
    """Return a count, or None for an upper bound that no written text reaches."""
    if not (_is_number(value) and value >= 0 and value == int(value)):
        refuse_malformed(pointer, f"{word!r} must be an integer from 0, got {value!r:.40}")
    return int(value) if word.startswith("min") or value <= MAX_COUNT else None


def read_number(word: str, value: Any, pointer: str) -> int | float:
    if not (_is_number(value) and (word != "multipleOf" or 0 < value < 1e300)):
        limit = " above 0" * (word == "multipleOf")
        refuse_malformed(pointer, f"{word!r} must be a finite number{limit}, got {value!r:.40}")
    found = _within(value, word)
    if word != "multipleOf" and (-found if word.lower().endswith("maximum") else found) >= LARGEST:
        problem = f"{word!r} leaves only numbers beyond 10^18, which no grammar can enforce, got {value!r:.40}"
        refuse(pointer, problem)
    return found


def read_types(value: Any, pointer: str) -> list[str]:
    """Return the names in `type`, each once."""
    names = value if isinstance(value, list) else [value]
    for name in names:
        if name not in TYPES:
            refuse_malformed(pointer, f"'type' must be one of {', '.join(TYPES)}, got {name!r:.40}")
    return list(dict.fromkeys(names))


def check_constants(values: list[Any], pointer: str) -> None:
    """Raise SchemaError for lone surrogates, which JSON may spell, and for numbers that no float represents."""
    if len(values) > MAX_ENUM:
        refuse(pointer, f"'enum' must have at most {MAX_ENUM} values, got {len(values)}")
    pending = list(values)
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            check_texts([value], pointer)
        elif isinstance(value, Mapping):
            pending += [*value, *value.values()]
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, float) and not math.isfinite(value):
            refuse(pointer, "a number is larger than a float can be")
        elif isinstance(value, int) and abs(value) > 1 << 53 and (abs(value) >= 1e300 or int(float(value)) != value):
            refuse(pointer, f"the number {value} has more digits than a grammar can enforce")


def read_names(word: str, value: Any, pointer: str) -> list[str]:
    """Return the names, each once."""
    if not isinstance(value, list):
        refuse_malformed(pointer, f"{word!r} must be a list, got {value!r:.40}")
    if not all(isinstance(name, str) for name in value):
        refuse_malformed(pointer, f"{word!r} must be a list of strings")
    check_texts(value, pointer)
    return list(dict.fromkeys(value))


def read_pattern(pattern: str, pointer: str) -> str:
    """Return the pattern in the library's notation."""
    try:
        check_pattern(pattern, "pattern")
        return translated(pattern)
    except InvalidRequestError as error:
        refuse(pointer, str(error))


def check_texts(texts: Iterable[str], pointer: str) -> None:
    for text in texts:
        try:
            encoded(text, "a text")
        except InvalidRequestError as error:
            refuse(pointer, str(error))


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


_DATA = ("enum", "const", "default", "examples")  # keywords whose values are not schemas


@final
class References:
    """A schema and the named places inside it. Raises SchemaError for a reference that leads elsewhere.

    A pointer is relative to a base: the pointer of the nearest schema around it that has an `$id`. A URI must be
    spelled as in the `$id`.
    """

    def __init__(self, root: Any) -> None:
        self.draft = draft_of(root)
        self._root = root
        self._id_word = "id" if self.draft <= 4 else "$id"

    def base_within(self, raw: Mapping[str, Any], pointer: str, base: str) -> str:
        """Return the base of references in the schema `raw` at `pointer`. `base` belongs to the surrounding schema."""
        own = raw.get(self._id_word)
        return pointer if isinstance(own, str) and not own.startswith("#") else base

    def target(self, reference: str, pointer: str, base: str) -> str:
        """Return the pointer of the target of a reference in the schema at `pointer`."""
        uri, _, fragment = reference.partition("#")
        start = self._pointers.get(uri) if uri else base
        if fragment and not fragment.startswith("/"):
            start, fragment = self._pointers.get(f"#{fragment}"), ""
        if start is None:
            refuse(pointer, f"'$ref' must stay in the schema (#/...), got {reference!r:.80}")
        return start + unquote(fragment)

    def at(self, pointer: str, asked_at: str) -> tuple[Any, str]:
        """Return the schema at `pointer` and the base around it. `asked_at` is the place of the reference."""
        raw, base, passed = self._root, "", ""
        for step in pointer.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(raw, Mapping):
                base = self.base_within(raw, passed, base)
                raw = raw.get(name)
            else:
                is_place = isinstance(raw, list) and name.isdecimal() and int(name[:9]) < len(raw)
                raw = raw[int(name)] if is_place else None
            passed = f"{passed}/{step}"
        if not isinstance(raw, Mapping | bool):
            refuse_malformed(asked_at, f"'$ref' leads to no schema: {'#' + pointer!r:.80}")
        return raw, base

    @cached_property
    def _pointers(self) -> dict[str, str | None]:
        """The pointer of each `$id`, and of each anchor after a `#`. None for a name with several places."""
        found: dict[str, str | None] = {}
        pending: list[tuple[Any, str]] = [(self._root, "")]
        while pending:
            raw, pointer = pending.pop()
            if isinstance(raw, Mapping):
                anchor = raw.get("$anchor")
                for name in (raw.get(self._id_word), f"#{anchor}" if isinstance(anchor, str) else None):
                    if isinstance(name, str):
                        name = name if name.startswith("#") else name.removesuffix("#")
                        found[name] = None if name in found else pointer
            inner = raw.items() if isinstance(raw, Mapping) else enumerate(raw) if isinstance(raw, list) else ()
            pending += [(item, f"{pointer}/{escaped(str(name))}") for name, item in inner if name not in _DATA]
        return found


def draft_of(root: Any) -> int:
    """Return the draft that `$schema` names, or 2020 if it names no known draft."""
    named = root.get("$schema") if isinstance(root, Mapping) else None
    for draft in (3, 4, 6, 7):
        if isinstance(named, str) and f"draft-0{draft}" in named:
            return draft
    return 2019 if isinstance(named, str) and "2019-09" in named else 2020


def escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
