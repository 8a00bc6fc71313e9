"""Kernels that a wheel has brought along are loaded if this machine can run them, and if their package is intact."""

import hashlib
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from build_wheel import TARGETS, joined
from infer.compute.backends.cpu.backend import CpuBackend
from infer.compute.backends.cpu.compile import addresses, linked_code
from infer.compute.backends.cpu.compile.compiler import compile_command
from infer.compute.backends.cpu.compile.kernel import Kernel
from infer.compute.backends.cpu.host import kernel_cache, shipped_kernels
from infer.compute.backends.cpu.isa import BY_NAME, instruction_set
from infer.compute.backends.cpu.weight_streams import way_of_reading
from test_kernel_cache import SUM, make_sum, run_sum

pytestmark = pytest.mark.skipif(not linked_code.are_used_here(), reason="hardware: Linux on x86-64 only")

KERNEL = Kernel("test_kernel_cache:make_sum", (2,))
NAME = "images_of_this_test"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a package with one kernel, which is the wheel's until the end of the test."""
    made = compile_command(KERNEL.label, lambda: make_sum(2), SUM)
    image = linked_code.try_make(made.object_code or b"", made.symbol)
    assert image is not None
    folder = tmp_path / NAME
    folder.mkdir()
    write(folder, {KERNEL.file_name: image})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(shipped_kernels, "PACKAGE", NAME)
    monkeypatch.setattr(kernel_cache, "read", lambda name: None)
    monkeypatch.setattr(kernel_cache, "is_kept", lambda name: False)
    return folder


def write(
    folder: Path, images: dict[str, bytes], *, sources: str | None = None, features: tuple[str, ...] = ()
) -> None:
    name, content = f"{instruction_set().name}-{way_of_reading()}", joined(images)
    (folder / f"{name}.images").write_bytes(content)
    (folder / f"{name}.images").chmod(0o644)
    files = {name: (features, hashlib.sha256(content).hexdigest())}
    sources = kernel_cache.sources_digest() if sources is None else sources
    (folder / "__init__.py").write_text(f"SOURCES = {sources!r}\nFILES = {files!r}\n")


def image_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> bytes | None:
    """Return the image as a new process would read it."""
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    shipped_kernels._images.cache_clear()
    return shipped_kernels.read(KERNEL.file_name)


def test_a_shipped_kernel_runs_and_is_not_missing(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert image_of(package, monkeypatch) is not None
    assert addresses.missing_kernels([KERNEL, Kernel("test_kernel_cache:make_sum", (3,))]) == [
        Kernel("test_kernel_cache:make_sum", (3,))
    ]
    expected = int(np.arange(10)[::2].sum())
    assert run_sum(addresses._try_load(KERNEL)) == expected


def test_a_report_says_if_kernels_come_from_the_wheel(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = CpuBackend(torch.device("cpu"))
    kept = f"compiled here, kept in {kernel_cache.cache_folder()}"
    assert image_of(package, monkeypatch) is not None
    assert here.kernel_source() == f"1 from the wheel, in {package}; others {kept}"
    write(package, {}, sources="0" * 64)
    assert image_of(package, monkeypatch) is None
    assert here.kernel_source() == kept
    monkeypatch.setattr(kernel_cache, "trouble", lambda: "/cache cannot be written")
    assert here.kernel_source() == "compiled here, not kept: /cache cannot be written"
    assert here.description().endswith("; kernels compiled here, not kept: /cache cannot be written")


def test_a_kernel_that_is_not_shipped_is_missing(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert image_of(package, monkeypatch) is not None
    assert shipped_kernels.read("another") is None
    assert not shipped_kernels.is_kept("another")


@pytest.mark.parametrize("change", [{"sources": "0" * 64}, {"features": ("amx-none",)}])
def test_images_for_other_sources_or_processors_are_left(
    change: dict[str, object], package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(package, {KERNEL.file_name: b"infer image\n"}, **change)  # type: ignore[arg-type]
    assert image_of(package, monkeypatch) is None


def test_a_changed_file_is_not_loaded(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = package.glob("*.images")
    file.write_bytes(file.read_bytes() + b"\0")
    assert image_of(package, monkeypatch) is None


def test_a_file_that_others_may_write_to_is_not_loaded(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = package.glob("*.images")
    file.chmod(0o666)
    assert image_of(package, monkeypatch) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="hardware: only root can give a file away")
def test_a_file_of_another_owner_than_its_package_is_not_loaded(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = package.glob("*.images")
    os.chown(file, 12345, -1)
    assert image_of(package, monkeypatch) is None
    os.chown(package / "__init__.py", 12345, -1)
    assert image_of(package, monkeypatch) is not None


def test_settings_of_numba_leave_the_shipped_kernels(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CPU_NAME", "nehalem")
    assert image_of(package, monkeypatch) is None


def test_a_wheel_s_sets_have_the_features_that_their_instruction_sets_need() -> None:
    assert all(BY_NAME[name].needs <= set(target.features) for name, target in TARGETS.items())
