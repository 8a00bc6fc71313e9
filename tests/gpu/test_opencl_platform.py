"""Claims about the choice of the OpenCL runtime that the tests of its kernels run on."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import opencl_platform
from opencl_platform import HARDWARE, OCLGRIND, PRODUCT, RUNTIMES, OpenCLRuntime, choose, icd_file, trouble_with

UNKNOWN_CPU = "error: unknown target CPU 'generic'"
ROOT = Path(__file__).parents[2]


def fake_icd(runtime: OpenCLRuntime) -> Path:
    return Path(f"{runtime.library}.icd")


def not_installed(runtime: OpenCLRuntime) -> Path:
    if runtime == RUNTIMES["intel"]:
        raise PackageNotFoundError
    return fake_icd(runtime)


def test_intel_s_runtime_is_taken_before_pocl_if_both_work() -> None:
    assert choose(RUNTIMES, fake_icd, lambda icd: "") == (Path("libintelocl.icd"), "")


def test_a_runtime_that_is_not_installed_or_does_not_work_is_passed_over() -> None:
    assert choose(RUNTIMES, not_installed, lambda icd: "")[0] == Path("libpocl.icd")
    icd, why = choose(RUNTIMES, fake_icd, lambda icd: UNKNOWN_CPU if "intel" in icd.name else "")
    assert (icd, why) == (Path("libpocl.icd"), f"intel: {UNKNOWN_CPU}")


def test_without_a_runtime_that_works_each_reason_is_given() -> None:
    icd, why = choose(RUNTIMES, not_installed, lambda icd: UNKNOWN_CPU)
    assert (icd, why) == (None, f"intel: intel-opencl-rt is not installed; pocl: {UNKNOWN_CPU}")


def test_a_library_that_is_no_opencl_platform_is_not_used(tmp_path: Path) -> None:
    pytest.importorskip("pyopencl", reason=f"{HARDWARE}pyopencl is for Linux")
    (tmp_path / "libbroken.so").write_bytes(b"\x7fELF")
    (tmp_path / "broken.icd").write_text(str(tmp_path / "libbroken.so"))
    assert "PLATFORM_NOT_FOUND" in trouble_with(tmp_path / "broken.icd")


def installed(runtime: OpenCLRuntime) -> Path:
    pytest.importorskip("pyopencl", reason=f"{HARDWARE}pyopencl is for Linux")
    try:
        return icd_file(runtime)
    except PackageNotFoundError:
        pytest.skip(f"{HARDWARE}{runtime.package} has no wheel for this machine")


def test_a_simulator_is_not_used() -> None:
    assert trouble_with(installed(OCLGRIND)) == "it is a simulator"


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (PRODUCT.replace("sum +=", "sum -="), "computes a known product wrongly"),
        (PRODUCT.replace("float sum", "unknown sum"), "error: "),
    ],
    ids=["wrong", "does not build"],
)
def test_a_runtime_that_does_not_compute_the_product_is_not_used(kernel: str, words: str) -> None:
    icd, why = opencl_platform.chosen()
    if icd is None:
        pytest.skip(HARDWARE + why)
    assert trouble_with(icd) == ""
    assert words in trouble_with(icd, kernel)


def test_the_kernels_tests_are_skipped_as_missing_hardware_if_no_runtime_works(tmp_path: Path) -> None:
    """Simulate a runtime that does not know the CPU. The same command passes in CI, which refuses other skips."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT / 'tests' / 'helpers')!r})\n"
        "import opencl_platform\n"
        f"opencl_platform.chosen = lambda: (None, 'no OpenCL runtime: ' + {UNKNOWN_CPU!r})\n"
    )
    skipped = run_tests(tmp_path, "test_opencl.py", "test_opencl_copied.py")
    assert skipped.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, skipped.stdout
    assert f"{HARDWARE}no OpenCL runtime: {UNKNOWN_CPU}" in skipped.stdout
    assert "2 skipped" in skipped.stdout
    (tmp_path / "sitecustomize.py").write_text(
        (tmp_path / "sitecustomize.py").read_text() + "opencl_platform.HARDWARE = ''\n"
    )
    assert "which CI does not allow: no OpenCL runtime" in run_tests(tmp_path, "test_opencl.py").stdout


def run_tests(folder: Path, *names: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-rs", *(str(Path(__file__).with_name(name)) for name in names)]
    environment = {**os.environ, "CI": "true", "PYTHONPATH": paths, "PYTEST_ADDOPTS": "-p no:cacheprovider"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
