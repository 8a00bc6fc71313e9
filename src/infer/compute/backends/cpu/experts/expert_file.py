"""The file with a model's experts, packed for the kernels: written once, then read in parts while the model runs.

    header     magic, what the experts were made of, number of checksums, bytes of records, digest of all before records
    checksums  one of each part of each record
    records    of the first pool, then of the next

It is in this user's cache folder, beside the stored prefixes, and only a file of this user that nobody else may write
is read. It appears as a whole. A part is checked by its sum whenever it is read, so damage that happens later is found
as well.
"""

import fcntl
import hashlib
import os
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, final

import numpy as np
import numpy.typing as npt

from infer.compute.backends.cpu.experts.pool_plan import BLOCK_BYTES
from infer.errors import ModelError
from infer.system.atomic import replacing
from infer.system.open_file import OpenFile
from infer.system.status_line import write_notice
from infer.system.user_cache import base_folder, folder_problem, is_trusted, read_own, write_own

Sums = npt.NDArray[np.int64]

_MAGIC = b"infer experts 1\n"
_HEADER = struct.Struct("<16s32sQQ32s")
_DIGEST_BYTES = 32
_SPARE_BYTES = 1 << 30  # of the disk that stay free
_SUFFIX, _LOCK = ".experts", "lock"


@final
class ExpertFile:
    """The file of a model's experts. `identity` is a digest of all that decides its records."""

    def __init__(self, name: str, identity: bytes, num_sums: int, num_bytes: int) -> None:
        """Name the file, which may not exist. It has `num_bytes` of records. Raises ModelError without a folder."""
        base = base_folder()
        folder = None if base is None else base / "experts"
        problem = "there is no home folder" if folder is None else folder_problem(folder, base=base or folder)
        if folder is None or problem is not None:
            raise ModelError(f"experts_memory needs a folder for the experts: {problem} (set INFER_CACHE)")
        self.path = folder / (hashlib.blake2b(name.encode(), digest_size=16).hexdigest() + _SUFFIX)
        self._identity, self._num_sums, self._num_bytes = identity, num_sums, num_bytes

    @property
    def start(self) -> int:
        """The first byte of the records."""
        return BLOCK_BYTES + -(-8 * self._num_sums // BLOCK_BYTES) * BLOCK_BYTES

    @property
    def size(self) -> int:
        return self.start + self._num_bytes

    def try_open(self) -> tuple[OpenFile, Sums] | None:
        """Return the open file and its checksums; None if it is absent, damaged, or made of something else."""
        try:
            file = OpenFile(self.path)
            if file.size != self.size or not is_trusted(file.descriptor):
                return None
            header, sums = file.read(0, _HEADER.size), np.frombuffer(file.read(BLOCK_BYTES, 8 * self._num_sums), "<i8")
        except ModelError:
            return None
        if header != self._header(sums):
            return None
        with suppress(OSError):
            fcntl.flock(file.descriptor, fcntl.LOCK_SH)  # as long as it is open: see `_is_unused`
            os.utime(self.path)
        _make_direct(file.descriptor, self.start)
        return file, sums.astype(np.int64)

    @contextmanager
    def writing(self, sums: Sums) -> Iterator[BinaryIO | None]:
        """Yield a file for the records, in order. When the block ends, it is complete, with the sums in `sums`.

        Yield None if the file exists, perhaps because another process wrote it meanwhile. Raises ModelError if the disk
        is full.
        """
        if self.try_open() is not None:
            yield None
            return
        try:
            with self._locked():
                if self.try_open() is not None:
                    yield None
                    return
                self._make_room()
                with replacing(self.path) as file:
                    file.seek(self.start)
                    yield file
                    file.seek(0)
                    file.write(self._header(sums).ljust(BLOCK_BYTES, b"\0") + sums.astype("<i8").tobytes())
        except OSError as error:
            raise self._unwritable(error.strerror or "it cannot be written") from error

    def _header(self, sums: Sums) -> bytes:
        plain = _HEADER.pack(_MAGIC, self._identity, self._num_sums, self._num_bytes, bytes(_DIGEST_BYTES))
        digest = hashlib.blake2b(plain + sums.astype("<i8").tobytes(), digest_size=_DIGEST_BYTES).digest()
        return plain[:-_DIGEST_BYTES] + digest

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock, and remove what killed processes left: only its holder writes."""
        descriptor = os.open(self.path.parent / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                write_notice(f"infer: waiting for another process, which packs experts in {self.path.parent}")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            for left in self.path.parent.glob(f".*{_SUFFIX}.*"):
                left.unlink(missing_ok=True)
            yield
        finally:
            os.close(descriptor)

    def _make_room(self) -> None:
        """Remove files as far as the disk needs it: this model's, which is of no use, then the least recently used.

        A file that is in use stays: the disk would not get its room before it is closed.
        """
        unused = [path for path in self.path.parent.glob(f"*{_SUFFIX}") if _is_unused(path)]
        oldest_last = sorted(unused, key=lambda path: (path == self.path, -path.stat().st_mtime))
        while (missing := self.size + _SPARE_BYTES - _free_bytes(self.path.parent)) > 0:
            if not oldest_last:
                raise self._unwritable(f"the disk has {missing / 1e6:,.0f} MB too little")
            oldest_last.pop().unlink(missing_ok=True)

    def _unwritable(self, problem: str) -> ModelError:
        return ModelError(
            f"experts_memory stores the packed experts, {self.size / 1e6:,.0f} MB, in {self.path.parent}: {problem} "
            "(free some of the disk, or set INFER_CACHE to a folder of another one)"
        )

    def remove(self, opened: OpenFile | None) -> None:
        """Remove the file that was opened, unless its name belongs to a newer file."""
        with suppress(OSError):
            if opened is not None and os.path.samestat(os.fstat(opened.descriptor), os.stat(self.path)):
                self.path.unlink()

    # How often each expert was used, from one start to the next

    def read_uses(self, count: int) -> Sums | None:
        """Return the stored uses of `count` experts; None if there are none for these records."""
        content = read_own(self._uses_path, len(self._identity) + 8 * count)
        if content is None or content[:32] != self._identity or len(content) != 32 + 8 * count:
            return None
        return np.frombuffer(content[32:], "<i8").astype(np.int64)

    def write_uses(self, uses: Sequence[Sums]) -> None:
        """Store the uses of the pools' experts. They only save time, so a failure is ignored."""
        write_own(self._uses_path, self._identity + np.concatenate(uses).astype("<i8").tobytes())

    @property
    def _uses_path(self) -> Path:
        return self.path.with_suffix(".uses")


def _is_unused(path: Path) -> bool:
    """Return True if no process reads a file, whose readers lock it."""
    try:
        file = OpenFile(path)
        fcntl.flock(file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, ModelError):
        return False
    return True


def _free_bytes(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def _make_direct(descriptor: int, start: int) -> None:
    """Let reads bypass the system's cache, which would hold the experts a second time, if the file system can."""
    if sys.platform != "linux":
        return
    with suppress(OSError):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        try:
            os.preadv(descriptor, [_block()], start)
        except OSError:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def _block() -> memoryview:
    """Return memory for a block, which begins where a direct read may begin."""
    raw = np.zeros(2 * BLOCK_BYTES, np.uint8)
    first = -raw.ctypes.data % BLOCK_BYTES
    return raw[first : first + BLOCK_BYTES].data
