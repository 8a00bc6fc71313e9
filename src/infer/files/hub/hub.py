"""Names on the Hugging Face hub, and models in its local cache, read and removed here without the hub's own library.

    org/repo                    the repository's safetensors, or its only GGUF model
    org/repo:Q4_K_M             the GGUF model of that quantisation
    org/repo:folder/file.gguf   that file (any part of a split model stands for all)
    org/repo@revision:…         a branch, tag or commit; without it the main branch

A complete model in the cache is used without any network access. `hub_download` downloads missing files.
"""

import os
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from infer.errors import InvalidRequestError, ModelError
from infer.files.gguf.gguf import part_paths
from infer.files.tensors.safetensors import INDEX_NAME, PICKLE_SUFFIXES, SINGLE_NAME, read_index
from infer.system.spellings import plain_name

DEFAULT_REVISION = "main"
_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<variant>[^:\\]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)  # GGUF files that are not text models
_MAX_LISTED = 20
# Small files in a folder of safetensors that checkpoint and tokenizer may need.
_SMALL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "vocab.txt", "added_tokens.json", "chat_template.jinja", "chat_template.json", "modules.json",
    "1_Pooling/config.json",
)  # fmt: skip
_ADDITIONAL_TEMPLATES = "additional_chat_templates/"


@dataclass(frozen=True)
class HubName:
    repo: str
    revision: str = DEFAULT_REVISION
    variant: str | None = None  # a file's path or a quantisation

    def __str__(self) -> str:
        revision = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        return f"{self.repo}{revision}" + (f":{self.variant}" if self.variant else "")


@dataclass(frozen=True)
class Chosen:
    """The files of a repository that make a model.

    Small files are downloaded first, so that weights never lack them.
    """

    small: tuple[str, ...]
    weights: tuple[str, ...]
    entry: str | None  # the file to open; None: the folder


def parse_hub_name(name: str) -> HubName | None:
    """Return the parsed name, or None if it cannot be a name on the hub. `hf.co/` before it is left out."""
    match = _NAME.fullmatch(plain_name(name))
    if match is None or match["repo"].endswith((".gguf", ".safetensors", ".json", *PICKLE_SUFFIXES)):
        return None
    paths = (match["repo"], match["revision"] or DEFAULT_REVISION, match["variant"] or "x")
    if any(part in ("", ".", "..") for path in paths for part in path.split("/")):
        return None
    return HubName(match["repo"], paths[1], match["variant"])


def hub_cache_folder() -> Path:
    """Return the download folder of the hub's library.

    It is $HF_HUB_CACHE, or a folder in $HF_HOME, or one in the user's cache.
    """
    if own := os.environ.get("HF_HUB_CACHE"):
        return Path(os.path.expanduser(own))
    if home := os.environ.get("HF_HOME"):
        return Path(os.path.expanduser(home)) / "hub"
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(shared)) / "huggingface" / "hub"


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def find_cached(name: HubName) -> Path | None:
    """Return the model's file or folder in the cache, or None if a part of it is missing."""
    snapshot = _snapshot(name)
    if snapshot is None:
        return None
    try:
        chosen, files = _choose_cached(name, snapshot)
    except ModelError:  # the hub may have the missing files
        return None
    required = {*chosen.weights} | ({"config.json"} if chosen.entry is None else set())
    if not required <= set(files) or (chosen.entry is None and not {"tokenizer.json", "vocab.txt"} & set(files)):
        return None
    return snapshot if chosen.entry is None else snapshot / chosen.entry


