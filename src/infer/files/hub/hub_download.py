"""Download the needed files of a model from the Hugging Face hub into its local cache, with `huggingface_hub`.

The library is loaded here, on first use, and reads $HF_TOKEN and $HF_ENDPOINT itself.
"""

import glob
import io
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from infer.errors import ModelError
from infer.files.hub.hub import HubName, choose, find_cached, hub_cache_folder, is_offline, not_found, shards_of_index
from infer.files.tensors.safetensors import INDEX_NAME, SINGLE_NAME
from infer.system.status_line import PROGRESS_WIDTH, StatusLine, bar

OnProgress = Callable[[int, int], None]  # bytes done, and bytes in total
_OFFLINE = "HF_HUB_OFFLINE is set: unset it to download"
# Errors of these libraries are about the hub.
_LIBRARIES = ("huggingface_hub", "httpx", "httpcore", "requests", "urllib3")
_NO_LIBRARY = "huggingface_hub, which downloads, is not installed: pip install huggingface_hub"


def fetch(name: HubName, on_progress: OnProgress | None = None) -> Path:
    """Return the model's file or folder from the cache. If it is incomplete, download it.

    Progress is reported to `on_progress`, or on stderr at a terminal. An exception in `on_progress` ends the download,
    which a later call resumes. Raises InvalidRequestError for a name that is unknown here and on the hub, and
    ModelError if the name has no model.
    """
    cached = find_cached(name)
    if cached is not None:
        return cached
    if is_offline():
        raise not_found(name, _OFFLINE)
    try:
        import huggingface_hub
    except ImportError:
        raise not_found(name, _NO_LIBRARY) from None
    line = StatusLine()
    try:
        return _download(huggingface_hub, name, on_progress or partial(_show, name, line), line)
    except Exception as error:  # includes all errors of its network library, and our own
        if not (isinstance(error, OSError) or type(error).__module__.startswith(_LIBRARIES)):
            raise
        _explain(name, error)
    finally:
        line.close()


def is_hub_reachable(seconds: float) -> bool:
    """Return True if the hub can be used: the library is installed, and a HEAD request is answered within `seconds`."""
    if is_offline():
        return False
    try:
        import huggingface_hub

        url = os.environ.get("HF_ENDPOINT") or huggingface_hub.constants.ENDPOINT
        huggingface_hub.get_session().head(url, timeout=seconds)
    except Exception:  # no library, or an error of its network library
        return False
    return True


def _show(name: HubName, line: StatusLine, num_done: int, total: int) -> None:
    share = bar(num_done / total, PROGRESS_WIDTH)
    line.show(f"{name} {share:<{PROGRESS_WIDTH}} {num_done / 1e6:.0f} of {total / 1e6:.0f} MB")


def _download(hub: Any, name: HubName, on_progress: OnProgress, line: StatusLine) -> Path:
    line.show(f"searching {name}")
    files = [file.rfilename for file in hub.HfApi().model_info(name.repo, revision=name.revision).siblings or ()]

    def download(*paths: str) -> Path:
        return Path(
            hub.snapshot_download(
                name.repo,
                revision=name.revision,
                cache_dir=hub_cache_folder(),
                allow_patterns=[glob.escape(file) for file in paths],
                tqdm_class=_make_bar(hub, on_progress),
            )
        )

    chosen = choose(name, files, None)
    folder = download(*chosen.small) if chosen.small else None
    if folder is not None and chosen.entry is None and SINGLE_NAME not in files:
        chosen = choose(name, files, shards_of_index(folder / INDEX_NAME))
    missing = sorted(set(chosen.weights) - set(files))
    if missing:
        raise ModelError(f"{name}: the repository lacks {', '.join(missing[:5])}, a part of the model")
    folder = download(*chosen.small, *chosen.weights)  # small files again: the revision may have changed
    return folder if chosen.entry is None else folder / chosen.entry


def _make_bar(hub: Any, on_progress: OnProgress) -> type[Any]:
    """Return a progress bar class for the hub's library that calls `on_progress` instead of writing."""

    class Bar(hub.utils.tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def display(self, msg: str | None = None, pos: int | None = None) -> bool:
            if self.unit == "B" and self.total and not self.disable:  # a closed bar is disabled
                on_progress(self.n, self.total)
            return True

    return Bar


def _explain(name: HubName, error: Exception) -> NoReturn:
    """Raise InvalidRequestError with the reason for an error.

    Errors are recognised by their class names, because their modules have moved between versions of the library.
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        page = f"https://huggingface.co/{name.repo}"
        reason = f"it is gated: accept its terms at {page} and set HF_TOKEN to your token"
    elif "RepositoryNotFoundError" in kinds:
        reason = "the hub has no such repository, or it is private: check the name, or set HF_TOKEN"
    elif "RevisionNotFoundError" in kinds:
        reason = f"the hub's {name.repo} has no revision {name.revision}"
    elif isinstance(error, OSError) and error.errno is not None:
        reason = f"it cannot be written there: {error.strerror}"
    else:
        first = " ".join(str(error).split())[:200]
        reason = f"the hub cannot be reached ({type(error).__name__}: {first})"
    raise not_found(name, reason) from error
