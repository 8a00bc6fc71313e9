"""Simple facts about values, and about schemas with resolved references: kinds, constants, ranges."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from infer.grammar.schema_node import Node

_MAX_MATCHED = 100  # characters
_FORMATS_APART = (
    frozenset({"date-time", "date", "time", "duration", "ipv4", "ipv6", "uuid", "email"}),
    frozenset({"date-time", "date", "time", "duration", "ipv4", "uuid", "email", "uri"}),
    frozenset({"hostname", "email", "time", "date-time", "ipv6"}),
    frozenset({"hostname", "uri"}),
)
_REPEATED_GROUP = re.compile(r"\)[*+{?]|\\[1-9]")
_OTHER_NOTATION = re.compile(r"\[\[|&&|--|~~|\|\||\(\?[^:]")
_REPEATS = re.compile(r"[*+{]")
_PREFIX = re.compile(r"\^((?:[\w /:@#%&=~,;<>!\"'-]|\\[./\-:@#])+)(?![\w /:@#%&=~,;<>!\"'-])(?P<count>[*+?{])?")


def kind_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == math.floor(value) else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def same(a: Any, b: Any) -> bool:
    return key_of(a) == key_of(b)


def key_of(value: Any) -> str:
    """Return a key that is equal for equal values: 1 and 1.0 are equal, and so are objects in any order."""
    if isinstance(value, float) and value == math.floor(value):
        value = int(value)
    if isinstance(value, list):
        return "[" + ",".join(map(key_of, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(sorted(f"{json.dumps(name)}:{key_of(item)}" for name, item in value.items())) + "}"
    return json.dumps(value)


def values_of(node: Node) -> list[Any] | None:
    """Return the node's constants, or None if it has none."""
    if "const" in node:
        return [node["const"]]
    found: list[Any] | None = node.get("enum")
    return found


def matches(pattern: str, text: str) -> bool | None:
    """Return True if the pattern matches the text, or None if this is unknown.

    It is unknown for patterns on which another engine could take exponential time.
    """
    if _REPEATED_GROUP.search(pattern) or _OTHER_NOTATION.search(pattern) or len(_REPEATS.findall(pattern)) > 3:
        return None
    if len(text) > _MAX_MATCHED or not text.isascii() or text.endswith("\n"):
        return None
    try:
        return re.search(pattern, text, re.ASCII) is not None
    except (re.error, OverflowError):
        return None


def property_nodes(part: Node, name: str) -> Iterator[Node]:
    """Yield the schemas that a property of this name must fulfil, as far as they are known."""
    is_named = name in part.get("properties", ())
    if is_named:
        yield part["properties"][name]
    is_surely_other = not is_named
    for pattern, node in part.get("patternProperties", {}).items():
        matched = matches(pattern, name)
        is_surely_other = is_surely_other and matched is False
        if matched:
            yield node
    if is_surely_other and "additionalProperties" in part:
        yield part["additionalProperties"]


def item_node(part: Node, index: int) -> Node:
    first = part.get("prefixItems", ())
    found: Node = first[index] if index < len(first) else part.get("items", Node(part.pointer, {}))
    return found


def bounds(node: Node) -> tuple[int | float, bool, int | float, bool]:
    """Return the minimum and the maximum, each followed by True if it is exclusive."""
    least, most = node.get("minimum", -math.inf), node.get("maximum", math.inf)
    above, below = node.get("exclusiveMinimum", -math.inf), node.get("exclusiveMaximum", math.inf)
    return max(least, above), above >= least and above > -math.inf, min(most, below), below <= most and below < math.inf


def is_within(node: Node, value: int | float) -> bool:
    least, is_above, most, is_below = bounds(node)
    if isinstance(node.get("multipleOf"), int) and isinstance(value, int) and value % node["multipleOf"]:
        return False
    return least <= value <= most and not (is_above and value == least) and not (is_below and value == most)


def are_numbers_apart(every: list[Node]) -> bool:
    known = [(-math.inf, False, math.inf, False), *map(bounds, every)]
    least, most = max(bound[0] for bound in known), min(bound[2] for bound in known)
    if least != most:
        return least > most
    return any((is_above and low == least) or (is_below and high == most) for low, is_above, high, is_below in known)


def are_strings_apart(a: list[Node], b: list[Node]) -> bool:
    every = [*a, *b]
    least = max((part.get("minLength", 0) for part in every), default=0)
    if least > min((part.get("maxLength", math.inf) for part in every), default=math.inf):
        return True
    formats = {part["format"] for part in every if "format" in part}
    if any(len(formats & apart) > 1 for apart in _FORMATS_APART):
        return True
    prefixes = [prefix for part in every if (prefix := literal_prefix(part.get("pattern", "")))]
    return any(not (x.startswith(y) or y.startswith(x)) for x in prefixes for y in prefixes)


def literal_prefix(pattern: str) -> str:
    """Return a prefix of every text that the pattern matches, as far as it is simple to find."""
    match = _PREFIX.match(pattern)
    if match is None or "|" in pattern:
        return ""
    text = re.sub(r"\\(.)", r"\1", match[1])
    return text[:-1] if match["count"] else text
