"""Write GGUF version 3 (github.com/ggml-org/ggml/blob/master/docs/gguf.md), tensor by tensor.

Only the header and one piece of a tensor are in memory at a time. The file appears under its name when it is complete.
"""

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from infer.compute.quantization.ggml_types import BLOCK_TYPES
from infer.files.gguf.gguf import ARRAY_ID, MAGIC, NUMBER_CODES, VALUE_TYPE_IDS, TypedValue, ValueType
from infer.files.tensors.tensor_info import aligned
from infer.system.atomic import replacing

VERSION = 3
DEFAULT_ALIGNMENT = 32

Piece = bytes | memoryview
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_TYPES: dict[type, ValueType] = {bool: "bool", int: "u32", float: "f32", str: "string"}

Value = bool | int | float | str | bytes | list[bool] | list[int] | list[float] | list[str]


@dataclass(frozen=True, eq=False)
class TensorPlan:
    """A tensor to write: its header entry, and the source of its bytes.

    Attributes:
        shape: Rows first, as in `TensorInfo`.
        pieces: Returns the bytes in order, in pieces of any size.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Piece]]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape[:-1]) * BLOCK_TYPES[self.type].row_bytes(self.shape[-1])


def write_gguf(path: Path, values: Mapping[str, TypedValue], tensors: Sequence[TensorPlan]) -> None:
    """Write a file with these key-values and tensors, in their order, replacing any file of this name.

    Args:
        path: The file. While it is written, its content has another name in the same folder.
        values: `GGUFFile.typed_values` copies those of a file byte for byte. `general.alignment` is applied.
        tensors: Plans with different names.

    Raises:
        OSError: The disk is full or fails. The path is unchanged.
        ValueError: The pieces of a tensor have more or fewer bytes than its shape.
    """
    alignment = values["general.alignment"].value if "general.alignment" in values else DEFAULT_ALIGNMENT
    with replacing(path, 0o666) as file:
        written = file.write(_header(values, tensors, alignment))
        for tensor in tensors:
            file.write(bytes(aligned(written, alignment) - written))
            written = aligned(written, alignment) + _write_tensor(file, tensor)
        file.write(bytes(aligned(written, alignment) - written))


def _write_tensor(file: BinaryIO, tensor: TensorPlan) -> int:
    count = sum(file.write(piece) for piece in tensor.pieces())
    if count != tensor.num_bytes:
        raise ValueError(f"tensor {tensor.name!r:.80}: expected {tensor.num_bytes} bytes, got {count}")
    return count


def _header(values: Mapping[str, TypedValue], tensors: Sequence[TensorPlan], alignment: int) -> bytes:
    header = bytearray(MAGIC + _U32.pack(VERSION) + _U64.pack(len(tensors)) + _U64.pack(len(values)))
    for key, value in values.items():
        header += _string(key) + _typed(value)
    offset = 0
    for tensor in tensors:
        header += _string(tensor.name) + _U32.pack(len(tensor.shape))
        header += b"".join(_U64.pack(count) for count in reversed(tensor.shape))
        header += _U32.pack(BLOCK_TYPES[tensor.type].ggml_id) + _U64.pack(offset)
        offset += aligned(tensor.num_bytes, alignment)
    return bytes(header)


def _typed(value: TypedValue) -> bytes:
    type_id = _U32.pack(VALUE_TYPE_IDS[value.type])
    if not isinstance(value.value, list):
        return type_id + _array(value.type, [value.value])
    return _U32.pack(ARRAY_ID) + type_id + _U64.pack(len(value.value)) + _array(value.type, value.value)


def _array(value_type: ValueType, values: list[Any]) -> bytes:
    if value_type == "string":
        return b"".join(_string(text) for text in values)
    return np.array(values, NUMBER_CODES[value_type]).tobytes()


def _string(text: str) -> bytes:
    content = text.encode()
    return _U64.pack(len(content)) + content


def typed(value: Value) -> TypedValue:
    """Return a value with its type. Counts are unsigned, and integers in lists are signed, as in llama.cpp's files."""
    if isinstance(value, bytes):
        return TypedValue("u8", list(value))
    if isinstance(value, list):
        kind = _TYPES[type(value[0])] if value else "i32"
        return TypedValue("i32" if kind == "u32" else kind, value)
    return TypedValue(_TYPES[type(value)], float(np.float32(value)) if isinstance(value, float) else value)
