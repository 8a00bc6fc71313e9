"""Write a file as a whole or not at all, and make a temporary folder that goes with its process, even a killed one."""

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_LOCK = "lock"


@contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Yield a file to write, which replaces the path when the block ends.

    The path has the old content or the new one, never a part of one. Raises OSError, with the old content unchanged.
    `mode` has the new file's permissions, which the process's umask restricts.
    """
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Sync the folder, so that the new name survives a power failure, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some file systems cannot do this
        pass
    finally:
        os.close(descriptor)


@contextmanager
def locked_folder(prefix: str) -> Iterator[Path]:
    """Yield a new folder of this process, and remove it at the end.

    The process locks a file in its folder. First, folders with the same prefix whose lock is free are removed.
    """
    _remove_abandoned(prefix)
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        unnamed = folder / f"{_LOCK}.new"
        with unnamed.open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            unnamed.rename(folder / _LOCK)  # a visible lock file is always locked
            yield folder


def _remove_abandoned(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # locked, or of a process that has just begun or ended
            if folder.lstat().st_uid == os.getuid():
                with (folder / _LOCK).open("rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
