"""Checks of JSON from others, bodies and files: limits of its bytes, and faults that Python's own reader accepts.

The limits are checked on bytes, before a parser makes values of them. The work on a body grows with its values, not
with its bytes, so their number has a limit. Numbers of a list that has only numbers are not counted, since a prompt may
be given as the ids of its tokens. `json` and `msgspec` recurse, so the depth has a limit too, far below that of
Python's stack. The faults are constants and repeated keys. Files of a model's folder also have a limit of their size.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

from infer.errors import ModelError, ModelFormatError
from infer.request_limits import MAX_DEPTH, MAX_DIGITS, MAX_VALUES
from infer.system.open_file import OpenFile

_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKET = bytes(set(range(256)) - set(_STEPS))
_AS_DIGITS = bytes.maketrans(b"123456789.eE+-", b"00000000000000")
# Literals become quotes, as strings are: of true, false and null, one letter each is enough.
_AS_QUOTES = bytes.maketrans(b"rsn", b'"""')
_NO_STRUCTURE = bytes(set(range(256)) - set(b'[]{},"rsn'))
_NUMBERS = re.compile(rb"\[,*+\]")


class JsonLimitError(ValueError):
    """A JSON text exceeds a limit. The message is the end of a sentence: "the body is …"."""


def check_limits(text: bytes | str) -> None:
    """Raise JsonLimitError if a JSON text is too deep, has too many values, or has too long a number.

    A text of 2 MB takes up to 20 ms.
    """
    if isinstance(text, str):
        text = text.encode(errors="surrogatepass")
    if len(text) <= MAX_DEPTH:
        return
    plain = _without_escapes(text)
    if plain.count(b'"') > 4 * MAX_VALUES:  # each value has at most its key and itself as strings
        raise _too_many()
    outside = _outside_strings(plain)
    if b"0" * (MAX_DIGITS + 1) in outside.translate(_AS_DIGITS):
        raise JsonLimitError(f"written with a number of more than {MAX_DIGITS} characters")
    structure = outside.translate(_AS_QUOTES, _NO_STRUCTURE)
    num_holders = structure.count(b"[") + structure.count(b"{")
    if num_holders > MAX_VALUES or num_holders + _NUMBERS.sub(b"", structure).count(b",") > MAX_VALUES:
        raise _too_many()
    if depth_of(outside) > MAX_DEPTH:
        raise JsonLimitError(f"nested more than {MAX_DEPTH} deep")


def outside_strings(text: bytes) -> bytes:
    """Return a JSON text in which each string is replaced by one quote."""
    return _outside_strings(_without_escapes(text))


def depth_of(outside: bytes) -> int:
    """Return the depth of nested lists and objects, given the result of `outside_strings`."""
    return max(accumulate(map(_STEPS.__getitem__, outside.translate(None, _NO_BRACKET))), default=0)


def _without_escapes(text: bytes) -> bytes:
    """Return the text without pairs of backslashes, and then without escaped quotes."""
    return text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text


def _outside_strings(plain: bytes) -> bytes:
    return b'"'.join(plain.split(b'"')[::2])


def _too_many() -> JsonLimitError:
    return JsonLimitError(f"made of more than {MAX_VALUES:,} values")


class RepeatedKeyError(ValueError):
    """An object has a key twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r:.60} appears twice: give it once")
        self.key = key


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs, for `object_pairs_hook`. Raises RepeatedKeyError."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise RepeatedKeyError(next(name for name, count in counts.items() if count > 1))
    return found


def refuse_constant(name: str) -> NoReturn:
    """Raise ValueError for NaN and infinities, for `parse_constant`."""
    raise ValueError(f"{name} is not JSON")


def is_deeper(value: Any, depth: int) -> bool:
    """Return True if objects and lists are nested more than `depth` deep."""
    level = [value]
    for _ in range(depth + 1):
        holders = [each for each in level if isinstance(each, Mapping | list | tuple)]
        if not holders:
            return False
        level = [item for each in holders for item in (each.values() if isinstance(each, Mapping) else each)]
    return True


MAX_BYTES = 16 << 20
MAX_TEXT_BYTES = 1 << 20

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json_file(path: Path) -> dict[str, Any]:
    return parse_json(path, read_whole(path, MAX_BYTES))


def read_text_file(path: Path) -> str:
    try:
        return read_whole(path, MAX_TEXT_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ModelFormatError(path, "text", "is not UTF-8", error.start) from error


def read_whole(path: Path, limit: int) -> bytes:
    """Return a regular file's bytes. Raises ModelError if it cannot be read.

    Raises ModelFormatError if it is missing, is not a regular file, or has more than `limit` bytes.
    """
    try:
        if not path.is_file():
            raise ModelFormatError(path, "file", "is missing" if not path.exists() else "is not a regular file")
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    file = OpenFile(path)
    if file.size > limit:
        raise ModelFormatError(path, "file size", f"expected at most {limit} bytes, got {file.size}")
    return file.read(0, file.size)


def parse_json(path: Path, text: bytes, offset: int = 0) -> dict[str, Any]:
    """Return the object in `text`, which begins at byte `offset` of the file. Raises ModelFormatError."""
    if depth_of(outside_strings(text)) > MAX_DEPTH:
        raise ModelFormatError(path, "JSON", f"cannot be read: it is nested more than {MAX_DEPTH} deep", offset)
    try:
        value = json.loads(text.decode(), object_pairs_hook=unique_keys)
    except RepeatedKeyError as error:
        raise ModelFormatError(path, f"key {error.key!r:.80}", "appears twice", offset) from error
    except UnicodeDecodeError as error:
        raise ModelFormatError(path, "JSON", "is not UTF-8", offset + error.start) from error
    except json.JSONDecodeError as error:
        position = len(error.doc[: error.pos].encode())
        raise ModelFormatError(path, "JSON", error.msg, offset + position) from error
    except ValueError as error:  # a number of too many digits
        raise ModelFormatError(path, "JSON", f"cannot be read: {error}", offset) from error
    if not isinstance(value, dict):
        raise ModelFormatError(path, "JSON", f"expected an object, got {type(value).__name__}", offset)
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ModelFormatError(path, "JSON", "contains a lone surrogate, which is not text", offset) from error
    return value


def inside(folder: Path, name: str) -> Path:
    """Return `folder / name`, a regular file inside the folder after links are followed. Raises ModelFormatError.

    A folder of the Hugging Face cache consists of links to its sibling `blobs`, which count as inside.
    """
    roots = [folder.resolve()]
    if roots[0].parent.name == "snapshots":
        roots.append(roots[0].parent.parent / "blobs")
    try:
        path = (folder / name).resolve(strict=True)
        is_file = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelFormatError(folder, f"file {name!r:.80}", "is missing") from error
    if not any(path.is_relative_to(root) for root in roots):
        raise ModelFormatError(folder, f"file {name!r:.80}", "is outside the model's folder: copy it there")
    if not is_file:
        raise ModelFormatError(folder, f"file {name!r:.80}", "is not a regular file")
    return path
