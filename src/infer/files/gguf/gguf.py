"""Read GGUF version 2 and 3 (github.com/ggml-org/ggml/blob/master/docs/gguf.md), in one file or in several.

The file is not trusted: every count or length is compared, as a Python integer, with the remaining bytes before a loop
or an allocation uses it. Opening a file reads only its header.

The files of llama.cpp's gguf-split are `NAME-00001-of-00003.gguf` and so on. Each contains `split.no` (from 0) and
`split.count`. The first one contains the model's own metadata, and `split.tensors.count` is the number of tensors in
all files. The name of any file opens all of them.
"""

import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, final

import numpy as np

from infer.compute.quantization.ggml_types import GGML_TYPES, BlockType
from infer.errors import ModelError, ModelFormatError, UnsupportedModelError
from infer.files.tensors.tensor_info import TensorInfo, aligned, check_layout
from infer.system.open_file import AGAIN, OpenFile

MAGIC = b"GGUF"
MAX_KEY_VALUES = 65_536
MAX_TENSORS = 65_536
MAX_STRINGS = 1_000_000
MAX_KEY_BYTES = 64 << 10
MAX_VALUE_BYTES = 16 << 20  # limit of a string, and of an array of numbers
MAX_DIMENSIONS = 4
MAX_LAYERS = 1024  # with a value each in an array
_BLOCK_BYTES = 1 << 20  # blocks in which a header is read
ALIGNMENTS = tuple(1 << power for power in range(3, 17))

