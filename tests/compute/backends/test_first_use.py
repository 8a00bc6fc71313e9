"""On a machine without kernels, they are compiled from the start, without torch, by a Numba that takes shortcuts."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import ClassVar

import pytest

from infer.compute.backends.cpu import records
from infer.compute.backends.cpu.compile import addresses, compiler, linked_code
from infer.compute.backends.cpu.compile.kernel import Kernel
from infer.compute.backends.cpu.compile.parallel import CompiledObject
from infer.compute.backends.cpu.host import kernel_cache
from infer.compute.backends.cpu.isa import instruction_set
from infer.compute.backends.cpu.needed_kernels import needed_kernels
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.files import open_checkpoint
from infer.models.compile_ahead import compiling_ahead, make_outline
from infer.models.families import make_architecture
from infer.models.memory.memory_estimate import LoadSettings
from infer.system.cores import cores
from tiny import TINY, make_tiny
from watched import run_python

MAKE_ALL = """
import json, sys
import infer.compute.backends.cpu.compile.child
from infer.compute.backends.cpu.compile.kernel import Kernel
for maker, variant in json.loads(sys.argv[1]):
    Kernel(maker, tuple(variant)).make()
print(sorted({"torch", "jaxtyping"} & set(sys.modules)))
"""
NORMALIZE = Kernel(".activations:normalize")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(TINY[0], folder)
    return folder


@pytest.fixture(scope="module")
def needed(folder: Path) -> list[Kernel]:
    checkpoint = open_checkpoint(str(folder))
    architecture = make_architecture(checkpoint.config)
    outline = make_outline(architecture, checkpoint.tensors, LoadSettings(), CacheSettings())
    return list(needed_kernels(outline, instruction_set()))


class NoCompilation:
    """Takes kernels and compiles none, so that a caller who needs a kernel compiles it."""

    begun: ClassVar[list[set[str]]] = []

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self.file_names = {kernel.file_name for kernel in kernels}
        self.begun.append(self.file_names)

    def take(self, file_name: str) -> CompiledObject | None:
        return None

    def close(self) -> None:
        pass

    finish = close


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Return the kernels that would have been compiled. Every kernel is available immediately."""
    monkeypatch.setattr(NoCompilation, "begun", [])
    monkeypatch.setattr(addresses, "Compilation", NoCompilation)
    monkeypatch.setattr(addresses, "compiled_address", lambda *named: 1)
    monkeypatch.setattr(addresses, "_address_by_kernel", {})
    monkeypatch.setattr(kernel_cache, "is_kept", lambda name: False)
    monkeypatch.setattr(kernel_cache, "is_empty", lambda: True)
    return NoCompilation.begun


def test_compiling_kernels_loads_no_torch(needed: list[Kernel]) -> None:
    kernels = json.dumps([(kernel.maker, kernel.variant) for kernel in needed])
    done = run_python(MAKE_ALL, kernels)
    assert done.stdout == "[]\n", done.stderr


def test_kernels_begun_ahead_are_those_of_the_load_and_not_begun_twice(
    begun: list[set[str]], folder: Path, needed: list[Kernel]
) -> None:
    with compiling_ahead(str(folder), "cpu", LoadSettings(), CacheSettings()):
        assert begun == [{kernel.file_name for kernel in addresses.missing(needed)}]
        with addresses.compiling(needed):
            pass
    assert len(begun) == 1
    with addresses.compiling(needed):
        assert begun[1:] == begun[:1]  # kernels that no process took are dropped


def test_a_load_compiles_the_other_kernels_that_it_needs(
    begun: list[set[str]], folder: Path, needed: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "_WORTH_SECONDS", 0.1)
    with (
        compiling_ahead(str(folder), "cpu", LoadSettings(), CacheSettings()),
        addresses.compiling([*needed, Kernel(".matmul.matmul:make_gate", ("relu",), "EPILOGUE")]),
    ):
        assert begun[1:] == [{"matmul.matmul.gate_relu"}]


@pytest.mark.parametrize("unlike", ["kept", "cuda", "refused"])
def test_kernels_are_compiled_ahead_only_if_they_will_be_used(
    unlike: str, begun: list[set[str]], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_cache, "is_empty", lambda: unlike != "kept")
    model, device = (str(tmp_path) if unlike == "refused" else str(folder)), "cuda" if unlike == "cuda" else "cpu"
    with compiling_ahead(model, device, LoadSettings(), CacheSettings()):
        pass
    assert begun == []


def test_a_cache_is_empty_until_it_holds_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "cache_folder", lambda: tmp_path)
    kernel_cache.write("target-features", b"avx2")
    assert kernel_cache.is_empty()
    kernel_cache.write("matmul.matmul.add", b"code")
    assert not kernel_cache.is_empty()


def image() -> bytes:
    code = compiler.compile_command(NORMALIZE.label, NORMALIZE.make, records.NORMALIZE)
    assert code.object_code is not None
    made = linked_code.try_make(code.object_code, code.symbol)
    assert made is not None
    return made


@pytest.mark.slow
@pytest.mark.skipif(not linked_code.are_used_here(), reason="hardware: Linux on x86-64 only")
def test_shortcuts_change_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    short = image()
    with monkeypatch.context() as patched:
        patched.setattr(compiler, "shortcuts", nullcontext)
        assert image() == short


def test_processors_are_those_the_process_may_use_within_its_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_allowed", lambda: {0, 1, 2, 3})
    for quota, expected in ((None, 4), (2.5, 2), (9.0, 4), (0.5, 1)):
        monkeypatch.setattr(cores, "cpu_quota", lambda quota=quota: quota)
        assert cores.num_processors() == expected