def cached_repositories() -> Iterator[tuple[HubName, list[str]]]:
    """Yield each revision of each repository in the cache, complete or not, and its files."""
    for folder in sorted(hub_cache_folder().glob("models--*--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        refs = {path.relative_to(folder / "refs").as_posix() for path in (folder / "refs").rglob("*") if path.is_file()}
        names = [HubName(repo, revision) for revision in sorted(refs, key=lambda ref: (ref != DEFAULT_REVISION, ref))]
        seen = {snapshot.name for name in names if (snapshot := _snapshot(name)) is not None}
        names += [
            HubName(repo, path.name) for path in sorted((folder / "snapshots").glob("*")) if path.name not in seen
        ]
        for name in names:
            if parse_hub_name(str(name)) == name and (snapshot := _snapshot(name)) is not None:
                yield name, list_files(snapshot)


def list_files(folder: Path) -> list[str]:
    """Return the paths of the files below a folder, without broken links."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def choose(name: HubName, files: Collection[str], shards: Sequence[str] | None) -> Chosen:
    """Return the files of a repository that a model needs. `shards` are the files in its index; None: not read yet.

    Raises ModelError if no file matches, or several do.
    """
    if name.variant is None and "config.json" in files and not {SINGLE_NAME, INDEX_NAME}.isdisjoint(files):
        return _choose_folder(files, shards)
    models = gguf_models(files)
    if name.variant is not None:
        models = _matching(name.variant, models)
        if not models:
            raise ModelError(f"{name.repo} has no {name.variant}: {_listed(name, gguf_models(files), files)}")
    if len(models) == 1:
        return Chosen((), tuple(models[0]), models[0][0])
    raise ModelError(f"{name}: {_listed(name, models, files)}")


def gguf_models(files: Collection[str]) -> list[list[str]]:
    """Return the GGUF models among files, each with all the parts that its name implies."""
    found: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.endswith(".gguf") and not _NO_MODEL.search(PurePosixPath(file).name):
            parts = [path.as_posix() for path in part_paths(PurePosixPath(file))]
            found[parts[0]] = parts
    return list(found.values())


def _choose_folder(files: Collection[str], shards: Sequence[str] | None) -> Chosen:
    small = [file for file in _SMALL_FILES if file in files]
    small += sorted(file for file in files if file.startswith(_ADDITIONAL_TEMPLATES) and file.endswith(".jinja"))
    if SINGLE_NAME in files:
        return Chosen(tuple(small), (SINGLE_NAME,), None)
    return Chosen((*small, INDEX_NAME), tuple(shards or ()), None)


def _matching(variant: str, models: list[list[str]]) -> list[list[str]]:
    if variant.endswith(".gguf"):
        return [parts for parts in models if variant in parts]
    between = re.compile(rf"(?<![a-z0-9]){re.escape(variant.lower())}(?![a-z0-9_])")
    return [parts for parts in models if between.search(parts[0].lower().removesuffix(".gguf"))]


def _listed(name: HubName, models: list[list[str]], files: Collection[str]) -> str:
    """Return the end of an error message: the models that a repository has, and what to do instead."""
    if models:
        shown = ", ".join(parts[0] for parts in models[:_MAX_LISTED])
        more = f" and {len(models) - _MAX_LISTED} more" if len(models) > _MAX_LISTED else ""
        return f"it has the GGUF files {shown}{more}; name one, as in {name.repo}:Q4_K_M or {name.repo}:{models[0][0]}"
    if pickles := sorted(file for file in files if file.endswith(PICKLE_SUFFIXES)):
        return (
            f"its weights are pickled ({pickles[0]}), which can run code, and are never opened: look for a repository "
            "with safetensors or a GGUF of it"
        )
    if "adapter_config.json" in files:
        return "it is an adapter, not a model: merge it into its model first"
    return f"it has no supported weights: expected {SINGLE_NAME}, {INDEX_NAME} or a .gguf file"


def _snapshot(name: HubName) -> Path | None:
    folder = hub_cache_folder() / f"models--{name.repo.replace('/', '--')}"
    commit = name.revision
    if not _COMMIT.fullmatch(commit):
        try:
            commit = (folder / "refs" / name.revision).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None
    snapshot = folder / "snapshots" / commit
    return snapshot if _COMMIT.fullmatch(commit) and os.path.isdir(snapshot) else None


def _choose_cached(name: HubName, snapshot: Path) -> tuple[Chosen, list[str]]:
    """Return the files that a model needs, and all files of its snapshot. Raises ModelError as `choose` does."""
    files = list_files(snapshot)
    has_shards = INDEX_NAME in files and SINGLE_NAME not in files
    return choose(name, files, shards_of_index(snapshot / INDEX_NAME) if has_shards else []), files


def shards_of_index(index: Path) -> list[str]:
    """Return the files into which an index divides the weights."""
    return sorted(set(read_index(index).values()))


def not_found(name: HubName, reason: str) -> InvalidRequestError:
    """Return the error about a model that is not in the cache, or about a name that several of its files have."""
    if (snapshot := _snapshot(name)) is not None and gguf_models(list_files(snapshot)):
        try:
            _choose_cached(name, snapshot)
        except ModelError as error:
            return InvalidRequestError(f"{error} (in the hub's local cache; {reason})")
    return InvalidRequestError(f"{name!s:.200} is not in the hub's local cache, {hub_cache_folder()}, and {reason}")


def remove_cached(name: HubName) -> int:
    """Remove the model, and return the number of freed bytes.

    Raises InvalidRequestError if the cache does not have the model.
    """
    path = find_cached(name)
    if path is None:
        raise not_found(name, "infer models --json says where each model is")
    repository = hub_cache_folder() / f"models--{name.repo.replace('/', '--')}"
    snapshot = next(folder for folder in (path, *path.parents) if folder.parent.name == "snapshots")
    chosen, files = _choose_cached(name, snapshot)  # the parts of a GGUF model, or all files except those of others
    others = {part for parts in gguf_models(files) for part in parts}
    named = [file for file in files if file not in others] if chosen.entry is None else chosen.weights
    removed = [snapshot / file for file in named]
    contents = {file.resolve() for file in removed}
    try:
        for file in removed:
            file.unlink()
        used = {link.resolve() for link in (repository / "snapshots").rglob("*") if link.is_file()}
        unused = [content for content in contents - used if content.exists()]  # or the snapshot had it, not a link
        freed = sum(content.stat().st_size for content in unused)
        for content in unused:
            content.unlink()
        if not list_files(repository / "snapshots"):
            shutil.rmtree(repository)
    except OSError as error:
        raise InvalidRequestError(f"{name} cannot be removed from {repository}: {error.strerror}") from error
    return freed
