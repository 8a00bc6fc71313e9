"""A lower bound of a text's number of tokens: its bytes divided by the bytes of the longest token.

A tokenizer may remove text before its model sees the text. The loss is known only for the steps below. With any other
step there is no bound.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tokenizers
from tokenizers.models import BPE

from infer.text.tokenizer.tokenizers_library import steps_of

Bound = Callable[[str], int]

_NFC_SHRINKS = 3  # largest ratio of UTF-8 bytes to those of the composed form (Unicode Standard Annex #15, 9.1)
_KEEPING = ("ByteLevel", "Digits", "Metaspace")  # pre-tokenizers that remove no text
_BYTE_NAMES = [f"<0x{byte:02X}>" for byte in range(256)]


def make_length_bound(backend: tokenizers.Tokenizer, token_bytes: Sequence[bytes]) -> Bound:
    """Return the bound. `token_bytes` is by id. If there is no bound, it returns 0 for every text."""
    shrinks, has_byte_level = _shrinking(backend.normalizer), _keeps_all(backend.pre_tokenizer)
    longest = max(map(len, token_bytes), default=0)
    unread = None if has_byte_level is None else _unread(backend, has_byte_level, token_bytes)
    if shrinks is None or unread is None or not longest:
        return lambda text: 0
    swallows_spaces = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())

    def bound(text: str) -> int:
        seen = "".join(text.split()) if swallows_spaces else text
        return -(-len(seen.encode("utf-8", errors="replace").translate(None, unread)) // (longest * shrinks))

    return bound


def _shrinking(normalizer: Any) -> int | None:
    """Return the factor by which the bytes of a text may decrease, or None if it is unknown."""
    shrinks = 1
    for step in steps_of(normalizer):
        match step:
            case {"type": "NFC"}:
                shrinks *= _NFC_SHRINKS
            case {"type": "Replace", "pattern": {"String": " "}, "content": str(content)} if content:
                pass
            case {"type": "Prepend"}:
                pass
            case _:
                return None
    return shrinks


def _keeps_all(pre_tokenizer: Any) -> bool | None:
    """Return True if text becomes letters that represent bytes, or None if some text may be dropped."""
    steps = steps_of(pre_tokenizer)
    for step in steps:
        if step["type"] not in _KEEPING and step.get("behavior", "Removed") == "Removed":
            return None
    return any(step["type"] == "ByteLevel" for step in steps)


def _unread(backend: tokenizers.Tokenizer, has_byte_level: bool, token_bytes: Sequence[bytes]) -> bytes | None:
    """Return the bytes that no token has, which are dropped, or None if whole characters are dropped."""
    if not isinstance(backend.model, BPE):
        return None
    if has_byte_level:
        known = {token[0] for token in token_bytes if len(token) == 1}
        return bytes(byte for byte in range(256) if byte not in known)
    is_whole = backend.model.byte_fallback and all(backend.token_to_id(name) is not None for name in _BYTE_NAMES)
    return b"" if is_whole else None
