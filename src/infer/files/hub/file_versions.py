"""The versions of a model's files, with which a reader detects that they were replaced. No file is opened."""

from pathlib import Path
from typing import NamedTuple

from infer.errors import ModelError
from infer.files.hub.find import resolve


class FileVersion(NamedTuple):
    path: Path
    num_bytes: int
    modified_at: int  # nanoseconds
    inode: int


def file_versions(model: str) -> tuple[FileVersion, ...]:
    """Return the version of a model's file, or of each file in its folder.

    Raises the errors of `resolve`, and ModelError for files that cannot be read.
    """
    path = resolve(model)
    try:
        files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
        statuses = [(file, file.stat()) for file in files]
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    return tuple(FileVersion(file, found.st_size, found.st_mtime_ns, found.st_ino) for file, found in statuses)
