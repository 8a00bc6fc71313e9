"""Ids to text through bytes: one table of bytes per vocabulary and an incremental UTF-8 decoder.

Invariant: for every sequence of ids and every way to cut it, the streamed pieces joined equal the decoded text.

An answer's text is the decoded prompt and answer without the decoded prompt. Every answer follows at least one token of
its prompt, such as BOS, so the rules for the beginning of a text (a dropped space) never apply to an answer.
"""

import codecs
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy

from infer.errors import InvalidRequestError
from infer.text.tokenizer.decoding_rules import Replacement, Rule, Strip


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
