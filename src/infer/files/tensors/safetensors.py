"""Read safetensors, one file or the shards of an index (github.com/huggingface/safetensors).

Tensors fill a file without gaps or overlaps, as the format requires. Duplicate keys, which the format's own library
accepts, are refused. Pickled weights are never opened.
"""

import os
from collections.abc import Mapping
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from infer.errors import ModelError, ModelFormatError
from infer.files.tensors.tensor_info import TensorInfo, check_layout
from infer.system.json_limits import inside, parse_json, read_json_file
from infer.system.open_file import AGAIN, OpenFile

SINGLE_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 65_536  # per file, as in a GGUF file
_SHARED = ("lm_head.weight", "embed_tokens.weight")  # one matrix, if the embedding is tied
_SHOWN = 5  # most names in a message
MAX_DIMENSIONS = 8  # skipped tensors of a network for images may have five

_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64, "BOOL": 8, "I8": 8, "U8": 8, "I16": 16,
    "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64,
}  # fmt: skip


def read_safetensors_folder(folder: Path) -> dict[str, TensorInfo]:
    """Return the tensors of `model.safetensors` or of the files in the index, under the file's names."""
    if (folder / SINGLE_NAME).is_symlink() or (folder / SINGLE_NAME).exists():
        return read_safetensors(inside(folder, SINGLE_NAME))
    if (folder / INDEX_NAME).exists():
        return _read_shards(folder)
    pickles = sorted(path.name for path in folder.glob("*") if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise ModelError(
            f"{folder} has its weights as {pickles[0]}, which can run code and is never opened: "
            "convert it with save_pretrained(..., safe_serialization=True)"
        )
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    found = f", found only {others[0]!r:.80}: download the missing file" if others else ""
    raise ModelError(f"{folder} has no weights: expected {SINGLE_NAME} or {INDEX_NAME}{found}")


def read_safetensors(path: Path) -> dict[str, TensorInfo]:
    return read_with_metadata(path)[0]


def read_with_metadata(path: Path) -> tuple[dict[str, TensorInfo], dict[str, Any], bytes]:
    """Return the tensors, the file's metadata, and all bytes before the data."""
    file = OpenFile(path, at_least=8)
    length = int.from_bytes(file.read(0, 8), "little")
    data_start = 8 + length
    if length > MAX_HEADER_BYTES or data_start > file.size:
        limit = min(MAX_HEADER_BYTES, file.size - 8)
        why = AGAIN if length <= MAX_HEADER_BYTES else "this is not a safetensors file"
        raise ModelFormatError(path, "header length", f"expected at most {limit} bytes, got {length}: {why}", 0)
    head = file.read(0, data_start)
    _check_count(path, head.count(b'"data_offsets"'))  # before the JSON is parsed; a name may be spelled in another way
    header = parse_json(path, head[8:], offset=8)
    metadata = header.pop("__metadata__", {})
    _check_count(path, len(header))

    tensors = {name: _read_entry(file, name, entry, data_start) for name, entry in header.items()}
    check_layout(path, tensors.values(), data_start, file.size)
    return tensors, metadata if isinstance(metadata, dict) else {}, head


def _check_count(path: Path, num_tensors: int) -> None:
    if num_tensors > MAX_TENSORS:
        raise ModelFormatError(path, "header", f"expected at most {MAX_TENSORS} tensors, got {num_tensors}", 8)


def _read_entry(file: OpenFile, name: str, entry: Any, data_start: int) -> TensorInfo:
    def fail(problem: str) -> NoReturn:
        raise ModelFormatError(file.path, f"tensor {name!r:.80}", problem)

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        fail("expected an object of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        fail(f"{dtype!r:.80} is not a dtype")
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
        fail(f"the shape must be a list of up to {MAX_DIMENSIONS} integers from 0 to 2⁶³")
    if not _are_counts(offsets) or len(offsets) != 2:
        fail("data_offsets must be two integers from 0 to 2⁶³")
    begin, end = offsets
    expected = prod(shape) * _BITS[dtype]
    if (end - begin) * 8 != expected:
        fail(f"{tuple(shape)} of {dtype} are {expected // 8} bytes, but data_offsets give {end - begin}")
    return TensorInfo(file, name, dtype, tuple(shape), data_start + begin, end - begin)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def read_index(index: Path) -> dict[str, str]:
    """Return the name of the file with each tensor. Raises ModelFormatError for a malformed index."""
    names = read_json_file(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(shard, str) for shard in names.values()):
        raise ModelFormatError(index, "weight_map", "expected an object of tensor names and file names")
    return names


def _read_shards(folder: Path) -> dict[str, TensorInfo]:
    index = inside(folder, INDEX_NAME)
    names = read_index(index)
    files = sorted(set(names.values()))
    for shard in files:
        if not shard.endswith(".safetensors"):
            raise ModelFormatError(index, "weight_map", f"{shard!r:.80} is not a safetensors file")
    lacking = [f"{shard!r:.80}" for shard in files if not os.path.exists(folder / shard)]
    if lacking:
        count = f"{len(lacking)} of {len(files)} files {'is' if len(lacking) == 1 else 'are'} missing"
        raise ModelFormatError(index, "weight_map", f"{count}: copy or download {_some(lacking)}")
    shards = {shard: read_safetensors(inside(folder, shard)) for shard in files}
    _check_shards(index, names, shards)
    return {name: shards[shard][name] for name, shard in names.items() if name in shards[shard]}


def _check_shards(index: Path, names: Mapping[str, str], shards: Mapping[str, Mapping[str, TensorInfo]]) -> None:
    """Raise ModelFormatError unless each tensor of the index is in its own shard, and in no other shard.

    A shared matrix may be listed under both of its names, and stored under one.
    """
    may_miss = _SHARED if any(name.endswith(_SHARED) for name in chain(*shards.values())) else ()
    places = {name: shard for name, shard in names.items() if not name.endswith(may_miss)}
    missing = [f"{name!r:.80} in {shard!r:.80}" for name, shard in places.items() if name not in shards[shard]]
    if missing:
        problem = f"missing tensors: {_some(missing)}: the files belong to different models, or have swapped names"
        raise ModelFormatError(index, "weight_map", problem)
    for shard, tensors in shards.items():
        for name, info in tensors.items():
            if names.get(name, shard) != shard:
                info.fail(f"is in {names[name]!r:.80}, too: the files belong to different models")


def _some(named: list[str]) -> str:
    """Return the first names of a list, and the number of the other names."""
    return ", ".join(named[:_SHOWN]) + (f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else "")
