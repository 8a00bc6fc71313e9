"""Kernels go through Triton's real compiler, binder and launcher, up to a stub of libcuda that launches nothing.

Other tests run them in Triton's interpreter, which has none of these. INFER_TRITON names a folder with another version.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

HERE = Path(__file__).parent
MAX_SHARED_BYTES = 232_448  # for one program on sm_90
TYPES = ("Q4_0", "BF16")


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
    found: list[dict[str, Any]] = run_on(stub, request.param, "stub_program.py", *TYPES)["captures"]
    return found


def run_on(stub: Path, triton: str, program: str, *arguments: str) -> Any:
    """Run a program on the stub, and return its output. `triton` is a folder with another version, or empty."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [*filter(None, [triton]), *sys.path, str(HERE.parents[1] / "benchmarks")]
    environment |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "LD_LIBRARY_PATH": str(stub),
        "TRITON_LIBCUDA_PATH": str(stub),
        "TRITON_CACHE_DIR": str(stub / "cache"),
    }
    command = [sys.executable, HERE / program, *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_every_path_passes_the_launcher_within_the_device_s_limits(captures: list[dict[str, Any]]) -> None:
    paths = {(each["type"], each["path"]) for each in captures}
    assert {path for _, path in paths} >= {
        "ahead",
        "forward of 64",
        "filtered multi-step of 1",
        "filtered verifier of 8",
    }
    for launch in (launch for each in captures for launch in each["launches"]):
        assert min(launch["grid"]) >= 1
        assert launch["block"] in (32, 64, 128, 256, 512, 1024)
        assert launch["shared"] <= MAX_SHARED_BYTES


def test_a_capture_compiles_nothing_and_waits_for_nothing(captures: list[dict[str, Any]]) -> None:
    assert all(each["launches"] for each in captures)
    assert [each["path"] for each in captures if each["compiled"]] == []
    assert [(each["path"], each["forbidden"]) for each in captures if each["forbidden"]] == []


def test_recordings_ahead_compile_all_kernels_of_greedy_filtered_and_biased_answers(
    captures: list[dict[str, Any]],
) -> None:
    """Steps of one row and of eight are recorded ahead; others are recorded when they occur, without a compiler."""
    assert sum(each["compiled_before"] for each in captures if each["path"] == "ahead") >= 11
    plain = [each for each in captures if each["path"].split()[0] in ("greedy", "sampled", "biased")]
    assert {each["path"] for each in plain} >= {f"{name} multi-step of 3" for name in ("greedy", "sampled", "biased")}
    assert [each["path"] for each in plain if each["compiled_before"]] == []
    assert not any(each["path"].endswith(("step of 1", "step of 8")) for each in plain)


@pytest.mark.parametrize(
    ("type_", "embed", "to_integers", "one", "many"),
    [
        ("Q4_0", "embed_rows", "quantize_rows", "matvec", "matmul"),
        ("BF16", "embed_floats", "quantize_rows", "dense", "dense"),
    ],
)
def test_a_forward_is_eleven_launches(
    type_: str, embed: str, to_integers: str, one: str, many: str, captures: list[dict[str, Any]]
) -> None:
    for path, name in (("forward of 1", one), ("forward of 64", many)):
        (capture,) = (each for each in captures if (each["type"], each["path"]) == (type_, path))
        layer = [name, "rotate_append", "attend_chunks", name, to_integers, name, name]
        expected = [embed, to_integers, *layer, to_integers, one]  # the head has one line
        assert [launch["name"] for launch in capture["launches"]] == expected


@pytest.mark.parametrize(("type_", "few", "many"), [("Q4_0", "matvec", "matmul"), ("BF16", "dense", "dense")])
def test_experts_are_launched_without_a_wait_for_the_choice(
    type_: str, few: str, many: str, captures: list[dict[str, Any]]
) -> None:
    for path, name in (("forward of 1", few), ("forward of 64", many)):
        (capture,) = (each for each in captures if (each["type"], each["path"]) == (f"{type_} experts", path))
        names = [launch["name"] for launch in capture["launches"]]
        tiles = [] if name == "matvec" else ["plan_tiles", "fill_tiles"]
        expected = ["choose_experts", *tiles, f"expert_{name}", f"expert_{name}", "add_pairs"]
        assert [each for each in names if re.match("expert_|choose_experts|add_pairs|plan|fill", each)] == expected


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize(
    ("part", "kernels"),
    [
        ("delta nets", ["prepare_tokens", "multiply_keys", "mix_runs", "gate_heads"]),
        ("convolutions", ["convolve_tokens"]),
    ],
)
def test_the_kernels_of_a_state_are_the_same_for_one_token_and_for_many(
    part: str, kernels: list[str], type_: str, captures: list[dict[str, Any]]
) -> None:
    found = [each for each in captures if each["type"] == f"{type_} {part}"]
    assert [each["path"] for each in found] == ["forward of 1", "forward of 64"]
    for capture in found:
        names = [launch["name"] for launch in capture["launches"]]
        first = names.index(kernels[0])
        assert names[first : first + len(kernels)] == kernels
        assert "quantize_rows" not in names[first : first + len(kernels) + 1], "results are left in planes"


def test_a_forward_with_per_layer_inputs_launches_their_kernels_in_each_layer(captures: list[dict[str, Any]]) -> None:
    forwards = [each for each in captures if each["type"].endswith("per-layer inputs")]
    assert len(forwards) == 2 * len(TYPES)
    for capture in forwards:
        names = [launch["name"] for launch in capture["launches"]]
        assert [names.count(name) for name in ("rotate_append", "attend_chunks", "gate_rows")] == [3, 3, 3]
        assert sum(name.startswith("embed") for name in names) == 2
        assert names.count("add_normalized_rows") == 3 * 3 + 1  # after each part of a layer, and of the inputs


def test_a_device_that_reads_prompts_beside_answers_waits_for_no_plan(stub: Path) -> None:
    """A step takes 6 ms of the device's clock, which is more than the host takes to plan the next one."""
    (found,) = run_on(stub, os.environ.get("INFER_TRITON", ""), "stub_timeline.py", "4")
    assert found["one by one"]["mixed"] > 0.5
    assert found["behind"]["mixed"] > 0.5
    assert found["one by one"]["median"] > 0
    assert found["behind"]["median"] == 0
