"""Compiled kernels on disk are found again without a compiler, are never stale, and never cause an error.

Forged kernels with a right digest count as absent, and none ends the process.
"""

import ctypes
import hashlib
import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infer.compute.backends.cpu import simd, thread_records
from infer.compute.backends.cpu.compile import addresses, linked_code
from infer.compute.backends.cpu.compile.compiler import compile_command, link
from infer.compute.backends.cpu.compile.kernel import Kernel
from infer.compute.backends.cpu.host import kernel_cache
from infer.compute.backends.cpu.threads.worker_loop import publish
from infer.errors import InferError
from infer.system.status_line import StatusLine
from programs import Programs
from watched import python_command, run_python

SUM = np.dtype([("values", np.int64), ("count", np.int64), ("total", np.int64)])
needs_images = pytest.mark.skipif(not linked_code.are_used_here(), reason="hardware: Linux on x86-64 only")

FORWARD = """
import sys, torch
from infer.compute import ops
from infer.compute.operands.weights import Norm, Projection, StoredWeight
weight = StoredWeight("F32", (16, 8), torch.eye(16, 8))
projection = ops.prepare(Projection((weight,)), torch.device("cpu"))
y = ops.norm_project(torch.ones(1, 8), Norm(torch.ones(8), 0.0), projection).floats
assert torch.equal(y[0], torch.tensor([1.0] * 8 + [0.0] * 8)), y
import infer.llm
print(sorted({"numba", "llvmlite"} & set(sys.modules)))
"""


SUMS = """
from infer.compute.backends.cpu.compile.addresses import compiled_address
from test_kernel_cache import SUM, run_sum
print(*(run_sum(compiled_address("test_kernel_cache:make_sum", SUM, step)) for step in (1, 2, 3)))
"""


def make_sum(step: int) -> Callable[..., None]:
    def sum_values(args, state, thread, num_threads):  # type: ignore[no-untyped-def]
        for i in range(0, args.count, step):
            args.total += simd.load_i64(args.values + 8 * i)

    return sum_values


@pytest.fixture(scope="module")
def made() -> tuple[str, bytes]:
    """Return the symbol and the object code of a command."""
    one = compile_command("sum_1", lambda: make_sum(1), SUM)
    assert one.object_code is not None
    return one.symbol, one.object_code


def run_sum(address: int | None) -> int:
    assert address is not None
    arguments, values = np.zeros(1, SUM), np.arange(10)
    arguments["values"], arguments["count"] = values.ctypes.data, len(values)
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_ssize_t)(address)
    function(arguments.ctypes.data, 0, 0, 1)
    return int(arguments["total"][0])


@needs_images
def test_a_process_that_finds_its_kernels_loads_no_compiler(programs: Programs) -> None:
    assert programs.run(FORWARD).returncode == 0  # now the cache has the kernels
    warm = programs.run(FORWARD)
    assert (warm.returncode, warm.stdout, warm.stderr) == (0, "[]\n", "")


@pytest.mark.slow
def test_damaged_and_emptied_caches_are_filled_again(tmp_path: Path) -> None:
    first = run_python(SUMS, INFER_CACHE=str(tmp_path))
    assert (first.returncode, first.stdout) == (0, "45 20 18\n"), first.stderr
    (folder,) = (tmp_path / "kernels").iterdir()
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert sum("sum_" in name for name in whole) == 3
    for index, (name, content) in enumerate(sorted(whole.items())):
        (folder / name).write_bytes([b"", content[:-1], content[:100] + b"x" + content[101:]][index % 3])
    again = run_python(SUMS, INFER_CACHE=str(tmp_path))
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert {path.name for path in folder.iterdir()} == set(whole)
    folder.chmod(0o500)
    warm = run_python(SUMS, INFER_CACHE=str(tmp_path))
    folder.chmod(0o700)
    assert (warm.returncode, warm.stdout, warm.stderr) == (0, first.stdout, "")


def test_processes_that_start_together_with_a_cold_cache_both_work(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(lambda _: run_python(SUMS, INFER_CACHE=str(tmp_path)), range(2)))
    assert [(done.returncode, done.stdout) for done in both] == [(0, "45 20 18\n")] * 2
    line = "infer: compiling CPU kernels, once per machine and model type\n"  # the one line without a terminal
    assert line in {done.stderr for done in both} <= {line, ""}
    warm = run_python(SUMS, INFER_CACHE=str(tmp_path))
    assert (warm.returncode, warm.stdout, warm.stderr) == (0, "45 20 18\n", ""), "the kernels are found"


