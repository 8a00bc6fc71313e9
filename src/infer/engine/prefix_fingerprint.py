"""The identity of the values that a cache stores for a token. Prefixes on disk are used only if it is the same."""

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import infer
from infer.runner.runner import Runner

_PACKAGES = (
    "backends",
    "kvcache",
    "model",
    "operands",
    "ops",
    "quantization",
    "runner",
)  # packages whose code computes the values
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
    package = Path(infer.__file__).parent
    sources = sorted(path for name in _PACKAGES for path in (package / name).rglob("*.py"))
    digest = hashlib.blake2b(digest_size=16)
    for source in sources:
        digest.update(source.relative_to(package).as_posix().encode() + b"\0" + source.read_bytes())
    return f"{digest.hexdigest()} {[_version(name) for name in _LIBRARIES]}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
