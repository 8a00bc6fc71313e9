"""Check patterns before compilation, and write a schema's pattern (ECMA-262) in llguidance's notation (Rust's)."""

import re
from collections.abc import Sequence
from typing import Any, NoReturn

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
    check_size(pattern, where, "pattern", MAX_PATTERN_BYTES)
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


def check_size(text: str, where: str, kind: str, most: int) -> None:
    """Raise InvalidRequestError if a text of this kind has more than `most` bytes, or is not valid text."""
    size = len(encoded(text, where))
    if size > most:
        raise InvalidRequestError(f"{where}: a {kind} must have at most {most} bytes, got {size}")


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


_PUNCTUATION_KEPT = frozenset("\\.+*?()|[]{}^$#&-~/")
_BRACED = re.compile(r"\\(?:[xu]\{[0-9a-fA-F]+\}|[pP]\{[\w=]+\})")
_LOOK = re.compile(r"\(\?(?:<?[=!])")
_MAX_EXCLUDED = 4_000  # characters of the strings that a pattern excludes
_MAX_GROUPS = 60  # nested groups: one per character of the longest excluded string
_SURROGATES = re.compile(r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_LINE_ENDS = "\\n\\r\\x{2028}\\x{2029}"
# White space of ECMA-262; Rust's has U+0085 and lacks U+FEFF.
_SPACES = (
    f"\\t\\x0b\\x0c \\xa0\\x{{1680}}\\x{{2000}}-\\x{{200a}}\\x{{202f}}\\x{{205f}}\\x{{3000}}\\x{{feff}}{_LINE_ENDS}"
)
_CLASSES = {"\\s": f"[{_SPACES}]", "\\S": f"[^\\x00{_SPACES}]"}
_NUL = re.compile(r"\\x00-|\\u0000-|\\0-|\x00-")
_RANGE = re.compile(r"([^\]\\])-([^\]\\])")
_LETTERS = frozenset("dDwWtnvfrxupP")  # with the same meaning after a backslash in both notations


def _refuse(at: int, problem: str) -> NoReturn:
    raise InvalidRequestError(f"pattern, column {at + 1}: {problem}")


def translated(pattern: str) -> str:
    """Return the pattern in Rust's notation. Raises InvalidRequestError if this is not possible.

    NUL is removed from negated classes: llguidance 1.9 lets a quote or a backslash through every class that contains
    all control characters.
    """
    found: list[str] = []
    at, depth = 0, 0
    while at < len(pattern):
        character = pattern[at]
        if depth and (nul := _NUL.match(pattern, at)):
            piece, at = "\\x01-", nul.end()
        elif character == "\\":
            piece, at = _escape(pattern, at, in_class=depth > 0)
        elif depth:
            piece, at, depth = _in_class(pattern, at)
        elif character == "[":
            piece, at, depth = _class_start(pattern, at)
        elif character == "{" and not _COUNT.match(pattern, at):
            piece, at = "\\{", at + 1
        elif _LOOK.match(pattern, at):
            _refuse(at, "look-around is not supported")
        elif character == ".":
            piece, at = f"[^{_LINE_ENDS}]", at + 1
        else:
            piece, at = character, at + 1
        found.append(piece)
    return "".join(found)


def _escape(pattern: str, at: int, *, in_class: bool) -> tuple[str, int]:
    character = pattern[at + 1 : at + 2]
    if in_class and character == "b":
        return "\\x08", at + 2
    if character in "bB":
        _refuse(at, "word boundaries are not supported")
    if (character.isdecimal() and character != "0") or (character == "k" and pattern[at + 2 : at + 3] == "<"):
        _refuse(at, "back references are not supported")
    if braced := _BRACED.match(pattern, at):
        return braced[0], braced.end()
    if pair := _SURROGATES.match(pattern, at):
        high, low = (int(half, 16) for half in pair.groups())
        return _spelt(chr(0x10000 + (high - 0xD800 << 10) + low - 0xDC00)), pair.end()
    if _SURROGATE.match(pattern, at):
        _refuse(at, "half of a surrogate pair is no character")
    if (own := _CLASSES.get(pattern[at : at + 2])) is not None:
        return own, at + 2
    if character == "0":
        return "\\x00", at + 2
    if character == "c" and pattern[at + 2 : at + 3].isalpha():
        return f"\\x{ord(pattern[at + 2]) % 32:02x}", at + 3
    if character.isalpha() and character not in _LETTERS:
        _refuse(at, f"\\{character} has no meaning in ECMAScript")
    return (pattern[at : at + 2] if character in _LETTERS | _PUNCTUATION_KEPT else character), at + 2


def _class_start(pattern: str, at: int) -> tuple[str, int, int]:
    if pattern.startswith("[^]", at):
        return "(?s:.)", at + 3, 0
    if pattern.startswith("[]", at):
        _refuse(at, "an empty class matches nothing")
    if pattern.startswith("[^", at):
        return "[^\\x00", at + 2, 1
    return "[", at + 1, 1


def _in_class(pattern: str, at: int) -> tuple[str, int, int]:
    character = pattern[at]
    if character == "]":
        return "]", at + 1, 0
    if ends := _RANGE.match(pattern, at):
        return "-".join(map(_spelt, ends.groups())), ends.end(), 1
    if character in "[&~" or (character == "-" and pattern.startswith("--", at)):
        return "\\" + character, at + 1, 1
    return character, at + 1, 1


def pattern_without(texts: Sequence[str]) -> str | None:
    """Return a pattern that matches every string except `texts`, or None if the pattern would be too long.

    A match leaves the tree of their prefixes at some node.
    """
    if sum(map(len, texts)) > _MAX_EXCLUDED or max(map(len, texts), default=0) > _MAX_GROUPS:
        return None
    root: dict[str, Any] = {}
    for text in texts:
        node = root
        for character in text:
            node = node.setdefault(character, {})
        node[""] = True
    return f"^(?:{_leaving(root)})$"


def _leaving(node: dict[str, Any]) -> str:
    characters = [character for character in node if character]
    options = [] if "" in node else ["()"]
    others = f"[^\\x00{''.join(map(_spelt, characters))}]" if characters else "(?s:.)"
    options.append(f"{others}(?s:.)*")
    options += [f"{_spelt(character)}(?:{_leaving(node[character])})" for character in characters]
    return "|".join(options)


def _spelt(character: str) -> str:
    return f"\\x{{{ord(character):x}}}"