@needs_images
def test_an_image_has_the_results_of_its_object_file(made: tuple[str, bytes]) -> None:
    image = linked_code.try_make(made[1], made[0])
    assert image is not None
    assert run_sum(linked_code.try_load(image)) == 45


def test_cached_object_code_is_loaded(made: tuple[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "cache_folder", lambda: tmp_path)
    kernel = Kernel("test_kernel_cache:make_sum", (1,))
    kernel_cache.write(kernel.file_name, made[0].encode() + b"\n" + made[1])
    assert run_sum(addresses._try_load(kernel)) == 45


def test_llvm_links_an_object_file(made: tuple[str, bytes]) -> None:
    assert run_sum(link(*made)) == 45


@needs_images
def test_no_image_is_made_of_unknown_object_code(made: tuple[str, bytes]) -> None:
    symbol, code = made
    assert linked_code.try_make(code, "another") is None
    for machine in (40, 183):  # 32-bit and 64-bit ARM
        assert linked_code.try_make(code[:18] + machine.to_bytes(2, "little") + code[20:], symbol) is None
    for size in range(0, len(code), 7):
        linked_code.try_make(code[:size], symbol)  # returns an image or None, and raises nothing


@needs_images
def test_an_image_with_an_unknown_symbol_is_not_loaded() -> None:
    told = compile_command("publish", lambda: publish, thread_records.FLAG)
    assert told.object_code is not None
    image = linked_code.try_make(told.object_code, told.symbol)
    assert image is not None
    assert b'"syscall"' in image
    assert linked_code.try_load(image) is not None
    assert linked_code.try_load(image.replace(b'"syscall"', b'"sysclown"')) is None


def test_kernel_names_tell_maker_variant_and_foreign_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Kernel(".matmul.matmul:make_matmul", ("Q4_0", 2, "avx2")).file_name == "matmul.matmul.matmul_Q4_0_2_avx2"
    module = tmp_path / "kernel_module_of_tests.py"
    monkeypatch.syspath_prepend(tmp_path)
    names = []
    for source in ("x = 1", "x = 2"):
        module.write_text(source)
        names.append(Kernel("kernel_module_of_tests:make_it", (3,)).file_name)
    assert all(name.startswith("kernel_module_of_tests.it_3-") for name in names)
    assert names[0] != names[1]


def test_the_fingerprint_follows_the_settings_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kernel_cache.fingerprint.__wrapped__()
    assert kernel_cache.fingerprint.__wrapped__() == before
    monkeypatch.setenv("NUMBA_OPT", "1")
    assert kernel_cache.fingerprint.__wrapped__() != before


def test_folders_without_use_for_a_month_are_pruned_and_others_are_not(tmp_path: Path) -> None:
    day = 24 * 3600
    ages = {"0" * 16: 31, "1" * 16: 29, "2" * 16: 0, "keep me": 99, "f" * 16: 99}
    for name, age in ages.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel").write_text("")
        os.utime(tmp_path / name, (time.time() - age * day,) * 2)
    kernel_cache.prune(tmp_path / ("f" * 16))
    assert {path.name for path in tmp_path.iterdir()} == set(ages) - {"0" * 16}


def test_the_latest_of_many_folders_are_kept(tmp_path: Path) -> None:
    for index in range(40):
        (tmp_path / f"{index:016x}").mkdir()
        os.utime(tmp_path / f"{index:016x}", (time.time() - 60 * index,) * 2)
    kernel_cache.prune(tmp_path / f"{39:016x}")
    assert sorted(int(path.name, 16) for path in tmp_path.iterdir()) == [*range(15), 39]


def test_a_folder_that_is_used_counts_as_used_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFER_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel_cache, "_found", kernel_cache._found.__wrapped__)
    folder = tmp_path / "kernels" / kernel_cache.fingerprint()
    folder.mkdir(parents=True)
    os.utime(folder, (0, 0))
    assert kernel_cache.cache_folder() == folder
    assert folder.stat().st_mtime > 10**9  # a year of this century


