"""A file as memory, and where tensors lie in it. Nothing here loads torch: `stored` makes weights of what lies there.

The map is private: writing to a tensor would change this process's copy of a page, never the file.
"""

import mmap
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path

from infer.errors import ModelError, ModelFormatError


@dataclass(frozen=True, eq=False)
class TensorInfo:
    """Where a tensor lies, under its file's name and in its file's type, and what is to be undone to have ours."""

    path: Path
    content: mmap.mmap = field(repr=False)
    name: str
    type: str
    shape: tuple[int, ...]  # rows first
    offset: int  # from the start of the file
    num_bytes: int
    num_paired_heads: int = 0  # so many heads' rows are in llama.cpp's order; 0: the rows are as they should be
    added: float = 0.0  # what the stored values lack

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes


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


def release_pages(content: mmap.mmap) -> None:
    """Take the file's pages out of this process's memory. Views stay valid: what they touch is read again."""
    if sys.platform == "linux":
        content.madvise(mmap.MADV_DONTNEED)
