"""A pattern that matches every string except some. A match leaves the tree of their prefixes at some node."""

from collections.abc import Sequence
from typing import Any

_MAX_CHARACTERS = 4_000
_MAX_DEPTH = 60  # groups nest as deep as the longest string
_ANY = "(?s:.)*"


def pattern_without(texts: Sequence[str]) -> str | None:
    """Return a pattern that matches every string except `texts`, or None if these are too long for a pattern."""
    if sum(map(len, texts)) > _MAX_CHARACTERS or max(map(len, texts), default=0) > _MAX_DEPTH:
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
    others = f"[^{''.join(map(_spelt, characters))}]" if characters else "(?s:.)"
    options.append(others + _ANY)
    options += [f"{_spelt(character)}(?:{_leaving(node[character])})" for character in characters]
    return "|".join(options)


def _spelt(character: str) -> str:
    return f"\\x{{{ord(character):x}}}"
