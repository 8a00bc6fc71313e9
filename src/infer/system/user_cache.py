"""The location of this user's cache, and the rule for files that may be trusted. No torch.

Code is run from the cache. So a folder is used only if it is ours or root's and no one else may write to it. A file
must be a regular one under the same rule; links are not followed. Refused files count as absent.
"""

import os
import secrets
import stat
import sys
from contextlib import suppress
from pathlib import Path

if sys.platform != "win32":
    import pwd

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_FLAGS = 0 if sys.platform == "win32" else os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def base_folder() -> Path | None:
    """Return $INFER_CACHE, else $XDG_CACHE_HOME/infer, else ~/.cache/infer.

    None for a user without a home folder.
    """
    if own := os.environ.get("INFER_CACHE"):
        return Path(os.path.abspath(own))
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):
        return Path(shared) / "infer"
    home = _home()
    return None if home is None else home / ".cache" / "infer"


def _home() -> Path | None:
    """Return the home folder, or None. A missing one is not created: it may be a volume that is not mounted yet."""
    home = os.environ.get("HOME")
    if not home and sys.platform != "win32":
        try:
            home = pwd.getpwuid(os.geteuid()).pw_dir
        except KeyError:  # a container's user that /etc/passwd does not name
            return None
    return Path(home) if home and os.path.isabs(home) and os.path.isdir(home) else None


def folder_problem(folder: Path, *, base: Path) -> str | None:
    """Create `folder` below `base`, or return one line that says why it must not be used.

    A folder that may be used can still be read-only.
    """
    inner = folder.relative_to(base).parts
    steps = [base, *(base.joinpath(*inner[: count + 1]) for count in range(len(inner)))]
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        for step in steps:
            with suppress(FileExistsError):
                step.mkdir(mode=0o700)
            if problem := _distrust(step, follows=step == base):
                return problem
    except OSError as error:
        return f"{folder} cannot be created ({error.strerror})"
    return None


def is_writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)


def _distrust(folder: Path, *, follows: bool) -> str | None:
    found = os.stat(folder) if follows else os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is not a folder"
    if sys.platform == "win32":
        return None
    if found.st_uid not in (0, os.geteuid()):
        return f"{folder} belongs to user {found.st_uid}, who could put code there"
    if found.st_mode & _WRITABLE_BY_OTHERS:
        return f"{folder} can be written by others, who could put code there (chmod go-w)"
    return None


def read_own(path: Path, most_bytes: int, owner: int | None = None) -> bytes | None:
    """Return a file's bytes. None if it is absent, larger, not a regular file, or if others may write to it.

    The file may also be that of another user, `owner`, who is trusted already.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    except (OSError, ValueError):
        return None
    try:
        if os.fstat(descriptor).st_size > most_bytes or not is_trusted(descriptor, owner):
            return None
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most_bytes)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def is_trusted(descriptor: int, owner: int | None = None) -> bool:
    """Return True for a regular file of ours, of root's or of the user `owner`, which nobody else may write to."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        return False
    if sys.platform == "win32":
        return True
    owners = (0, os.geteuid()) if owner is None else (0, os.geteuid(), owner)
    return found.st_uid in owners and not found.st_mode & _WRITABLE_BY_OTHERS


def write_own(path: Path, content: bytes) -> OSError | None:
    """Write a file, which appears as a whole or not at all.

    Return the error that prevented it, such as a full disk or a read-only folder, or None.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
    except OSError as error:
        return error
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        return error
    return None
