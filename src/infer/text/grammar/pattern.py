"""Checks of a pattern's size before compilation: its length, its depth, and its size with its counts written out."""

import re

from infer.errors import InvalidRequestError

MAX_PATTERN_BYTES = 2048
MAX_DEPTH = 64
MAX_WRITTEN_OUT = 20_000

_END = {"^": "beginning", "$": "end"}
_ESCAPE = re.compile(r"\\(?:([xuU])|[pP])\{([^}]*)\}")  # an escape of a character's number, or of a class's name
_LAST_CHARACTER = 0x10FFFF
_COUNT = re.compile(r"\{(\d+)(?:,(\d*))?\}")


def check_pattern(pattern: str, where: str, *, allows_anchors: bool = True) -> None:
    """Raise InvalidRequestError that names the column, from 1, if a pattern is malformed or too large."""
    size = len(encoded(pattern, where))
    if size > MAX_PATTERN_BYTES:
        raise InvalidRequestError(f"{where}: a pattern must have at most {MAX_PATTERN_BYTES} bytes, got {size}")
    sizes, opened = [0], [0]  # of each open group: its size so far, and its start
    last, at = 0, 0  # `last` is the size of the item that a count would repeat
    while at < len(pattern):
        start, at = at, at + 1
        character = pattern[start]
        if character == "(":
            if len(sizes) > MAX_DEPTH:
                raise InvalidRequestError(f"{where}, column {at}: groups must be nested at most {MAX_DEPTH} deep")
            sizes.append(0)
            opened.append(start)
            continue
        if character == "{" and (count := _COUNT.match(pattern, start)):
            at = count.end()
            times = max(int(digits[:9] or 0) for digits in count.groups(default=""))
            added = last * max(times - 1, 0)
            last += added
        elif character == ")":
            if len(sizes) == 1:
                raise InvalidRequestError(f"{where}, column {at}: ')' closes no group")
            opened.pop()
            added = last = sizes.pop() + 1
        else:
            if character in "^$" and not allows_anchors:
                raise InvalidRequestError(
                    f"{where}, column {at}: {character!r} has a meaning only at the {_END[character]}"
                )
            if character == "\\" and at == len(pattern):
                raise InvalidRequestError(f"{where}, column {at}: '\\' escapes nothing")
            if character in "\\[":
                at = _escape_end(pattern, start, where) if character == "\\" else _class_end(pattern, at)
            added = last = 1
        sizes[-1] += added
        if sizes[-1] > MAX_WRITTEN_OUT:
            raise InvalidRequestError(
                f"{where}, column {start + 1}: longer than {MAX_WRITTEN_OUT} when its counts are written out"
            )
    if len(sizes) > 1:
        raise InvalidRequestError(f"{where}, column {opened[-1] + 1}: '(' is never closed")


def without_anchors(pattern: str) -> str:
    """Return an equal pattern for a match of the whole text, without `^` at its start and `$` at its end."""
    pattern = pattern.removeprefix("^")
    body = pattern.removesuffix("$")
    escaped = (len(body) - len(body.rstrip("\\"))) % 2 == 1
    return pattern if escaped else body


def encoded(text: str, where: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{where}: character {error.start + 1} is a lone surrogate, not valid text") from None


def _escape_end(pattern: str, start: int, where: str) -> int:
    """Return the index after an escape. Raises InvalidRequestError for a character beyond the last."""
    if (escape := _ESCAPE.match(pattern, start)) is None:
        return start + 2
    kind, digits = escape.groups()
    if kind and re.fullmatch("[0-9a-fA-F]+", digits) and int(digits, 16) > _LAST_CHARACTER:
        raise InvalidRequestError(
            f"{where}, column {start + 1}: {escape[0]:.40} is not a character: the last one is {_LAST_CHARACTER:X}"
        )
    return escape.end()


def _class_end(pattern: str, at: int) -> int:
    """Return the index after the bracket that closes a class. Classes nest, and a `]` at the start is a member."""
    at += pattern.startswith("^", at)
    at += pattern.startswith("]", at)
    depth = 1
    while at < len(pattern) and depth:
        if pattern[at] == "\\":
            at += 1
        else:
            depth += {"[": 1, "]": -1}.get(pattern[at], 0)
        at += 1
    return at
