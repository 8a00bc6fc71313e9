"""The identity of the values that a cache stores for a token. Prefixes on disk are used only if it is the same."""

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from infer.engine.runner.runner import Runner

# Packages whose code computes the values, or reads the weights that they are computed from.
PACKAGES = (
    "infer.compute.backends",
    "infer.files",
    "infer.compute.kvcache",
    "infer.models",
    "infer.compute.operands",
    "infer.compute.ops",
    "infer.compute.quantization",
    "infer.engine.runner",
    "infer.engine.tensor_parallel",
)
WITHOUT_VALUES = ("infer.models.catalog", "infer.models.gguf_export")  # they only read models and write files
_SUFFIXES = (".py", ".cl")
_LIBRARIES = ("torch", "numpy", "numba", "llvmlite", "triton")


def prefix_fingerprint(model: dict[str, str], runner: Runner) -> str:
    """Return the fingerprint of the values in the runner's cache, as 32 hexadecimal digits.

    `model` is `Host.fingerprint`: weights, architecture, tokenizer, storage format. The layout of a page is included,
    but not the number of pages, which depends on the free memory. The device, the code and its libraries are included
    as well, because another kernel may compute other bits.
    """
    cache, device = runner.cache, runner.model.device
    layout = [(rows.group.layers, cache.memory.page_bytes(rows), cache.settings.page_tokens) for rows in cache.groups]
    machine = device.type, runner.model.backend.instruction_set(), torch.backends.cpu.get_cpu_capability()
    return _digest(repr((sorted(model.items()), layout, machine, _code())))


@cache
def _code() -> str:
    """Return a digest of the code that computes keys and values."""
    digest = hashlib.blake2b(digest_size=16)
    for name, path in sources().items():
        digest.update(name.encode() + b"\0" + path.read_bytes())
    return f"{digest.hexdigest()} {[_version(name) for name in _LIBRARIES]}"


def sources() -> dict[str, Path]:
    """Return the files of the code that computes keys and values, by package and path within it, in order.

    Raises ModuleNotFoundError if a package is missing or empty.
    """
    found: dict[str, Path] = {}
    for package in PACKAGES:
        folders = getattr(find_spec(package), "submodule_search_locations", None) or ()
        paths = {
            f"{package}/{path.relative_to(folder).as_posix()}": path
            for folder in folders
            for path in Path(folder).rglob("*")
            if path.suffix in _SUFFIXES and not _is_without_values(package, path.relative_to(folder))
        }
        if not paths:
            raise ModuleNotFoundError(f"{package} has no sources, so prefixes on disk cannot name it", name=package)
        found.update(sorted(paths.items()))
    return found


def _is_without_values(package: str, path: Path) -> bool:
    return ".".join([package, *path.parts[:1]]) in WITHOUT_VALUES


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
