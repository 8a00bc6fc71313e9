"""Read JSON and text of a model's folder, with a limit on the size. A key that appears twice is refused."""

import json
import re
from pathlib import Path
from typing import Any

from infer.errors import ModelError, ModelFormatError
from infer.request_limits import MAX_DEPTH
from infer.system.files.json_limits import RepeatedKeyError, depth_of, outside_strings, unique_keys
from infer.system.files.open_file import OpenFile

MAX_BYTES = 16 << 20
MAX_TEXT_BYTES = 1 << 20

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json_file(path: Path) -> dict[str, Any]:
    return parse_json(path, read_whole(path, MAX_BYTES))


def read_text_file(path: Path) -> str:
    try:
        return read_whole(path, MAX_TEXT_BYTES).decode()
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