def test_a_folder_that_is_removed_while_in_use_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "_failures", [])
    monkeypatch.setattr(kernel_cache, "cache_folder", lambda: tmp_path / "gone")
    kernel_cache.write("kernel", b"code")
    assert kernel_cache.read("kernel") is None
    (tmp_path / "gone").mkdir()
    kernel_cache.write("kernel", b"code")
    assert kernel_cache.read("kernel") == b"code"
    assert [path.name for path in (tmp_path / "gone").iterdir()] == ["kernel"]


def test_a_full_disk_gives_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, content: bytes) -> OSError:
        return OSError(28, "No space left on device")

    monkeypatch.setattr(kernel_cache, "write_own", full)
    monkeypatch.setattr(kernel_cache, "_failures", [])
    monkeypatch.setattr(kernel_cache, "_found", lambda: (tmp_path, None))
    for name in ("first", "second"):
        kernel_cache.write(name, b"code")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"process only: {tmp_path} cannot be written (No space left on device) (set INFER_CACHE)")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="hardware: Linux only")
def test_a_fork_waits_until_no_thread_compiles() -> None:
    done = run_python("""
import os, threading, time
from infer.compute.backends.cpu.compile import addresses
from infer.compute.backends.cpu.threads.pool import thread_pool
held = threading.Event()
def compile_slowly():
    with addresses._lock:
        held.set()
        time.sleep(0.2)
threading.Thread(target=compile_slowly).start()
held.wait()
child = os.fork()
if child == 0:
    thread_pool()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
with addresses._lock:
    print("free")
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "free\n", "")


def stderr_on_a_terminal(code: str, **environment: str) -> str:
    parent, child = pty.openpty()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    with subprocess.Popen(python_command(code), env=env, stderr=child):
        os.close(child)
        shown = b""
        try:
            while piece := os.read(parent, 4096):
                shown += piece
        except OSError:  # Linux's error at the end of a terminal without a writer
            pass
        os.close(parent)
    return shown.decode()


@pytest.mark.slow
def test_compiling_in_this_process_shows_a_line_and_removes_it(tmp_path: Path) -> None:
    shown = stderr_on_a_terminal(SUMS, INFER_CACHE=str(tmp_path))
    assert re.findall(r"compiling the CPU kernel (\w+)", shown) == ["sum_1", "sum_2", "sum_3"]
    assert shown.count("\n") == 1
    assert shown.endswith("sum_3\x1b[K\r\x1b[K")
    assert max(len(line) for line in re.split(r"\r|\x1b\[K", shown)) < 80
    assert stderr_on_a_terminal(SUMS, INFER_CACHE=str(tmp_path)) == ""


def test_the_newest_line_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    (first := StatusLine()).show("a")
    (second := StatusLine()).show("b")
    first.show("c")
    second.close()
    first.show("d")
    first.close()
    assert capsys.readouterr().err == "\ra\x1b[K\rb\x1b[K\r\x1b[K\rd\x1b[K\r\x1b[K"


def test_a_system_without_executable_memory_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hardened:
        mmap = staticmethod(linked_code._libc().mmap)
        mprotect = staticmethod(lambda address, size, protection: -1)

    monkeypatch.setattr(linked_code, "_libc", Hardened)
    with pytest.raises(InferError, match="mprotect fails"):
        compile_command("sum_1", lambda: make_sum(1), SUM)


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


@needs_images
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


@needs_images
@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("name", ["empty", "random", "no code", "a place far off", "an object file that is none"])
def test_a_process_ignores_forged_files(folder: Path, name: str) -> None:
    for file in ("threads.worker_loop.publish", "target-features"):
        put(folder / file, FORGERIES[name])
    assert run(LOAD, folder.parents[1]) == "None\nknown\n"


@needs_images
@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_a_process_ignores_entries_that_are_not_files(folder: Path, make: Callable[[Path], None]) -> None:
    path = folder / "threads.worker_loop.publish"
    path.unlink(missing_ok=True)
    make(path)
    assert run(LOAD, folder.parents[1]) == "None\nknown\n"
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


@needs_images
def test_nothing_is_loaded_from_a_folder_that_others_may_write_to(folder: Path) -> None:
    """The image is one byte, a trap. An older version ran it."""
    put(folder / "threads.worker_loop.publish", image(b"\xcc" * 16))
    folder.chmod(0o777)
    found = run(LOAD, folder.parents[1])
    folder.chmod(0o700)
    assert found == "None\nknown\n"
