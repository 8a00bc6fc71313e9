"""Forged kernels in the cache, with a right digest: each counts as absent, and none ends the process."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infer.compute.backends.cpu.compile import linked_code
from watched import run_python

pytestmark = pytest.mark.skipif(not linked_code.are_used_here(), reason="hardware: Linux on x86-64 only")

LOAD = """
import sys
from infer.compute.backends.cpu import isa
from infer.compute.backends.cpu.compile import addresses
from infer.compute.backends.cpu.compile.kernel import Kernel
print(addresses._try_load(Kernel(".threads.worker_loop:publish")))
try:
    isa.target_features()
    print("known")
except Exception as error:
    print(repr(error))
"""


def image(code: bytes = bytes(16), entry: Any = 0, places: Any = None, *more: Any) -> bytes:
    return linked_code.MAGIC + json.dumps([entry, {} if places is None else places, *more]).encode() + b"\n" + code


HEADS = {"no JSON": b"{", "an empty list": b"[]", "a number": b"1", "deep": b"[" * 100_000}
ENTRIES = {"text": "0", "true": True, "a fraction": 1.0, "one before": -1, "one behind": 16}
PLACES = {"before": [-8], "at the end": [9], "text": ["0"], "no list": "0"}
FORGERIES = {
    "empty": b"",
    "random": os.urandom(300),
    "magic alone": linked_code.MAGIC,
    **{name: linked_code.MAGIC + head + b"\n" + bytes(16) for name, head in HEADS.items()},
    "no code": image(b""),
    **{f"an entry: {name}": image(entry=entry) for name, entry in ENTRIES.items()},
    **{f"a place: {name}": image(places={"": places}) for name, places in PLACES.items()},
    "a place far off": image(places={"abort": [1 << 40]}),
    "symbols that are none": image(places=[]),
    "a symbol with a NUL": image(places={"a\0b": [0]}),
    "an unknown symbol": image(places={"no_such_symbol": [0]}),
    "another field": image(bytes(16), 0, {}, 1),
    "an object file that is none": b"symbol\n" + b"\x7fELF" + os.urandom(200),
    "not UTF-8": b"\xff\xfe\n" + b"\x7fELF",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_no_forged_image_is_loaded(name: str) -> None:
    content = FORGERIES[name]
    if content.startswith(linked_code.MAGIC):
        assert linked_code.try_load(content) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("cache")
    base.chmod(0o700)
    code = "from infer.compute.backends.cpu.host import kernel_cache; print(kernel_cache.cache_folder())"
    return Path(run(code, base).strip())


def run(code: str, base: Path) -> str:
    done = run_python(code, INFER_CACHE=str(base))
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


def put(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
    path.chmod(0o600)


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("name", ["empty", "random", "no code", "a place far off", "an object file that is none"])
def test_a_process_ignores_forged_files(folder: Path, name: str) -> None:
    for file in ("threads.worker_loop.publish", "target-features"):
        put(folder / file, FORGERIES[name])
    assert run(LOAD, folder.parents[1]) == "None\nknown\n"


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_a_process_ignores_entries_that_are_not_files(folder: Path, make: Callable[[Path], None]) -> None:
    path = folder / "threads.worker_loop.publish"
    path.unlink(missing_ok=True)
    make(path)
    assert run(LOAD, folder.parents[1]) == "None\nknown\n"
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_nothing_is_loaded_from_a_folder_that_others_may_write_to(folder: Path) -> None:
    """The image is one byte, a trap. An older version ran it."""
    put(folder / "threads.worker_loop.publish", image(b"\xcc" * 16))
    folder.chmod(0o777)
    found = run(LOAD, folder.parents[1])
    folder.chmod(0o700)
    assert found == "None\nknown\n"
