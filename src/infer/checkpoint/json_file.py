"""JSON that a model's folder holds: read with a limit on its size, and refused where a key appears twice."""

import json
from pathlib import Path
from typing import Any

from infer.errors import ModelError, ModelFormatError

MAX_BYTES = 16 << 20


def read_json_file(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelFormatError(path, "file size", f"expected at most {MAX_BYTES} bytes, got {path.stat().st_size}")
        text = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    return parse_json(path, text)


def parse_json(path: Path, text: bytes, offset: int = 0) -> dict[str, Any]:
    """The object in `text`, which begins at byte `offset` of the file."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise ModelFormatError(path, f"key {name!r:.80}", "appears twice", offset)
            found[name] = value
        return found

    try:
        value = json.loads(text.decode(), object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise ModelFormatError(path, "JSON", "is not UTF-8", offset + error.start) from error
    except json.JSONDecodeError as error:
        position = len(error.doc[: error.pos].encode())
        raise ModelFormatError(path, "JSON", error.msg, offset + position) from error
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(path, "JSON", f"cannot be read: {error}", offset) from error
    if not isinstance(value, dict):
        raise ModelFormatError(path, "JSON", f"expected an object, got {type(value).__name__}", offset)
    return value


def inside(folder: Path, name: str) -> Path:
    """`folder / name`, which must be a regular file that lies in the folder after links are followed.

    A folder of the Hugging Face cache is made of links to its sibling `blobs`: those count as inside.
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
        raise ModelFormatError(folder, f"file {name!r:.80}", "lies outside the model's folder, copy it there")
    if not is_file:
        raise ModelFormatError(folder, f"file {name!r:.80}", "is not a regular file")
    return path
