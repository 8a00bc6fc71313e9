"""The texts of special tokens, and marks that separate a message's texts from the template's texts."""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple, Self, final

from infer.errors import UnsupportedModelError

_MAX_SPECIAL_LENGTH = 256


class PromptPart(NamedTuple):
    text: str
    is_control: bool
    """True if special tokens in the text are the template's own."""


@final
class ComposedText(str):
    """A message's text that consists of parts. Special tokens in our own parts are control tokens."""

    parts: tuple[tuple[str, bool], ...]  # each with True if it is our own

    def __new__(cls, parts: Iterable[tuple[str, bool]]) -> Self:
        parts = tuple(parts)
        found = super().__new__(cls, "".join(text for text, _ in parts))
        found.parts = parts
        return found

    def with_changes(self, change: Callable[[str], str]) -> str:
        """Return the text with its foreign parts changed."""
        return "".join(text if is_own else change(text) for text, is_own in self.parts)


class SpecialTexts:
    """The texts of the special tokens. It finds them in strings, and separates a message's from the template's."""

    def __init__(self, texts: Sequence[str]) -> None:
        texts = sorted({text for text in texts if len(text) > 1})
        longest = max(map(len, texts), default=0)
        if longest > _MAX_SPECIAL_LENGTH:
            raise UnsupportedModelError(
                f"special tokens must have at most {_MAX_SPECIAL_LENGTH} characters in a chat, got {longest}"
            )
        pattern = _trie_pattern(texts) if texts else r"(?!)"
        self._whole = re.compile(pattern)
        self._any_case = re.compile(pattern, re.IGNORECASE)  # a template may change the case
        self._first_characters = re.compile(
            f"[{re.escape(''.join({text[0] for text in texts}))}]" if texts else r"(?!)"
        )
        self._heads = frozenset(text[:length] for text in texts for length in range(2, len(text)))
        self._tails = frozenset(text[-length:] for text in texts for length in range(2, len(text)))
        self._max_fragment = max(0, longest - 1)

    def are_hinted_in(self, string: str) -> bool:
        """Return True if the string contains a special token's text, or two or more characters of one at its border."""
        return bool(self._any_case.search(string)) or bool(self._head_length(string)) or bool(self._tail_length(string))

    def mark(self, string: str, mark: str) -> str:
        """Return the string with one mark inside every hint.

        The mark is placed after the hint's first character. At the string's start, it is placed before the last
        character.
        """
        cuts = {found.start() + 1 for found in self._any_case.finditer(string)}
        if length := self._head_length(string):
            cuts.add(len(string.rstrip()) - length + 1)
        if length := self._tail_length(string):
            cuts.add(len(string) - len(string.lstrip()) + length - 1)
        borders = [0, *sorted(cuts), len(string)]
        return mark.join(string[start:end] for start, end in pairwise(borders))

    def mark_beginnings(self, string: str, mark: str) -> str:
        """Return the string with a mark after every character with which a special token may begin."""
        return self._first_characters.sub(lambda found: found[0] + mark, string)

    def found_in(self, text: str) -> list[str]:
        return self._whole.findall(text)

    def cut(self, marked: str, mark: str) -> list[PromptPart]:
        """Return pieces of the text without its marks, cut at the template's special tokens around a message's own.

        Text around a message's own, from the template's special token before it to the one after it, is not control.
        """
        parts = marked.split(mark)
        text, marks = "".join(parts), set(accumulate(map(len, parts[:-1])))
        pieces, start = list[PromptPart](), 0
        region_start, is_foreign = 0, False  # of the text since the template's last special token
        spans = [special.span() for special in self._whole.finditer(text)]
        for begin, end in [*spans, (len(text), len(text))]:
            if not marks.isdisjoint(range(begin + 1, end)):
                is_foreign = True
                continue
            if is_foreign:
                pieces += [PromptPart(text[start:region_start], True), PromptPart(text[region_start:begin], False)]
                start = begin
            region_start, is_foreign = end, False
        return [piece for piece in [*pieces, PromptPart(text[start:], True)] if piece.text]

    def _head_length(self, string: str) -> int:
        """Return the length of the longest prefix of a special token that ends the string, or 0."""
        tail = string.rstrip()[-self._max_fragment :]
        return next((length for length in range(len(tail), 1, -1) if tail[-length:] in self._heads), 0)

    def _tail_length(self, string: str) -> int:
        head = string.lstrip()[: self._max_fragment]
        return next((length for length in range(len(head), 1, -1) if head[:length] in self._tails), 0)


def _trie_pattern(texts: Sequence[str]) -> str:
    """Return a pattern that matches the longest of these sorted texts, in time independent of their number."""
    first, last = texts[0], texts[-1]
    same = next((index for index, pair in enumerate(zip(first, last, strict=False)) if len(set(pair)) > 1), len(first))
    prefix = first[:same]
    ends_here = len(texts[0]) == len(prefix)
    longer = (text[len(prefix) :] for text in (texts[1:] if ends_here else texts))
    branches = [_trie_pattern(list(group)) for _, group in groupby(longer, key=lambda text: text[0])]
    if not branches:
        return re.escape(prefix)
    return f"{re.escape(prefix)}(?:{'|'.join(branches)}){'?' if ends_here else ''}"
