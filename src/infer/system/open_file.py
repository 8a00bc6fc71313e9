"""A file that is read at given offsets while others may write to it.

It is never mapped into memory, because reading a map of a file that became shorter ends the process. Each read returns
a copy. A file that became shorter, or a disk that fails, raises a `ModelError`.
"""

import os
import stat
import weakref
from pathlib import Path
from typing import NoReturn, final

from infer.errors import ModelError, ModelFormatError

AGAIN = "copy or download the file again"  # the fix for a file that is not complete
_LFS_POINTER = b"version https://git-lfs"


@final
class OpenFile:
    """A regular file, open for reading as long as this object lives. Threads may read it at the same time."""

    def __init__(self, path: Path, at_least: int = 0) -> None:
        """Open the file.

        Raises ModelError if the path cannot be opened, is a device or a pipe, has fewer than `at_least` bytes, or is
        a pointer in place of the file.
        """
        self.path = path
        try:
            self._check_regular(os.stat(path))  # opening a device or a pipe can have effects
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            raise self._unreadable(error) from error
        weakref.finalize(self, os.close, self._descriptor)
        self._status = self._read_status()
        self._check_regular(self._status)
        self.size = self._status.st_size
        if self.size < at_least:
            raise ModelFormatError(path, "file size", f"expected at least {at_least} bytes, got {self.size}: {AGAIN}")
        if at_least and self.read(0, min(self.size, len(_LFS_POINTER))) == _LFS_POINTER:
            raise ModelFormatError(path, "file", "is a pointer to a file of Git LFS: fetch it with git lfs pull")

    @property
    def descriptor(self) -> int:
        """The file's descriptor, which is open as long as this object lives."""
        return self._descriptor

    @property
    def modified_ns(self) -> int:
        """Time of the last change before it was opened, in ns since 1970."""
        return self._status.st_mtime_ns

    def read(self, offset: int, count: int) -> bytes:
        """Return `count` bytes from byte `offset` on.

        Raises ModelError if the file has become shorter or cannot be read.
        """
        content = bytearray(count)
        self.read_into(offset, memoryview(content))
        return bytes(content)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from byte `offset` on. Raises the errors of `read`."""
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise self._unreadable(error) from error
            if count == 0:
                self._fail_as_changed()
            done += count

    def check_unchanged(self) -> None:
        """Raise ModelFormatError if the file was written to since it was opened."""
        now = self._read_status()
        if (now.st_size, now.st_mtime_ns) != (self.size, self._status.st_mtime_ns):
            self._fail_as_changed()

    def _check_regular(self, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{self.path} is not a regular file")

    def _fail_as_changed(self) -> NoReturn:
        size = self._read_status().st_size
        change = f"became shorter: {size} of {self.size} bytes are left" if size < self.size else "was written to"
        raise ModelFormatError(self.path, "file", f"{change} while it was read; load it again when it is complete")

    def _read_status(self) -> os.stat_result:
        try:
            return os.fstat(self._descriptor)
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> ModelError:
        return ModelError(f"{self.path} cannot be read: {error.strerror}")
