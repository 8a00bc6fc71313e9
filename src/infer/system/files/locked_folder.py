"""A temporary folder. If its process is killed, the next process removes it."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK = "lock"


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
