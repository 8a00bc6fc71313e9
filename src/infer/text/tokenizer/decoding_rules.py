"""The steps of a tokenizer's decoder, in their order: first those that change one token, then those on the joined text.

The first kind makes a table of bytes per token. The second kind changes text while it is streamed. A step that fits
neither kind at its place is refused.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenizers import decoders

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
