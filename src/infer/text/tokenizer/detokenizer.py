"""Ids to text through bytes: one table of bytes per vocabulary, an incremental UTF-8 decoder, and rules on its text.

Invariant: for every sequence of ids and every way to cut it, the streamed pieces joined equal the decoded text.

An answer's text is the decoded prompt and answer without the decoded prompt. Every answer follows at least one token of
its prompt, such as BOS, so the rules for the beginning of a text (a dropped space) never apply to an answer.
"""

import codecs
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass

from infer.errors import InvalidRequestError


def num_held(text: str, literal: str) -> int:
    """Return how many characters at the end of a text could begin this literal, which the text does not contain."""
    most = min(len(text), len(literal) - 1)
    return next((length for length in range(most, 0, -1) if text.endswith(literal[:length])), 0)


@dataclass
class Replacement:
    """A text that another one replaces from left to right, wherever it appears in the joined text.

    A stream uses a copy, which holds back what may be the beginning of the text.
    """

    pattern: str
    content: str
    held: str = ""

    def push(self, text: str) -> str:
        """Return the text that is now certain."""
        *done, rest = (self.held + text).split(self.pattern)
        end = len(rest) - num_held(rest, self.pattern)
        self.held = rest[end:]
        return self.content.join([*done, rest[:end]])

    def flush(self) -> str:
        """Return the held text, because no more text follows."""
        held, self.held = self.held, ""
        return held


@dataclass
class Strip:
    """Copies of a character that are dropped from the beginning of the joined text (Llama 2 writes a space there).

    None stands for any character. A stream uses a copy, which counts the characters that may still be dropped.
    """

    character: str | None
    count: int

    def push(self, text: str) -> str:
        end = 0
        while end < min(self.count, len(text)) and self.character in (None, text[end]):
            end += 1
        self.count = self.count - end if end == len(text) else 0
        return text[end:]

    def flush(self) -> str:
        return ""


Rule = Replacement | Strip


def _flushed(rules: Iterable[Rule]) -> str:
    text = ""
    for rule in rules:
        text = rule.push(text) + rule.flush()
    return text


def _rules_after(rules: Sequence[Replacement], text: str) -> list[Rule]:
    """Return the rules for the text that follows another one, whose own decoded text is left out."""
    for rule in rules:
        text = rule.push(text)
    held = _flushed(map(copy, rules))
    return [*rules, Strip(None, len(held))] if held else [*rules]


class Detokenizer:
    """Streaming decoder of a sequence of ids; O(1) per token.

    A character is held back until its last byte has arrived. Bytes that are not UTF-8 become U+FFFD.

    Args:
        token_bytes: The bytes of each id.
        skipped_token_ids: Ids without text.
        rules: The rules on the joined text.
        first_bytes: The bytes of an id at the beginning of a text.
        prompt_ids: The ids before the first one that is pushed. None: a text begins.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        skipped_token_ids: Collection[int] = frozenset(),
        rules: Sequence[Rule] = (),
        first_bytes: Callable[[int], bytes] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> None:
        self._token_bytes = token_bytes
        self._skipped_token_ids = skipped_token_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._first_bytes = first_bytes if prompt_ids is None else None
        self._rules: list[Rule] = [copy(rule) for rule in rules]
        if prompt_ids is not None and (rewrites := [rule for rule in self._rules if isinstance(rule, Replacement)]):
            before = b"".join(map(self._bytes_of, self._kept(prompt_ids))).decode("utf-8", "replace")
            self._rules = _rules_after(rewrites, before)
        elif prompt_ids is not None:
            self._rules = []

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, often one word, sometimes nothing."""
        if token_id in self._skipped_token_ids:
            return ""
        spelled = self._bytes_of(token_id)
        if self._first_bytes is not None:
            spelled, self._first_bytes = self._first_bytes(token_id), None
        return self._ruled(self._decoder.decode(spelled))

    def flush(self) -> str:
        """Return the held text: that of an unfinished character, U+FFFD, and the beginning of a replaced text."""
        return self._ruled(self._decoder.decode(b"", final=True)) + _flushed(self._rules)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of all ids in one operation."""
        kept = self._kept(ids)
        text = self.push(kept[0]) if kept else ""
        return text + self._ruled(self._decoder.decode(b"".join(map(self._bytes_of, kept[1:])))) + self.flush()

    def _kept(self, ids: Iterable[int]) -> list[int]:
        return [token_id for token_id in ids if token_id not in self._skipped_token_ids]

    def _bytes_of(self, token_id: int) -> bytes:
        if not 0 <= token_id < len(self._token_bytes):
            raise InvalidRequestError(f"token id must be in [0, {len(self._token_bytes)}), got {token_id}")
        return self._token_bytes[token_id]

    def _ruled(self, text: str) -> str:
        for rule in self._rules:
            text = rule.push(text)
        return text
