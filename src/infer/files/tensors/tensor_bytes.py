"""The bytes of a tensor in its file, memory for them, and the dtypes of numbers."""

import numpy as np
import torch
from numpy.typing import NDArray

from infer.errors import ModelError
from infer.files.tensors.tensor_info import TensorInfo

DTYPES = {  # by the name of the tensor type
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}


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
