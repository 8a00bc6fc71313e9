"""Kernels go through Triton's real compiler, binder and launcher, up to a stub of libcuda that launches nothing.

Other tests run them in Triton's interpreter, which has none of these. INFER_TRITON names a folder with another version.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from extent import IS_WHOLE

pytestmark = pytest.mark.slow(rest=0)  # it compiles for a minute or two

pytest.importorskip("triton", reason="Triton is not installed")

HERE = Path(__file__).parent
MAX_SHARED_BYTES = 232_448  # for one program on sm_90


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a stub libcuda.so.1."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler, which Triton needs too")
    folder = tmp_path_factory.mktemp("stub")
    library = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, HERE / "stub_libcuda.c"], check=True)
    (folder / "libcuda.so").symlink_to(library)
    return folder


@pytest.fixture(scope="module", params=[os.environ.get("INFER_TRITON", "")])
def captures(request: pytest.FixtureRequest, stub: Path) -> list[dict[str, Any]]:
    """Return the captured launches of each path. The cache is new, so every kernel is compiled."""
    found: list[dict[str, Any]] = run_on(stub, request.param, "stub_program.py")["captures"]
    return found


def run_on(stub: Path, triton: str, program: str, *arguments: str) -> Any:
    """Run a program on the stub, and return its output. `triton` is a folder with another version, or empty."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [*filter(None, [triton]), *sys.path, str(HERE.parents[1] / "benchmarks")]
    environment |= dict.fromkeys(("LD_LIBRARY_PATH", "TRITON_LIBCUDA_PATH"), str(stub))
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(stub / "cache")}
    command = [sys.executable, HERE / program, *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_every_path_passes_the_launcher_within_the_device_s_limits(captures: list[dict[str, Any]]) -> None:
    paths = {(each["type"], each["path"]) for each in captures}

    found = {path for _, path in paths}
    assert found >= {"ahead", "forward of 64", "filtered multi-step of 1", "filtered verifier of 8"}
    for launch in (launch for each in captures for launch in each["launches"]):
        assert min(launch["grid"]) >= 1
        assert launch["block"] in (32, 64, 128, 256, 512, 1024)
        assert launch["shared"] <= MAX_SHARED_BYTES


def test_a_capture_compiles_nothing_and_waits_for_nothing(captures: list[dict[str, Any]]) -> None:
    assert all(each["launches"] for each in captures)
    assert [each["path"] for each in captures if each["compiled"]] == []
    assert [(each["path"], each["forbidden"]) for each in captures if each["forbidden"]] == []


def test_recordings_ahead_compile_the_kernels_of_all_answers(captures: list[dict[str, Any]]) -> None:
    """Steps of one row and of eight are recorded ahead; others are recorded when they occur, without a compiler."""
    assert sum(each["compiled_before"] for each in captures if each["path"] == "ahead") >= 11
    plain = [each for each in captures if each["path"].split()[0] in ("greedy", "sampled", "biased")]
    assert {each["path"] for each in plain} >= {f"{name} multi-step of 3" for name in ("greedy", "sampled", "biased")}
    assert [each["path"] for each in plain if each["compiled_before"]] == []
    assert not any(each["path"].endswith(("step of 1", "step of 8")) for each in plain)


if IS_WHOLE:

    def test_a_device_that_reads_prompts_beside_answers_waits_for_no_plan(stub: Path) -> None:
        """A step takes 6 ms of the device's clock, which is more than the host takes to plan the next one."""
        (found,) = run_on(stub, os.environ.get("INFER_TRITON", ""), "stub_timeline.py", "4")
        assert found["one by one"]["mixed"] > 0.5
        assert found["behind"]["mixed"] > 0.5
        assert found["one by one"]["median"] > 0
        assert found["behind"]["median"] == 0
