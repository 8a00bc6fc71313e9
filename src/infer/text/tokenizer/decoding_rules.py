"""The steps of a tokenizer's decoder, in their order, and the least number of tokens that its steps leave of a text.

First come steps that change one token, then steps on the joined text.

The first kind makes a table of bytes per token. The second kind changes text while it is streamed. A step that fits
neither kind at its place is refused.

A lower bound of a text's number of tokens is its bytes divided by the bytes of the longest token. A tokenizer may
remove text before its model sees the text. With a step whose loss is unknown, there is no bound.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import tokenizers
from tokenizers import decoders
from tokenizers.models import BPE

from infer.errors import UnsupportedModelError
from infer.text.tokenizer.detokenizer import Replacement, Rule, Strip
from infer.text.tokenizer.tokenizers_library import steps_of

Step = Mapping[str, Any]
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PER_TOKEN = ("Replace", "Metaspace", "WordPiece", "Strip")
_MAX_PATTERN = 64  # characters of a pattern in joined text, which a stream compares for each token


@dataclass(frozen=True)
class DecodingRules:
    """The steps of a decoder. `before` and `after` are the steps per token around the reading of bytes."""

    before: list[Step] = field(default_factory=list)
    reading: Literal["ByteLevel", "ByteFallback"] | None = None
    after: list[Step] = field(default_factory=list)
    of_text: tuple[Rule, ...] = ()
    rewrites_text: bool = False
    """True if a step replaces text that may begin in one token and end in another."""

    def first_bytes(self, text: str) -> bytes | None:
        """Return the bytes of a token with this text at the beginning of a text, or None if they are the usual ones."""
        if not any(step["type"] in ("Metaspace", "WordPiece") for step in (*self.before, *self.after)):
            return None
        text = _decoder(self.before).decode([text])
        if self.reading == "ByteLevel":
            return _byte_level_bytes([text], ())[0]
        if self.reading == "ByteFallback" and (found := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(found[1], 16)])
        return _decoder(self.after).decode([text]).encode("utf-8", "replace")


def read_decoding_rules(decoder: decoders.Decoder | None) -> DecodingRules:
    """Return the rules of a `tokenizers` decoder.

    Raises UnsupportedModelError for a step that no table and no stream can follow at its place.
    """
    before, after = list[Step](), list[Step]()
    of_text = list[Rule]()
    reading: Literal["ByteLevel", "ByteFallback"] | None = None
    is_joined = False
    for step in steps_of(decoder):
        match step:
            case {"type": "Fuse"}:
                is_joined = True
            case {"type": "ByteLevel" | "ByteFallback" as kind} if reading is None and not is_joined:
                reading, is_joined = kind, kind == "ByteLevel"
            case {"type": str(kind)} if kind in _PER_TOKEN and not step.get("stop"):
                if is_joined:
                    of_text.append(_rule_of_text(step))
                elif reading is None:
                    before.append(step)
                else:
                    after.append(step)
            case _:
                raise _unsupported(step)
    rewrites_text = any(isinstance(rule, Replacement) for rule in of_text)
    return DecodingRules(before, reading, after, (*_rules_of_bytes(after), *of_text), rewrites_text)


def _unsupported(step: Step) -> UnsupportedModelError:
    shown = json.dumps({key: value for key, value in step.items() if key not in ("type", "prepend_scheme", "split")})
    return UnsupportedModelError(
        f"tokenizer.json: decoder {step.get('type')!r} {shown:.80} is not supported at its place. Supported are "
        "Replace, Metaspace, Strip at the start and WordPiece before ByteLevel, ByteFallback and Fuse; a Metaspace, "
        "and a Replace of one character, between ByteFallback and Fuse; and a Metaspace, a Strip at the start, and a "
        f"Replace of a text of at most {_MAX_PATTERN} characters, on the joined text"
    )


def _rule_of_text(step: Step) -> Rule:
    match step:
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            if 0 < len(pattern) <= _MAX_PATTERN:
                return Replacement(pattern, content)
        case {"type": "Metaspace", "replacement": str(mark)}:  # the joined text is the decoder's first token
            return Replacement(mark, " " if step.get("prepend_scheme") == "never" else "")
        case {"type": "Strip", "content": str(character), "start": int(count)}:
            return Strip(character, count)
    raise _unsupported(step)


def _rules_of_bytes(after: Sequence[Step]) -> Iterator[Replacement]:
    """Yield the rules for characters that tokens of single bytes spell, on which the steps after ByteFallback act too.

    All other tokens have been changed by the table, and the rules find nothing in them.
    """
    rules = list[Replacement]()
    for step in after:
        match step:
            case {"type": "Metaspace", "replacement": str(mark)}:
                rules.append(Replacement(mark, " "))
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if len(pattern) == 1:
                rules.append(Replacement(pattern, content))
            case _:
                raise _unsupported(step)
    patterns = [rule.pattern for rule in rules]
    for rule, step in zip(rules, after, strict=True):
        if any(pattern in rule.content for pattern in patterns):
            raise _unsupported(step)
    yield from rules


def make_token_bytes(
    token_texts: Sequence[str], rules: DecodingRules, text_token_ids: Collection[int]
) -> tuple[bytes, ...]:
    """Return the raw bytes of every id, as they are after another token.

    For `text_token_ids` (special and added tokens), ByteLevel takes the token's text.
    """
    texts = _applied(rules.before, token_texts)
    if rules.reading == "ByteLevel":
        return tuple(_byte_level_bytes(texts, text_token_ids))
    table = [text.encode("utf-8", "replace") for text in _applied(rules.after, texts)]
    for token_id, text in enumerate(texts) if rules.reading == "ByteFallback" else ():
        if len(text) == 6 and (byte := _BYTE_TOKEN.fullmatch(text)):
            table[token_id] = bytes([int(byte[1], 16)])
    return tuple(table)


def _decoder(steps: Sequence[Step]) -> decoders.Decoder:
    found = decoders.Fuse()
    found.__setstate__(json.dumps({"type": "Sequence", "decoders": [*steps]}).encode())
    return found


def _applied(steps: Sequence[Step], texts: Sequence[str]) -> Sequence[str]:
    """Return each text after these steps, as a token that is not the first."""
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if pattern:
                texts = [text.replace(pattern, content) for text in texts]  # five times as fast as the library
            case _:
                decode = _decoder([step]).decode
                start = len(decode([""]))
                texts = [decode(["", text])[start:] for text in texts]
    return texts


def _byte_by_character() -> dict[str, int]:
    """Return the byte of each character in GPT-2's alphabet.

    Printable Latin-1 characters represent themselves. Characters from U+0100 up represent the other bytes.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _byte_level_bytes(token_texts: Sequence[str], text_token_ids: Collection[int]) -> list[bytes]:
    to_latin = str.maketrans({character: chr(byte) for character, byte in _byte_by_character().items()})
    alphabet = re.compile(f"[{re.escape(''.join(_byte_by_character()))}]*")
    return [
        text.translate(to_latin).encode("latin-1")
        if token_id not in text_token_ids and alphabet.fullmatch(text)
        else text.encode("utf-8", "replace")
        for token_id, text in enumerate(token_texts)
    ]


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
