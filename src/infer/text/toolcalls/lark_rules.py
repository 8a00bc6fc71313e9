"""Rules of a grammar in llguidance's Lark, by name."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import final

from infer.text.toolcalls.formats import PATTERNS, spelt

ANY_TEXT = "(.|\\n)*"
_PARTS = re.compile("([\ud800-\udfff]|" + "|".join(map(re.escape, PATTERNS)) + ")")


@final
class LarkRules:
    """Rules of one grammar. `marks` represent control tokens in literals, by their ids."""

    def __init__(self, marks: Mapping[int, str]) -> None:
        self.rules: dict[str, str] = {}
        self._id_by_mark = {mark: token_id for token_id, mark in marks.items()}
        self._numbers = count()

    def text(self) -> str:
        return "\n".join(f"{name}: {rule}" for name, rule in self.rules.items()) + "\n"

    def next_number(self) -> int:
        """Return a number for the name of a rule that is made inside another rule."""
        return next(self._numbers)

    def in_order(self, name: str, each: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return the rule of all required items and any of the optional ones, in this order."""
        self.rules[f"{name}_first_{len(each)}"] = self.rules[f"{name}_more_{len(each)}"] = '""'
        for index in range(len(each) - 1, -1, -1):
            rule, is_required = each[index]
            first, more = f"{name}_first_{index + 1}", f"{name}_more_{index + 1}"
            self.rules[f"{name}_first_{index}"] = f"{rule} {more}" + ("" if is_required else f" | {first}")
            self.rules[f"{name}_more_{index}"] = f"({separator} {rule}){'' if is_required else '?'} {more}"
        return f"{name}_first_0"

    def is_control(self, literal: str) -> bool:
        return literal[:1] in self._id_by_mark

    def literal(self, text: str) -> str:
        return " ".join(self._part(part) for part in _PARTS.split(text) if part)

    def _part(self, part: str) -> str:
        if part in PATTERNS:
            return f"/{PATTERNS[part]}/"
        if part in self._id_by_mark:
            return f"<[{self._id_by_mark[part]}]>"
        return spelt(part)


_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$/&~#]")


def as_pattern(text: str) -> str:
    """Return the text as a pattern."""
    return _SPECIAL.sub(r"\\\g<0>", text).replace("\n", "\\n")


def one_of(rules: Iterable[str]) -> str:
    return f"({' | '.join(rules)})"
