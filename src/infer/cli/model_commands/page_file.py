"""The file that `--html` names: checked before the work, written at its end."""

from pathlib import Path

from infer.errors import InvalidRequestError
from infer.system.files.atomic import replacing


def check_page(path: Path | None) -> None:
    """Raise InvalidRequestError, before anything is computed, if a page cannot have this name."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        problem = "it is a folder" if path.is_dir() else f"{path.parent} is not a folder"
        raise InvalidRequestError(f"the page {path} cannot be written: {problem}")


def write_page(path: Path, content: str) -> None:
    """Write a page, replacing any file of this name. Raises InvalidRequestError if it cannot be written."""
    try:
        with replacing(path, 0o666) as file:
            file.write(content.encode())
    except OSError as error:
        raise InvalidRequestError(f"the page {path} cannot be written: {error.strerror}") from error
