"""Ids to text through bytes: one table of bytes per vocabulary and an incremental UTF-8 decoder.

Invariant: for every sequence of ids and every way to cut it, the streamed pieces joined equal the decoded text.

An answer's text is the decoded prompt and answer without the decoded prompt. Every answer follows at least one token of
its prompt, such as BOS, so the rules for the beginning of a text (a dropped space) never apply to an answer.
"""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy

from infer.errors import InvalidRequestError
from infer.text.tokenizer.decoding_rules import Replacement, Strip


def num_held(text: str, literal: str) -> int:
    """Return how many characters at the end of a text could begin this literal, which the text does not contain."""
    most = min(len(text), len(literal) - 1)
    return next((length for length in range(most, 0, -1) if text.endswith(literal[:length])), 0)


class _Stage(ABC):
    """One rule on the joined text, while it is streamed."""

    @abstractmethod
    def push(self, text: str) -> str:
        """Return the text that is now certain."""

    def flush(self) -> str:
        """Return the held text, because no more text follows."""
        return ""


class _Replacing(_Stage):
    """Replaces a text from left to right. It holds back what may be the beginning of the text."""

    def __init__(self, rule: Replacement) -> None:
        self._rule, self._held = rule, ""

    def push(self, text: str) -> str:
        pattern = self._rule.pattern
        *done, rest = (self._held + text).split(pattern)
        end = len(rest) - num_held(rest, pattern)
        self._held = rest[end:]
        return self._rule.content.join([*done, rest[:end]])

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class _Stripping(_Stage):
    """Drops the first `count` characters, if they are copies of `character`. None stands for any character."""

    def __init__(self, character: str | None, count: int) -> None:
        self._character, self._num_left = character, count

    def push(self, text: str) -> str:
        end = 0
        while end < min(self._num_left, len(text)) and self._character in (None, text[end]):
            end += 1
        self._num_left = self._num_left - end if end == len(text) else 0
        return text[end:]


def _flushed(stages: Iterable[_Stage]) -> str:
    text = ""
    for stage in stages:
        text = stage.push(text) + stage.flush()
    return text


def _stages_after(rules: Sequence[Replacement], text: str) -> list[_Stage]:
    """Return the stages for the text that follows another one, whose own decoded text is left out."""
    stages: list[_Stage] = [_Replacing(rule) for rule in rules]
    for stage in stages:
        text = stage.push(text)
    held = _flushed(map(copy, stages))
    return [*stages, _Stripping(None, len(held))] if held else stages


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
        rules: Sequence[Replacement | Strip] = (),
        first_bytes: Callable[[int], bytes] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> None:
        self._token_bytes = token_bytes
        self._skipped_token_ids = skipped_token_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._first_bytes = first_bytes if prompt_ids is None else None
        if prompt_ids is None:
            self._stages: list[_Stage] = [
                _Replacing(rule) if isinstance(rule, Replacement) else _Stripping(rule.character, rule.count)
                for rule in rules
            ]
        elif rewrites := [rule for rule in rules if isinstance(rule, Replacement)]:
            before = b"".join(map(self._bytes_of, self._kept(prompt_ids))).decode("utf-8", "replace")
            self._stages = _stages_after(rewrites, before)
        else:
            self._stages = []

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, often one word, sometimes nothing."""
        if token_id in self._skipped_token_ids:
            return ""
        spelled = self._bytes_of(token_id)
        if self._first_bytes is not None:
            spelled, self._first_bytes = self._first_bytes(token_id), None
        return self._staged(self._decoder.decode(spelled))

    def flush(self) -> str:
        """Return the held text: that of an unfinished character, U+FFFD, and the beginning of a replaced text."""
        return self._staged(self._decoder.decode(b"", final=True)) + _flushed(self._stages)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of all ids in one operation."""
        kept = self._kept(ids)
        text = self.push(kept[0]) if kept else ""
        return text + self._staged(self._decoder.decode(b"".join(map(self._bytes_of, kept[1:])))) + self.flush()

    def _kept(self, ids: Iterable[int]) -> list[int]:
        return [token_id for token_id in ids if token_id not in self._skipped_token_ids]

    def _bytes_of(self, token_id: int) -> bytes:
        if not 0 <= token_id < len(self._token_bytes):
            raise InvalidRequestError(f"token id must be in [0, {len(self._token_bytes)}), got {token_id}")
        return self._token_bytes[token_id]

    def _staged(self, text: str) -> str:
        for stage in self._stages:
            text = stage.push(text)
        return text
