"""The bytes of a tensor in its file, memory for them, and tensors of plain numbers, which are written and read back."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infer.errors import ModelError
from infer.files.tensors.tensor_info import TensorInfo

DTYPES = {  # by the name of the tensor type
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
_TYPE_BY_DTYPE = {dtype: name for name, dtype in DTYPES.items()}


def memory_for(info: TensorInfo, shape: int | tuple[int, ...]) -> NDArray[np.uint8]:
    """Return memory for bytes of a tensor. Raises ModelError if no memory is left."""
    try:
        return np.empty(shape, np.uint8)
    except MemoryError as error:
        raise ModelError(f"no memory is left for {np.prod(shape)} bytes of the tensor {info.name!r:.80}") from error


def bytes_of(info: TensorInfo, start: int = 0, end: int | None = None) -> NDArray[np.uint8]:
    """Read and return the bytes [start, end) of a tensor that is in one place of the file."""
    content = memory_for(info, (info.num_bytes if end is None else end) - start)
    info.file.read_into(info.offset + start, content.data)
    return content


NamedTensors = Iterable[tuple[str, Tensor]]


def read_tensor(info: TensorInfo, check: Callable[[memoryview], None] = lambda block: None) -> Tensor:
    """Return a copy of a tensor's values. `check` is called with their bytes first.

    Raises ModelError if they cannot be read.
    """
    if (dtype := DTYPES.get(info.type)) is None:
        info.fail(f"expected plain numbers, got {info.type}")
    block = bytes_of(info)
    check(block.data)
    values = torch.from_numpy(block).view(dtype) if len(block) else torch.empty(0, dtype=dtype)
    return values.reshape(info.shape)


def write_safetensors(
    file: BinaryIO,
    metadata: Mapping[str, str],
    tensors: Callable[[], NamedTensors],
    on_block: Callable[[bytes | memoryview], None] = lambda block: None,
) -> None:
    """Write tensors one at a time. `tensors` is called twice, for the header and for the data.

    `on_block` is called with the header, then with each tensor's bytes, before they are written. `tensors` may depend
    on what `on_block` received.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors():
        begin, end = end, end + tensor.nbytes
        entry = {"dtype": _TYPE_BY_DTYPE[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        header[name] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    on_block(head)
    file.write(head)
    for _, tensor in tensors():
        block = tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
        on_block(block)
        file.write(block)
