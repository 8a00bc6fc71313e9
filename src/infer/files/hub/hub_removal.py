"""Remove a model from the hub's local cache: its files, and contents that no other cached model uses."""

import shutil
from pathlib import Path

from infer.errors import InvalidRequestError
from infer.files.hub.hub import HubName, find_cached, hub_cache_folder, list_files, model_files, not_found

_PLACE = "infer models --json says where each model is"


def remove_cached(name: HubName) -> int:
    """Remove the model, and return the number of freed bytes.

    Raises InvalidRequestError if the cache does not have the model.
    """
    path = find_cached(name)
    if path is None:
        raise not_found(name, _PLACE)
    repository = hub_cache_folder() / f"models--{name.repo.replace('/', '--')}"
    snapshot = next(folder for folder in (path, *path.parents) if folder.parent.name == "snapshots")
    removed = [snapshot / file for file in model_files(name, snapshot)]
    contents = {file.resolve() for file in removed}
    try:
        for file in removed:
            file.unlink()
        used = {link.resolve() for link in (repository / "snapshots").rglob("*") if link.is_file()}
        freed = sum(_unlink(content) for content in contents - used)
        if not list_files(repository / "snapshots"):
            shutil.rmtree(repository)
    except OSError as error:
        raise InvalidRequestError(f"{name} cannot be removed from {repository}: {error.strerror}") from error
    return freed


def _unlink(content: Path) -> int:
    """Remove a file if it still exists, and return its size."""
    if not content.exists():  # the snapshot had the content itself, not a link
        return 0
    size = content.stat().st_size
    content.unlink()
    return size
