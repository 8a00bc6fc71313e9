"""A temporary folder that does not outlive its process for long: the next process removes that of a killed one."""

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

    The process holds a lock in its folder. A folder of the same prefix whose lock nobody holds is removed first.
    """
    _remove_abandoned(prefix)
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        unnamed = folder / f"{_LOCK}.new"
        with unnamed.open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            unnamed.rename(folder / _LOCK)  # a lock that another process can see is held
            yield folder


def _remove_abandoned(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # held, or of a process that has just begun or ended
            if folder.lstat().st_uid == os.getuid():
                with (folder / _LOCK).open("rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
