"""A GGUF model in several files, as written by llama.cpp's gguf-split. The name of any file opens all of them.

The files are `NAME-00001-of-00003.gguf` and so on. Each contains `split.no` (from 0) and `split.count`. The first one
contains the model's own metadata, and `split.tensors.count` is the number of tensors in all files.
"""

import re
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, TypeVar

from infer.errors import ModelError, ModelFormatError
from infer.files.gguf.gguf import GGUFFile, read_gguf
from infer.files.tensors.tensor_info import TensorInfo

AnyPath = TypeVar("AnyPath", Path, PurePosixPath)
MAX_PARTS = 1000
_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def part_paths(path: AnyPath) -> list[AnyPath]:
    """Return all files of a part's model, in order, or [path] if the name is not a part's name."""
    match = _PART.fullmatch(path.name)
    if match is None or int(match["count"]) > MAX_PARTS:
        return [path]
    count = int(match["count"])
    return [path.with_name(f"{match['name']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def read_whole_gguf(path: Path) -> GGUFFile:
    """Return a GGUF file joined with the other parts of its model. Raises ModelError that lists missing parts."""
    named = read_gguf(path)
    count = named.metadata.get("split.count", 1)
    if type(count) is not int or count < 0:
        raise ModelFormatError(path, "split.count", f"expected a number of files, got {count!r:.60}")
    if count <= 1:
        return named
    paths = part_paths(path)
    if len(paths) != count or path not in paths:
        raise ModelError(
            f"{path.name} is one of {count} parts of a model, whose names end in -00001-of-{count:05}.gguf and so on: "
            "rename the files, or join them with llama-gguf-split --merge"
        )
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ModelError(f"{path.name} is one of {count} parts of a model: {shown} must be in {path.parent}, too")
    return _joined([named if part == path else read_gguf(part) for part in paths])


def _joined(parts: list[GGUFFile]) -> GGUFFile:
    first = parts[0]
    tensors: dict[str, TensorInfo] = {}
    for number, part in enumerate(parts):
        for key, needed in (("split.count", len(parts)), ("split.no", number)):
            value: Any = part.metadata.get(key)
            if type(value) is not int or value != needed:
                _fail(part, key, f"{needed} in a part of this name, got {value!r:.60}")
        twice = sorted(tensors.keys() & part.tensors.keys())
        if twice:
            raise ModelFormatError(part.path, f"tensor {twice[0]!r:.80}", "is in another part of the model, too")
        tensors |= part.tensors
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        _fail(first, "split.tensors.count", f"{expected!r:.60} tensors, the parts have {len(tensors)}")
    files = tuple(file for part in parts for file in part.files)
    return GGUFFile(first.path, first.metadata, tensors, files, first.value_types)


def _fail(part: GGUFFile, key: str, problem: str) -> NoReturn:
    raise ModelFormatError(part.path, key, f"expected {problem}: the parts belong to different models")
