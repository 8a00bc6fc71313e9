"""Kernels that a wheel has brought along, in its package `kernel_images`. `make wheel` makes it, beside `backends.cpu`.

A file of images is for one instruction set and one way of reading memory, and needs named features of the processor. It
is trusted if it has the owner of the package, nobody else can write to it, and its digest is in the package's table.
The table also has the digest of the sources, so images of other sources are never loaded.
"""

import hashlib
import json
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from infer.compute.backends.cpu.host import kernel_cache
from infer.compute.backends.cpu.isa import instruction_set, target_features
from infer.compute.backends.cpu.weight_streams import way_of_reading
from infer.system.user_cache import read_own

PACKAGE = f"{__name__.partition('.cpu.')[0]}.kernel_images"  # only a wheel has it
_FILE = "way-of-reading"
_MOST_BYTES = 16 << 20  # of a file: it has about a megabyte


def read(name: str) -> bytes | None:
    """Return the image of a kernel by the name of its file; None if the wheel has none for this machine."""
    return _images().get(name)


def is_kept(name: str) -> bool:
    return name in _images()


def num_kernels() -> int:
    """Return the number of kernels that the wheel has for this machine."""
    return len(_images())


def folder() -> Path:
    """Return the folder of the package. Call it only if a kernel is kept there."""
    return Path(str(import_module(PACKAGE).__file__)).parent


@cache
def _images() -> dict[str, bytes]:
    """Return the images for this machine, by the names of their kernels' files."""
    header, _, rest = _content().partition(b"\n")
    return {name: rest[start : start + size] for name, start, size in json.loads(header or b"[]")}


def _content() -> bytes:
    """Return the file for this machine; nothing if there is none, or none that may be trusted."""
    if sys.platform != "linux" or kernel_cache.has_numba_settings() or find_spec(PACKAGE) is None:
        return b""
    table = import_module(PACKAGE)
    name = f"{instruction_set().name}-{_way()}"
    features, digest = table.FILES.get(name, ((), ""))
    if kernel_cache.sources_digest() != table.SOURCES or not target_features().issuperset(features):
        return b""
    init = Path(str(table.__file__))
    content = read_own(init.with_name(f"{name}.images"), _MOST_BYTES, owner=init.stat().st_uid)
    return content if content is not None and hashlib.sha256(content).hexdigest() == digest else b""


def _way() -> str:
    """Return the way in which this processor's cores read memory. It is stored, because LLVM names the cores."""
    kept = kernel_cache.read(_FILE)
    if kept is None:
        kept = way_of_reading().encode()
        kernel_cache.write(_FILE, kept)
    return kept.decode(errors="replace")
