"""A file as memory, and tensors that are views of it.

The map is private: writing to a tensor would change this process's copy of a page, never the file.
"""

import mmap
import stat
import sys
from math import prod
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from infer.errors import ModelError, ModelFormatError

DTYPE_BY_TYPE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def map_file(path: Path, at_least: int) -> mmap.mmap:
    """The whole file. It stays mapped as long as a view of it lives. Devices and pipes are not opened."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{path} is not a regular file")
        if status.st_size < at_least:
            raise ModelFormatError(path, "file size", f"expected at least {at_least} bytes, got {status.st_size}")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def view_floats(content: mmap.mmap, type: str, offset: int, shape: tuple[int, ...]) -> Tensor:
    """A tensor of a float type. Copied only where the file does not align it to its own element."""
    dtype = DTYPE_BY_TYPE[type]
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    if offset % dtype.itemsize == 0:
        return torch.frombuffer(content, dtype=dtype, count=prod(shape), offset=offset).reshape(shape)
    raw = torch.frombuffer(content, dtype=torch.uint8, count=prod(shape) * dtype.itemsize, offset=offset)
    return raw.clone().view(dtype).reshape(shape)


def view_rows(content: mmap.mmap, offset: int, rows: int, row_bytes: int) -> UInt8[Tensor, "rows bytes"]:
    return torch.frombuffer(content, dtype=torch.uint8, count=rows * row_bytes, offset=offset).reshape(rows, row_bytes)


def release_pages(content: mmap.mmap) -> None:
    """Take the file's pages out of this process's memory. Views stay valid: what they touch is read again."""
    if sys.platform == "linux":
        content.madvise(mmap.MADV_DONTNEED)