ValueType = Literal["u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "u64", "i64", "f64"]
VALUE_TYPE_IDS: dict[ValueType, int] = {
    "u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": 6, "bool": 7, "string": 8,
    "u64": 10, "i64": 11, "f64": 12,
}  # fmt: skip
ARRAY_ID = 9
NUMBER_CODES: dict[ValueType, str] = {  # for struct and for numpy
    "u8": "<B", "i8": "<b", "u16": "<H", "i16": "<h", "u32": "<I", "i32": "<i", "f32": "<f", "bool": "<B",
    "u64": "<Q", "i64": "<q", "f64": "<d",
}  # fmt: skip
_VALUE_TYPE_BY_ID = {type_id: name for name, type_id in VALUE_TYPE_IDS.items()}
_READERS = {code: struct.Struct(code) for code in NUMBER_CODES.values()}
_OTHER_TYPES = {  # types of ggml without a dequantiser here
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"
}  # fmt: skip


class TypedValue(NamedTuple):
    """A value of the metadata with its type in the file. A list is an array with elements of this type."""

    type: ValueType
    value: Any


@dataclass(frozen=True)
class GGUFFile:
    path: Path
    metadata: dict[str, Any]  # numbers, bools, strings, and lists of these
    tensors: dict[str, TensorInfo]
    files: tuple[OpenFile, ...] = field(repr=False)  # one file, or one per part of a split model
    value_types: dict[str, ValueType] = field(default_factory=dict, repr=False)  # types of the metadata
    arrays: dict[str, TensorInfo] = field(default_factory=dict, repr=False)  # the metadata's arrays of f32, as tensors

    @property
    def typed_values(self) -> dict[str, TypedValue]:
        """The metadata for `gguf_writer.write_gguf`. Each key is written with the same bytes as in this file."""
        return {key: TypedValue(self.value_types[key], value) for key, value in self.metadata.items()}

    def values_of_layers(self, keys: Iterable[str]) -> dict[str, TensorInfo]:
        """Return the values of arrays with one for each layer, as tensors of the layers.

        Raises ModelFormatError for an array that is longer than any model has layers.
        """
        parts, prefix = dict[str, TensorInfo](), self.metadata["general.architecture"]
        for key in keys:
            if (info := self.arrays.get(f"{prefix}.{key}")) is None:
                continue
            if info.shape[0] > MAX_LAYERS:
                info.fail(f"expected at most {MAX_LAYERS} values, one per layer, got {info.shape[0]}")
            parts |= {f"blk.{layer}.{key}": info.rows(range(layer, layer + 1)) for layer in range(info.shape[0])}
        return parts

    def floats(self, name: str, count: int) -> list[float]:
        """Return the values of a small tensor of `count` float32. Raises ModelFormatError for any other tensor."""
        info = self.tensors[name]
        if info.type != "F32" or info.shape != (count,):
            info.fail(f"expected F32 of {count}, got {info.type} of {info.shape}")
        return list(np.frombuffer(info.file.read(info.offset, info.num_bytes), "<f4").tolist())


def read_gguf(path: Path, *, file_size: int | None = None) -> GGUFFile:
    """Return the header of a GGUF file.

    Raises ModelFormatError if the file breaks the format, and UnsupportedModelError for unsupported tensor types.

    If `path` has only the beginning of a file, `file_size` is the size of the whole file. Then the header can be read,
    but not the weights.
    """
    file = OpenFile(path, at_least=24)
    return _Header(file, file_size or file.size).read()


@final
class _Header:
    """A position that moves once through the header, which is read in blocks up to the position."""

    def __init__(self, file: OpenFile, file_size: int) -> None:
        self.file, self.path, self.size, self.file_size = file, file.path, file.size, file_size
        self.content = bytearray()
        self.position = 0

    def read_up_to(self, end: int) -> int:
        """Read `content` up to byte `end`, which the file must have. Return the number of bytes read so far."""
        if end > len(self.content):
            start, stop = len(self.content), min(end + _BLOCK_BYTES, self.size)
            self.content += self.file.read(start, stop - start)
        return len(self.content)

    def take(self, num_bytes: int) -> bytes:
        """Return the next bytes, which the file must have, and move the position past them."""
        start, self.position = self.position, self.position + num_bytes
        self.read_up_to(self.position)
        return bytes(self.content[start : self.position])

    def read(self) -> GGUFFile:
        num_tensors, num_values = self.read_counts()
        metadata: dict[str, Any] = {}
        value_types: dict[str, ValueType] = {}
        arrays: dict[str, TensorInfo] = {}
        for _ in range(num_values):
            start = self.position
            key = self.read_key("a key")
            if key in metadata:
                self.fail(f"key {key!r:.80}", "appears twice", start)
            value_types[key], metadata[key] = value_type, value = self.read_value(key)
            if value_type == "f32" and isinstance(value, list):
                num_bytes = 4 * len(value)
                place = self.position - num_bytes, num_bytes
                arrays[key] = TensorInfo(self.file, key, "F32", (len(value),), *place)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment not in ALIGNMENTS:
            self.fail(
                "general.alignment", f"expected a power of two from 8 to {ALIGNMENTS[-1]}, got {alignment!r:.60}", None
            )

        entries = [self.read_tensor() for _ in range(num_tensors)]
        data_start = aligned(self.position, alignment)
        tensors: dict[str, TensorInfo] = {}
        for entry in entries:
            if entry.name in tensors:
                self.fail(f"tensor {entry.name!r:.80}", "appears twice", None)
            tensors[entry.name] = replace(entry, offset=data_start + entry.offset)
        start = data_start if tensors else self.position
        check_layout(self.path, tensors.values(), start, self.file_size, alignment)
        return GGUFFile(self.path, metadata, tensors, (self.file,), value_types, arrays)

    def read_counts(self) -> tuple[int, int]:
        magic = self.take(4)
        if magic != MAGIC:
            self.fail("magic", f"expected {MAGIC!r}, got {magic!r}: this is not a GGUF file", 0)
        version = self.number("<I", "version")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            hint = ", big-endian: only little-endian files are supported" if swapped in (1, 2, 3) else ""
            self.fail("version", f"expected 2 or 3, got {version}{hint}", 4)
        num_tensors, num_values = self.number("<Q", "tensor count"), self.number("<Q", "key-value count")
        # The shortest tensor entry is a name of one byte and one dimension, the shortest key-value one byte each.
        self.check_count("tensor count", num_tensors, MAX_TENSORS, 33, 8)
        self.check_count("key-value count", num_values, MAX_KEY_VALUES, 14, 16)
        return num_tensors, num_values

    def read_tensor(self) -> TensorInfo:
        """Return a tensor's entry. Its offset is still counted from the start of the data."""
        start = self.position
        name = self.read_key("a tensor's name")
        where = f"tensor {name!r:.80}"
        num_dimensions = self.number("<I", where)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            self.fail(where, f"expected 1 to {MAX_DIMENSIONS} dimensions, got {num_dimensions}", start)
        shape = tuple(self.number("<Q", where) for _ in range(num_dimensions))[::-1]
        kind = self.tensor_type(where, self.number("<I", where))
        offset = self.number("<Q", where)
        if 0 in shape:
            self.fail(where, f"the shape {shape} has no elements", start)
        if shape[-1] % kind.block_size:
            self.fail(
                where, f"a row of {shape[-1]} is not a multiple of {kind.name}'s block of {kind.block_size}", start
            )
        num_bytes = prod(shape[:-1]) * kind.row_bytes(shape[-1])
        if offset + num_bytes > self.file_size:
            problem = f"{num_bytes} bytes at {offset} of the data do not fit into a file of {self.file_size}: {AGAIN}"
            self.fail(where, problem, start)
        return TensorInfo(self.file, name, kind.name, shape, offset, num_bytes)

    def tensor_type(self, where: str, type_id: int) -> BlockType:
        kind = GGML_TYPES.get(type_id)
        if kind is not None:
            return kind
        if type_id in _OTHER_TYPES:
            names = ", ".join(kind.name for kind in GGML_TYPES.values())
            raise UnsupportedModelError(
                f"{self.path.name}: {where} is {_OTHER_TYPES[type_id]}: supported are {names}: "
                "use a file of the model in one of these types, such as Q4_K_M"
            )
        return self.fail(where, f"{type_id} is not a tensor type", self.position - 4)

    def read_value(self, key: str) -> TypedValue:
        where = f"key {key!r:.80}"
        type_id = self.number("<I", where)
        if type_id == ARRAY_ID:
            return self.read_array(where)
        value_type = self.value_type(where, type_id)
        if value_type == "string":
            return TypedValue(value_type, self.read_string(where))
        value = self.number(NUMBER_CODES[value_type], where)
        if value_type != "bool":
            return TypedValue(value_type, value)
        if value > 1:
            self.fail(where, f"a bool is 0 or 1, got {value}", self.position - 1)
        return TypedValue(value_type, bool(value))

    def read_array(self, where: str) -> TypedValue:
        type_id, count = self.number("<I", where), self.number("<Q", where)
        value_type = self.value_type(where, type_id)
        if value_type == "string":
            self.check_count(where, count, MAX_STRINGS, 8, self.position - 8)
            return TypedValue(value_type, self.read_strings(where, count))
        dtype = np.dtype(NUMBER_CODES[value_type])
        self.check_count(where, count, MAX_VALUE_BYTES // dtype.itemsize, dtype.itemsize, self.position - 8)
        numbers = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if value_type != "bool":
            return TypedValue(value_type, list(numbers.tolist()))
        if count and numbers.max() > 1:
            self.fail(where, f"a bool is 0 or 1, got {numbers.max()}", self.position - count + int(numbers.argmax()))
        return TypedValue(value_type, list(numbers.astype(bool).tolist()))

    def read_strings(self, where: str, count: int) -> list[str]:
        """Return an array of strings. A vocabulary has hundreds of thousands, so the loop does little work."""
        content, size, position = self.content, self.size, self.position
        available = len(content)
        length_at: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        strings: list[str] = []
        append = strings.append
        try:
            for _ in range(count):
                start = position + 8
                if start > available:
                    if start > size:
                        problem = f"string {len(strings)} of {count} begins after the end of the file"
                        self.fail(where, problem, position)
                    available = self.read_up_to(start)
                position = start + length_at(content, position)[0]
                if position > available or position - start > MAX_VALUE_BYTES:
                    if position > size or position - start > MAX_VALUE_BYTES:
                        self.fail_string(where, position - start, start)
                    available = self.read_up_to(position)
                append(content[start:position].decode())
        except UnicodeDecodeError as error:
            self.fail(where, f"string {len(strings)} is not UTF-8: {error.reason}", start)
        self.position = position
        return strings

    def read_key(self, what: str) -> str:
        start = self.position
        key = self.read_string(what, MAX_KEY_BYTES)
        if not key:
            self.fail(what, "is empty", start)
        return key

    def read_string(self, where: str, limit: int = MAX_VALUE_BYTES) -> str:
        length = self.number("<Q", where)
        start = self.position
        if length > min(limit, self.size - start):
            self.fail_string(where, length, start, limit)
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            return self.fail(where, f"is not UTF-8: {error.reason}", start + error.start)

    def value_type(self, where: str, type_id: int) -> ValueType:
        value_type = _VALUE_TYPE_BY_ID.get(type_id)
        if value_type is None:
            nested = " (arrays of arrays are not supported)" if type_id == ARRAY_ID else ""
            return self.fail(where, f"{type_id} is not a value type{nested}", self.position - 4)
        return value_type

    def number(self, code: str, where: str) -> Any:
        reader = _READERS[code]
        if self.position + reader.size > self.size:
            self.fail(where, f"needs {reader.size} bytes, {self.size - self.position} remain", self.position)
        self.read_up_to(self.position + reader.size)
        (value,) = reader.unpack_from(self.content, self.position)
        self.position += reader.size
        return value

    def check_count(self, where: str, count: int, limit: int, least_bytes: int, offset: int) -> None:
        remaining = self.size - self.position
        if count > limit:
            self.fail(where, f"expected at most {limit}, got {count}", offset)
        if count * least_bytes > remaining:
            self.fail(where, f"{count} need {count * least_bytes} bytes or more, {remaining} remain", offset)

    def fail_string(self, where: str, length: int, start: int, limit: int = MAX_VALUE_BYTES) -> NoReturn:
        problem = f"a string of {length} bytes, expected at most {min(limit, max(0, self.size - start))}"
        self.fail(where, problem, start - 8)

    def fail(self, where: str, problem: str, offset: int | None) -> NoReturn:
        raise ModelFormatError(self.path, where, problem, offset)


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
    return GGUFFile(first.path, first.metadata, tensors, files, first.value_types, first.arrays)


def _fail(part: GGUFFile, key: str, problem: str) -> NoReturn:
    raise ModelFormatError(part.path, key, f"expected {problem}: the parts belong to different models")
