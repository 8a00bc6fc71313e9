"""Claims about the machine code of attention. Triton compiles it without a GPU.

INFER_TRITON names a folder with another version of Triton, which must fulfil the same claims.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from extent import IS_WHOLE

pytest.importorskip("triton", reason="Triton is not installed")

PROGRAM = Path(__file__).parents[1] / "helpers" / "gpu_attention_code.py"
Kernels = dict[str, dict[str, Any]]
MAX_SHARED_BYTES = 101_376  # for one program on sm_89 and sm_120
# Most instructions of a warp per turn of 64 slots, by the size of heads. With float32 most of them are FFMA.
MOST_INSTRUCTIONS = {
    "f16": {64: 400, 128: 560, 256: 620},
    "bf16": {64: 450, 128: 640, 256: 700},
    "q8": {64: 1300, 128: 1300, 256: 2400},
    "q4": {64: 1500, 128: 1500, 256: 2700},
    "f32": {64: 1900, 128: 3200, 256: 3300},
}
# Number of parts of a query or weight with which tensor cores multiply each key and value.
PRODUCTS = {"f16": 2, "bf16": 3, "q8": 3, "q4": 3}
MOST_BARRIERS = 18


@pytest.fixture(scope="module", params=[os.environ.get("INFER_TRITON", "")])
def code(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kernels]:
    """Return the facts of each usual kernel and of each unusual one, by type, head size and architecture."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment["PYTHONPATH"] = os.pathsep.join([*filter(None, [request.param]), *sys.path])
    command = [sys.executable, PROGRAM, *(["all"] if IS_WHOLE else [])]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Kernels] = json.loads(ended.stdout)
    return found


@pytest.fixture(scope="module")
def kernels(code: dict[str, Kernels]) -> Kernels:
    return code["kernels"]


def parts_of(name: str) -> tuple[str, int, int]:
    kv_type, dim, target = name.split()
    return kv_type, int(dim), int(target)


def size_of(dim: int) -> int:
    return max(64, 1 << (dim - 1).bit_length())


def count(kernel: dict[str, Any], pattern: str) -> int:
    return sum(times for name, times in kernel["instructions"].items() if re.match(pattern, name))


def test_every_architecture_and_every_type_is_compiled(kernels: Kernels) -> None:
    types, dims, targets = (set(each) for each in zip(*map(parts_of, kernels), strict=True))
    assert types == set(MOST_INSTRUCTIONS)
    assert {64, 128, 256} <= dims
    assert {80, 89, 90, 120} <= targets


def test_a_program_fits_the_registers_and_the_shared_memory_of_every_gpu(kernels: Kernels) -> None:
    for name, kernel in kernels.items():
        assert kernel["spilled"] <= (80 if name.startswith("f32") else 32), name  # a few words, outside of the loop
        assert not kernel["turn"].keys() & {"LDL", "STL"}, name
        assert kernel["shared"] <= MAX_SHARED_BYTES, name
        kv_type, dim, _ = parts_of(name)
        if kv_type in ("f16", "bf16") and dim <= 128:  # four programs per multiprocessor, or three
            assert kernel["registers"] <= (128 if dim <= 64 else 168), name


def test_a_turn_of_64_slots_stays_within_its_budget(kernels: Kernels) -> None:
    for name, kernel in kernels.items():
        kv_type, dim, _ = parts_of(name)
        assert sum(kernel["turn"].values()) <= MOST_INSTRUCTIONS[kv_type][size_of(dim)], name
        assert kernel["turn"]["BAR"] <= MOST_BARRIERS, name
        if kv_type in ("f16", "bf16") and dim <= 128:
            assert kernel["turn"]["BAR"] <= 8, name


def test_tensor_cores_multiply_with_keys_and_values(kernels: Kernels) -> None:
    for name, kernel in kernels.items():
        kv_type, dim, _ = parts_of(name)
        if kv_type == "f32":
            assert kernel["turn"]["FFMA"] > 0, name
            continue
        warps = 8 if dim > 128 or (kv_type in ("q8", "q4") and dim > 64) else 4
        products = 2 * (64 // 8) * (size_of(dim) // 16) // warps  # scores and values, 16 × 8 × 16 at a time
        assert kernel["turn"]["HMMA"] == PRODUCTS[kv_type] * products, name


def test_keys_and_values_are_copied_while_others_are_multiplied(kernels: Kernels) -> None:
    for name, kernel in kernels.items():
        kv_type, dim, _ = parts_of(name)
        if kv_type in ("f16", "bf16"):
            warps = 8 if dim > 128 else 4
            assert count(kernel, r"cp\.async\.cg") > 0, name
            assert kernel["turn"]["LDGSTS"] == 2 * 64 * size_of(dim) * 2 // (16 * 32 * warps), name  # 16 bytes each
            assert kernel["turn"].get("LDG", 0) <= 1, name  # the page's number


def test_the_last_program_of_a_tile_sees_the_results_of_the_others(kernels: Kernels) -> None:
    for name, kernel in kernels.items():
        assert count(kernel, r"atom\.global\.gpu\.acq_rel\.add") == 1, name


def test_sinks_and_gates_cost_nothing_in_a_turn(code: dict[str, Kernels]) -> None:
    found = {name: kernel for name, kernel in code["unusual"].items() if len(name.split()) == 4}
    assert len(found) >= 3
    for name, kernel in found.items():
        kv_type, dim, _, _ = name.split()
        assert sum(kernel["turn"].values()) <= MOST_INSTRUCTIONS[kv_type][int(dim)], name
        assert kernel["spilled"] <= 48, name
        assert not kernel["turn"].keys() & {"LDL", "STL"}, name
        assert kernel["shared"] <= MAX_SHARED_BYTES, name


def test_heads_of_512_dimensions_fit_every_gpu(code: dict[str, Kernels]) -> None:
    """The innermost loop is a quarter of the keys of a turn. Floats of 32 bits are multiplied without tensor cores."""
    found = {name: kernel for name, kernel in code["unusual"].items() if name.split()[1] == "512"}
    assert {name.split()[2] for name in found} == {"80", "89", "90", "120"}
    for name, kernel in found.items():
        kv_type = name.split()[0]
        most = {"f16": 32, "bf16": 64, "f32": 2560}.get(kv_type, 256)
        assert kernel["spilled"] <= most, name
        assert kernel["shared"] <= MAX_SHARED_BYTES, name
        assert not kernel["turn"].keys() & {"LDL", "STL"}, name
        if kv_type != "f32":
            assert kernel["turn"]["HMMA"] == PRODUCTS[kv_type] * 8, name  # 64 / 8 by 128 / 16, on 8 warps
