"""Ids to text through bytes: one table of bytes per vocabulary and an incremental UTF-8 decoder.

Invariant: for every sequence of ids and every way to cut it, the streamed pieces joined equal the decoded text.
"""

import codecs
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from infer.errors import InvalidRequestError, UnsupportedModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NO_BYTES: Mapping[int, bytes] = MappingProxyType({})
# Replacements of the WordPiece decoder, in each word with the space before it, in this order.
_CLEANED = {
    " .": ".", " ?": "?", " !": "!", " ,": ",", " ' ": "'", " n't": "n't", " 'm": "'m", " do not": " don't",
    " 's": "'s", " 've": "'ve", " 're": "'re",
}  # fmt: skip


def _byte_by_character() -> dict[str, int]:
    """Return the byte of each character in GPT-2's alphabet.

    Printable Latin-1 characters represent themselves. Characters from U+0100 up represent the other bytes.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


@dataclass(frozen=True)
class DecodingRules:
    """Rules with which a tokenizer's decoder changes a token's text."""

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    num_stripped_spaces: int = 0
    """Spaces dropped from the beginning of a decoded text (Llama 2 writes one before every text)."""
    subword_prefix: str | None = None
    """WordPiece: the mark of a token that continues a word. All other tokens get a space before them."""


def read_decoding_rules(decoder_json: str | None) -> DecodingRules:
    """Return the rules from the JSON of a `tokenizers` decoder."""
    byte_level, byte_fallback, num_stripped = False, False, 0
    subword_prefix: str | None = None
    replacements: list[tuple[str, str]] = []
    for step in _flat_steps(None if decoder_json is None else json.loads(decoder_json)):
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                replacements.append((pattern, content))
            case {"type": "Metaspace", "replacement": str(replacement)}:
                replacements.append((replacement, " "))
                num_stripped = 0 if step.get("prepend_scheme") == "never" else 1
            case {"type": "WordPiece", "prefix": str(prefix), "cleanup": bool(cleans_up)}:
                num_stripped, subword_prefix = 1, prefix
                replacements += _CLEANED.items() if cleans_up else ()
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                num_stripped = start
            case {"type": "Fuse"}:
                pass
            case _:
                raise UnsupportedModelError(
                    f"tokenizer.json: decoder {step.get('type')!r} is not supported: "
                    "supported are ByteLevel, ByteFallback, Replace, Metaspace, WordPiece, Strip, Fuse"
                )
    return DecodingRules(byte_level, byte_fallback, tuple(replacements), num_stripped, subword_prefix)


def _flat_steps(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [inner for outer in step["decoders"] for inner in _flat_steps(outer)]
    return [step]


def make_token_bytes(
    token_texts: Iterable[str], rules: DecodingRules, text_token_ids: Collection[int]
) -> tuple[bytes, ...]:
    """Return the raw bytes of every id. For `text_token_ids` (special and added tokens) these are the token's text."""
    if rules.byte_level:
        table = _byte_level_bytes(token_texts, text_token_ids)
    else:
        table = [_replaced(text, rules).encode("utf-8", "replace") for text in token_texts]
        if rules.byte_fallback:
            for token_id, token_bytes in enumerate(table):
                if len(token_bytes) == 6 and (found := _BYTE_TOKEN.fullmatch(token_bytes.decode("utf-8", "replace"))):
                    table[token_id] = bytes([int(found[1], 16)])
    return tuple(table)


def make_first_token_bytes(token_texts: Iterable[str], rules: DecodingRules) -> Mapping[int, bytes]:
    """Return the bytes of tokens that differ at the beginning of a text, because WordPiece keeps their prefix."""
    if not rules.subword_prefix:
        return _NO_BYTES
    return {
        token_id: text.encode("utf-8", "replace")
        for token_id, text in enumerate(token_texts)
        if text.startswith(rules.subword_prefix)
    }


def _byte_level_bytes(token_texts: Iterable[str], text_token_ids: Collection[int]) -> list[bytes]:
    to_latin = str.maketrans({character: chr(byte) for character, byte in _byte_by_character().items()})
    alphabet = re.compile(f"[{re.escape(''.join(_byte_by_character()))}]*")
    return [
        text.translate(to_latin).encode("latin-1")
        if token_id not in text_token_ids and alphabet.fullmatch(text)
        else text.encode("utf-8", "replace")
        for token_id, text in enumerate(token_texts)
    ]


def _replaced(text: str, rules: DecodingRules) -> str:
    if rules.subword_prefix is not None:
        continues = text.startswith(rules.subword_prefix)
        text = text.removeprefix(rules.subword_prefix) if continues else f" {text}"
    for pattern, content in rules.replacements:
        text = text.replace(pattern, content)
    return text


def decode_ids(
    ids: Iterable[int],
    token_bytes: Sequence[bytes],
    skipped_token_ids: Collection[int],
    num_stripped_spaces: int,
    first_token_bytes: Mapping[int, bytes] = _NO_BYTES,
) -> str:
    """Return the text of all ids in one operation: the bytes are joined, decoded and stripped."""
    kept = [token_id for token_id in ids if token_id not in skipped_token_ids]
    if kept:
        _check_token_id(min(kept), len(token_bytes))
        _check_token_id(max(kept), len(token_bytes))
    spelled = [*map(token_bytes.__getitem__, kept)]
    if kept and kept[0] in first_token_bytes:
        spelled[0] = first_token_bytes[kept[0]]
    text = b"".join(spelled).decode("utf-8", "replace")
    num_spaces = len(text) - len(text.lstrip(" "))
    return text[min(num_spaces, num_stripped_spaces) :]


def _check_token_id(token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise InvalidRequestError(f"token id must be in [0, {vocab_size}), got {token_id}")


class Detokenizer:
    """Streaming decoder of a sequence of ids; O(1) per token.

    A character is held back until its last byte has arrived. Bytes that are not UTF-8 become U+FFFD.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        skipped_token_ids: Collection[int] = frozenset(),
        num_stripped_spaces: int = 0,
        first_token_bytes: Mapping[int, bytes] = _NO_BYTES,
    ) -> None:
        self._token_bytes = token_bytes
        self._first_token_bytes = first_token_bytes
        self._skipped_token_ids = skipped_token_ids
        self._num_stripped_spaces = num_stripped_spaces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, often one word, sometimes nothing."""
        if token_id in self._skipped_token_ids:
            return ""
        _check_token_id(token_id, len(self._token_bytes))
        spelled = self._token_bytes[token_id]
        if self._first_token_bytes:
            spelled, self._first_token_bytes = self._first_token_bytes.get(token_id, spelled), _NO_BYTES
        return self._strip(self._decoder.decode(spelled))

    def flush(self) -> str:
        """Return the text of an unfinished character: U+FFFD or nothing."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while self._num_stripped_spaces and text:
            if text[0] != " ":
                self._num_stripped_spaces = 0
                break
            self._num_stripped_spaces -= 1
            text = text[1:]
        return text
