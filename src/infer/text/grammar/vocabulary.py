"""The vocabulary for grammars: the bytes of each token, the ids that end a text, and the spelling of a text.

Control tokens have no bytes here, because a grammar describes text, and a control token is not text.
"""

from bisect import bisect_right
from functools import cached_property
from typing import final

from infer.text.tokenizer import Tokenizer

_MARK = "\x02"  # put before a text, for tokenizers that add a space at a text's start


@final
class Vocabulary:
    """Vocabulary of a tokenizer and a model whose embedding may have more rows than the tokenizer has ids."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None = None) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        known = tokenizer.token_bytes[: self.vocab_size]
        self.end_ids = tuple(sorted(i for i in tokenizer.eos_token_ids if i < self.vocab_size))
        control = tokenizer.special_token_ids | frozenset(self.end_ids)
        self.token_bytes = [b"" if i in control else token for i, token in enumerate(known)]
        self.control_ids = sorted(i for i in control if i < len(known))

    def spell(self, text: str) -> list[int]:
        """Return the tokenizer's own ids for a text in any context. None of the ids is a control token."""
        encoded = text.encode()
        for mark in ("", _MARK):
            ids = self._tokenizer.encode(mark + text, add_special_tokens=False)
            if mark:
                ids = self._without_mark(ids)
            if b"".join(self.token_bytes[i] if i < len(self.token_bytes) else b"" for i in ids) == encoded:
                return ids
        return self.spell_greedily(encoded)

    def spell_greedily(self, text: bytes) -> list[int]:
        """Return ids by taking the longest token first. Stop at a byte that no token has."""
        ids: list[int] = []
        at = 0
        while at < len(text):
            for end in range(min(len(text), at + self._longest), at, -1):
                token_id = self._id_by_bytes.get(text[at:end])
                if token_id is not None:
                    ids.append(token_id)
                    at = end
                    break
            else:
                break
        return ids

    def settled(self, text: str) -> list[int]:
        """Return the ids of a text that continues, without ids at its end that could change with the following text."""
        data = text.encode()
        start = next((i for i in range(max(0, len(data) - self._longest), len(data)) if self._goes_on(data[i:])), None)
        ids, end = [], 0
        for token_id in self.spell(text):
            end += len(self.token_bytes[token_id])
            if start is not None and end > start:
                break
            ids.append(token_id)
        return ids

    def _goes_on(self, beginning: bytes) -> bool:
        """Return True if a longer token starts with these bytes."""
        at = bisect_right(self._sorted, beginning)
        return at < len(self._sorted) and self._sorted[at].startswith(beginning)

    def _without_mark(self, ids: list[int]) -> list[int]:
        seen = b""
        for index, token_id in enumerate(ids):
            seen += self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""
            if seen.endswith(_MARK.encode()):
                return ids[index + 1 :]
        return []

    @cached_property
    def _sorted(self) -> list[bytes]:
        return sorted(set(self.token_bytes))

    @cached_property
    def _id_by_bytes(self) -> dict[bytes, int]:
        return {token: i for i, token in reversed(list(enumerate(self.token_bytes))) if token}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.token_bytes), default=1)
