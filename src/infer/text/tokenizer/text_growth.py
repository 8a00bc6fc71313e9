"""A bound of the growth of a text by a file's steps of encoding and decoding, so that no file exhausts the memory.

Unicode's own forms write at most 18 characters for one. They count once, and again only after a step of the file.
"""

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers

from infer.errors import ModelFormatError

MAX_GROWTH: Final = 100  # published files reach 72
_MAX_STEPS: Final = 64
_OF_UNICODE: Final = 18  # characters of U+FDFA's compatibility form, the longest
_FORMS = ("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "BertNormalizer", "Precompiled", "ByteLevel")
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")


def check_growth(path: Path | str, backend: tokenizers.Tokenizer) -> None:
    """Raise ModelFormatError if a text may grow more than `MAX_GROWTH` times, or if there are too many steps."""
    growth = _growth(path, backend, ("normalizer", "pre_tokenizer", "post_processor"))
    for name, factor in (("steps before the model", growth), ("decoder", _growth(path, backend, ("decoder",)))):
        if factor > MAX_GROWTH:
            problem = f"make a text up to {factor:.3g} times as long: at most {MAX_GROWTH} times is supported"
            raise ModelFormatError(path, name, problem)


def _growth(path: Path | str, backend: tokenizers.Tokenizer, names: tuple[str, ...]) -> float:
    parts = [part for name in names if (part := getattr(backend, name)) is not None]
    steps = [step for part in parts for step in _flat(json.loads(part.__getstate__()))]
    if len(steps) > _MAX_STEPS:
        raise ModelFormatError(path, "/".join(names), f"has {len(steps)} steps: at most {_MAX_STEPS} are supported")
    growth, has_form, is_rewritten = 1.0, False, False
    for step in steps:
        if step["type"] in _FORMS:
            growth *= _form_factor(step, is_first=not has_form, is_rewritten=is_rewritten)
            has_form = True
        else:
            growth *= _own_factor(step)
        written = step.get("content") or step.get("prepend") or ""
        is_rewritten |= has_form and (step["type"] == "Precompiled" or not written.isascii())
    return growth


def _flat(step: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    inner = [each for name in _LISTS for each in step.get(name, ())]
    if not inner:
        yield step
    for each in inner:
        yield from _flat(each)


def _form_factor(step: Mapping[str, Any], *, is_first: bool, is_rewritten: bool) -> int:
    """Return the growth by a form of characters, which is 1 for the first one, because that is a constant of Unicode.

    A later one finds nothing to write longer, unless a step of the file has written other characters in between.
    """
    longest = _OF_UNICODE if is_rewritten else 1
    if step["type"] == "Precompiled":
        charsmap = base64.b64decode(step["precompiled_charsmap"])
        texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].decode("utf-8", "replace").split("\0")
        longest = max(map(len, texts))
    elif step["type"] == "ByteLevel":
        longest = 2
    return 1 if is_first and longest <= _OF_UNICODE else longest


def _own_factor(step: Mapping[str, Any]) -> int:
    match step:
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            return max(1, -(-len(content) // max(1, len(pattern))))
        case {"type": "Replace", "content": str(content)}:  # the pattern may match between any two characters
            return 1 + len(content)
        case {"type": "Prepend", "prepend": str(text)}:
            return 1 + len(text)
        case {"type": "TemplateProcessing", "single": list(single), "pair": list(pair)}:
            return max(1, sum("Sequence" in piece for piece in single), sum("Sequence" in piece for piece in pair) - 1)
        case {"type": "Metaspace"} if "split" in step:
            return 2
    return 1
